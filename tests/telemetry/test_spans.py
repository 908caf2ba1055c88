"""What the spans of calls say, and how they hang together; over real ports and real OTLP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import numpy as np
import pytest

import triglot
from tests.served_models import (
    Arrays,
    Function,
    Gated,
    Served,
    both,
    calling,
    ensemble,
    serving,
    step,
    twice,
    twice_on_loop,
)
from tests.span_receivers import INTERNAL, SERVER, Received, Span, grpc_receiver
from tests.waiting import until
from triglot.core.call import Call
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.tfserving import predict_pb2, tensor_pb2

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = PARENT[:-2] + "00"
REMOTE = 0x301
"""Sampled, and the parent is known to be another process's."""


class Traced(Served):
    """A server that traces every request, its clients, and the collector of its spans."""

    def __init__(
        self,
        server: triglot.Server,
        session: aiohttp.ClientSession,
        channel: grpc.aio.Channel,
        received: Received,
    ) -> None:
        super().__init__(server)
        self.session = session
        self.channel = channel
        self.received = received

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """Status, body and header fields of the response."""
        async with self.session.post(path, json=body, headers=headers) as response:
            data = await response.read()
            fields = {name.lower(): value for name, value in response.headers.items()}
            return response.status, json.loads(data) if data else None, fields

    async def infer_rest(self, model: str, *x: int, **headers: str) -> tuple[int, Any, dict[str, str]]:
        """By KServe's REST interface."""
        tensor = {"name": "x", "datatype": "INT32", "shape": [len(x)], "data": list(x)}
        return await self.post(f"/v2/models/{model}/infer", {"inputs": [tensor]}, **headers)

    async def infer_grpc(self, model: str, *x: int, **metadata: str) -> pb.ModelInferResponse:
        """By KServe's gRPC interface."""
        call = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        data = await call(message(model, *x).SerializeToString(), metadata=list(metadata.items()))
        return pb.ModelInferResponse.FromString(data)

    async def spans(self, count: int) -> list[Span]:
        """All that were received, which are so many."""
        spans = await asyncio.to_thread(self.received.wait_for, count)
        assert len(spans) == count, [span.name for span in spans]
        return spans


def message(model: str, *x: int, **parameters: str) -> pb.ModelInferRequest:
    """A request of KServe's."""
    request = pb.ModelInferRequest(
        model_name=model,
        id="my id",
        inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[len(x)])],
        raw_input_contents=[np.array(x, "<i4").tobytes()],
    )
    for name, value in parameters.items():
        request.parameters[name].string_param = value
    return request


def tensorflow_request(model: str) -> predict_pb2.PredictRequest:
    request = predict_pb2.PredictRequest(model_spec={"name": model})
    request.inputs["x"].CopyFrom(
        tensor_pb2.TensorProto(dtype=tensor_pb2.DT_INT32, tensor_shape={"dim": [{"size": 1}]}, int_val=[1])
    )
    return request


def grps_request(model: str) -> grps_pb2.GrpsMessage:
    request = grps_pb2.GrpsMessage(model=f"{model}-1")
    request.gtensors.tensors.add(name="x", dtype=grps_pb2.DT_INT32, shape=[1], flat_int32=[1])
    return request


GRPS_BODY = {"gtensors": {"tensors": [{"name": "x", "dtype": "DT_INT32", "shape": [1], "flat_int32": [1]}]}}


@asynccontextmanager
async def traced(
    monkeypatch: pytest.MonkeyPatch, models: Mapping[str, triglot.Model], **options: Any
) -> AsyncIterator[Traced]:
    with grpc_receiver() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "20")
        async with (
            serving(models, protocols="kserve,tfserving,grps", **options) as it,
            aiohttp.ClientSession(f"http://127.0.0.1:{it.server.rest_port}") as session,
            grpc.aio.insecure_channel(f"127.0.0.1:{it.server.grpc_port}") as channel,
        ):
            yield Traced(it.server, session, channel, received)


def named(spans: list[Span], name: str) -> Span:
    """The one of this name."""
    (found,) = [span for span in spans if span.name == name]
    return found


async def test_a_grpc_call_by_the_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch, {"twice": Function(twice)}) as it:
        await it.infer_grpc("twice", 1, traceparent=PARENT, tracestate="vendor=1")
        spans = await it.spans(3)
        method = "inference.GRPCInferenceService/ModelInfer"
        call, queue, compute = named(spans, method), named(spans, "queue"), named(spans, "compute")
        assert call.attributes == {
            "rpc.system.name": "grpc",
            "rpc.method": method,
            "rpc.response.status_code": "OK",
            "triglot.protocol": "kserve",
            "triglot.model.name": "twice",
            "triglot.model.version": 1,
            "triglot.request.id": "my id",
            "client.address": "127.0.0.1",
        }
        assert (call.kind, call.trace, call.parent) == (SERVER, PARENT[3:35], PARENT[36:52])
        assert (call.state, call.flags, call.is_error, call.links) == ("vendor=1", REMOTE, False, [])
        for below in (queue, compute):
            assert (below.kind, below.trace, below.parent) == (INTERNAL, call.trace, call.id)
        assert compute.attributes == {"triglot.model.name": "twice", "triglot.model.version": 1}
        assert call.start <= queue.start <= queue.end == compute.start <= compute.end <= call.end
        assert call.resource["service.name"] == "triglot"


async def test_a_rest_call_by_the_conventions(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch, {"twice": Function(twice)}) as it:
        status, _, fields = await it.infer_rest("twice", 1, traceparent=PARENT, tracestate="vendor=1")
        assert status == 200
        call = named(await it.spans(3), "POST /v2/models/{model}/infer")
        assert call.attributes == {
            "http.request.method": "POST",
            "http.route": "/v2/models/{model}/infer",
            "http.response.status_code": 200,
            "url.scheme": "http",
            "url.path": "/v2/models/twice/infer",
            "triglot.protocol": "kserve",
            "triglot.code": "OK",
            "triglot.model.name": "twice",
            "triglot.model.version": 1,
            "client.address": "127.0.0.1",
        }
        assert (call.kind, call.trace, call.parent, call.flags) == (SERVER, PARENT[3:35], PARENT[36:52], REMOTE)
        assert fields["traceparent"] == f"00-{call.trace}-{call.id}-01"
        assert fields["tracestate"] == "vendor=1"


async def test_what_a_url_asks_is_in_no_span(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch, {"twice": Function(twice)}) as it:
        await it.post("/v2/models/twice/infer?token=secret", {"inputs": []})
        (call,) = await it.spans(1)
        assert (call.code, call.attributes["http.response.status_code"]) == ("INVALID_ARGUMENT", 400)
        assert call.attributes["url.path"] == "/v2/models/twice/infer"
        assert "secret" not in repr(call)


async def test_every_protocol(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch, {"twice": Function(twice_on_loop)}) as it:
        predict, grps = tensorflow_request("twice"), grps_request("twice")
        for path, data in (
            ("/tensorflow.serving.PredictionService/Predict", predict),
            ("/grps.protos.v1.GrpsService/Predict", grps),
        ):
            await it.channel.unary_unary(path)(data.SerializeToString(), metadata=[("traceparent", PARENT)])
        stream = it.channel.unary_stream("/grps.protos.v1.GrpsService/PredictStreaming")
        assert [
            response async for response in stream(grps.SerializeToString(), metadata=[("traceparent", PARENT)])
        ]
        await it.post("/v1/models/twice:predict", {"instances": [1]}, traceparent=PARENT)
        await it.post("/grps/v1/infer/predict", GRPS_BODY | {"model": "twice-1"}, traceparent=PARENT)
        spans = await it.spans(15)
        calls = {span.name: span for span in spans if span.kind == SERVER}
        assert calls.keys() == {
            "tensorflow.serving.PredictionService/Predict",
            "grps.protos.v1.GrpsService/Predict",
            "grps.protos.v1.GrpsService/PredictStreaming",
            "POST /{v1}/{path}:{verb}",
            "POST /grps/v1/infer/predict",
        }
        assert {span.parent for span in calls.values()} == {PARENT[36:52]}
        assert {span.code for span in calls.values()} == {"OK"}
        computed = [span for span in spans if span.name == "compute"]
        assert {span.parent for span in computed} == {span.id for span in calls.values()}


async def test_each_message_of_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    other = "00-11111111111111111111111111111111-2222222222222222-01"
    unsampled = "00-33333333333333333333333333333333-4444444444444444-00"
    async with traced(monkeypatch, {"twice": Function(twice)}) as it:
        call = it.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        requests = [
            message("twice", 1),
            message("twice", 2, traceparent=other, tracestate="a=1"),
            message("twice", 3, traceparent=unsampled),
            message("nobody", 4),
        ]
        sent = iter([request.SerializeToString() for request in requests])
        assert len([response async for response in call(sent, metadata=[("traceparent", PARENT)])]) == 4
        spans = [span for span in await it.spans(7) if span.kind == SERVER]
        assert {span.name for span in spans} == {"inference.GRPCInferenceService/ModelStreamInfer"}
        assert sorted((span.trace, span.parent, span.state, span.code) for span in spans) == [
            (PARENT[3:35], PARENT[36:52], "", "NOT_FOUND"),
            (PARENT[3:35], PARENT[36:52], "", "OK"),
            (other[3:35], other[36:52], "a=1", "OK"),
        ]


async def test_an_unsampled_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, str]] = []

    def infer(inputs: Arrays, call: Call) -> Any:
        seen.append((call.traceparent, call.tracestate))
        return twice(inputs)

    async with traced(monkeypatch, {"looks": Function(infer)}) as it:
        await it.infer_grpc("looks", 1, traceparent=UNSAMPLED, tracestate="a=1")
        _, _, fields = await it.infer_rest("looks", 1, traceparent=UNSAMPLED)
        assert "traceparent" not in fields
        assert seen == [(UNSAMPLED, "a=1"), (UNSAMPLED, "")]
        await it.infer_grpc("looks", 1)
        spans = await it.spans(3)
        assert spans[0].parent == ""
        assert seen[2] == (f"00-{spans[0].trace}-{named(spans, 'compute').id}-01", "")


async def test_a_damaged_parent_begins_a_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch, {"twice": Function(twice_on_loop)}) as it:
        await it.infer_grpc("twice", 1, traceparent="00-" + "0" * 32 + "-b7ad6b7169203331-01", tracestate="a=1")
        call, *_ = await it.spans(3)
        assert (call.parent, call.state) == ("", "")
        assert call.trace != "0" * 32


async def test_probes_and_questions_have_no_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch, {"twice": Function(twice_on_loop)}) as it:
        for path in (
            "/v2/health/ready",
            "/v2/models/twice/ready",
            "/v2/models/twice",
            "/metrics",
            "/v1/models/twice",
        ):
            async with it.session.get(path, headers={"traceparent": PARENT}) as response:
                assert response.status == 200
        await it.channel.unary_unary("/grpc.health.v1.Health/Check")(b"")
        await it.infer_rest("twice", 1)
        await it.spans(3)


async def test_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: Arrays) -> Any:
        raise RuntimeError("broken")

    async with traced(monkeypatch, {"fails": Function(fails)}) as it:
        for model in ("fails", "nobody"):
            with pytest.raises(grpc.aio.AioRpcError):
                await it.infer_grpc(model, 1)
            assert (await it.infer_rest(model, 1))[0] in (500, 404)
        spans = {(span.name.split()[0], span.code): span for span in await it.spans(8) if span.kind == SERVER}
        method = "inference.GRPCInferenceService/ModelInfer"
        assert {key: (span.is_error, span.attributes.get("error.type")) for key, span in spans.items()} == {
            (method, "INTERNAL"): (True, "INTERNAL"),
            (method, "NOT_FOUND"): (False, None),
            ("POST", "INTERNAL"): (True, "500"),
            ("POST", "NOT_FOUND"): (False, None),
        }


@both
async def test_a_model_that_calls_models(monkeypatch: pytest.MonkeyPatch, on_loop: bool) -> None:
    models = {
        "outer": calling("middle", on_loop=on_loop),
        "middle": calling("inner", on_loop=not on_loop),
        "inner": Function(twice),
    }
    async with traced(monkeypatch, models) as it:
        await it.infer_grpc("outer", 3, traceparent=PARENT)
        spans = await it.spans(9)
        assert {span.trace for span in spans} == {PARENT[3:35]}
        by_id = {span.id: span for span in spans}

        def path(span: Span) -> list[str]:
            return [span.name, *(path(by_id[span.parent]) if span.parent in by_id else [])]

        (innermost,) = [
            span for span in spans if span.name == "compute" and span.attributes["triglot.model.name"] == "inner"
        ]
        assert path(innermost) == [
            "compute",
            "infer inner",
            "compute",
            "infer middle",
            "compute",
            "inference.GRPCInferenceService/ModelInfer",
        ]
        for span in spans:
            if span.parent in by_id:
                parent = by_id[span.parent]
                assert parent.start <= span.start
                assert span.end <= parent.end + 1_000_000  # A thread may say that it ended after the loop has.


async def test_an_ensemble(monkeypatch: pytest.MonkeyPatch) -> None:
    models = {
        "both": ensemble(step("a", "x", "t"), step("b", "t", "y")),
        "a": Function(twice),
        "b": Function(twice),
    }
    async with traced(monkeypatch, models) as it:
        answer = await it.infer_grpc("both", 3, traceparent=PARENT)
        assert np.frombuffer(answer.raw_output_contents[0], "<i4").tolist() == [12]
        spans = await it.spans(9)
        of_ensemble = [
            span for span in spans if span.name == "compute" and span.attributes["triglot.model.name"] == "both"
        ]
        steps = [named(spans, "infer a"), named(spans, "infer b")]
        assert {step.parent for step in steps} == {span.id for span in of_ensemble}
        assert {step.kind for step in steps} == {INTERNAL}


async def test_a_batch_is_one_span_with_links(monkeypatch: pytest.MonkeyPatch) -> None:
    parents_seen: list[str] = []

    def infer(inputs: Arrays, call: Call) -> Any:
        parents_seen.append(call.traceparent)
        if inputs["x"][0] == 0:
            first.wait_at("infer")
        return twice(inputs)

    first = Gated()
    model = Function(infer, max_batch_size=8, dynamic_batching=triglot.DynamicBatching(), instances=1)
    model.inputs, model.outputs = (
        [triglot.TensorSpec("x", "INT32", [-1])],
        [triglot.TensorSpec("y", "INT32", [-1])],
    )
    async with traced(monkeypatch, {"batched": model}) as it:
        running = asyncio.ensure_future(it.infer_grpc("batched", 0, traceparent=UNSAMPLED))
        await first.until_at("infer")
        parents = [f"00-{number:032x}-{number:016x}-01" for number in range(1, 4)]
        others = [asyncio.ensure_future(it.infer_grpc("batched", 1, traceparent=parent)) for parent in parents]
        unsampled = asyncio.ensure_future(it.infer_grpc("batched", 1, traceparent=UNSAMPLED))
        await until(lambda: it.server.dataplane.queue_depth() == 4)
        first.open_point("infer")
        await asyncio.gather(running, unsampled, *others)
        spans = await it.spans(10)
        batch = named(spans, "batch")
        calls = [span for span in spans if span.kind == SERVER]
        assert sorted(batch.links) == sorted((call.trace, call.id) for call in calls)
        assert batch.attributes == {
            "triglot.model.name": "batched",
            "triglot.model.version": 1,
            "triglot.batch.size": 4,
            "triglot.batch.rows": 4,
        }
        assert (batch.trace, batch.parent) in [(call.trace, call.id) for call in calls]
        computed = [span for span in spans if span.name == "compute"]
        assert [span.links for span in computed] == [[(batch.trace, batch.id)]] * 3
        assert parents_seen[-1] == f"00-{batch.trace}-{batch.id}-01"


async def test_a_call_that_waits_in_vain(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Gated()
    async with traced(monkeypatch, {"gated": model}) as it:
        running = asyncio.ensure_future(it.infer_grpc("gated", 0, traceparent=UNSAMPLED))
        await model.until_at("infer")
        call = it.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        late = call(message("gated", 1).SerializeToString(), timeout=0.2)
        assert await late.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        spans = await it.spans(2)
        assert named(spans, "inference.GRPCInferenceService/ModelInfer").code == "DEADLINE_EXCEEDED"
        queue = named(spans, "queue")
        assert queue.end - queue.start > 100_000_000
        model.open_point("infer")
        await running


async def test_how_many_were_exported_is_a_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    async with traced(monkeypatch, {"twice": Function(twice)}) as it:
        await it.infer_rest("twice", 1)
        await it.spans(3)

        async def found() -> dict[str, str]:
            async with it.session.get("/metrics") as response:
                lines = (await response.text()).splitlines()
            return dict(line.rsplit(" ", 1) for line in lines if line.startswith("triglot_spans_"))

        async with asyncio.timeout(20):  # The collector has them before the server has heard so.
            while (counts := await found())["triglot_spans_exported_total"] != "3.0":
                pass
        assert counts == {
            "triglot_spans_exported_total": "3.0",
            'triglot_spans_lost_total{reason="queue_full"}': "0.0",
            'triglot_spans_lost_total{reason="export_failed"}': "0.0",
            'triglot_spans_lost_total{reason="rejected"}': "0.0",
        }


@pytest.mark.parametrize("refusal", ["UNAUTHENTICATED", "RESOURCE_EXHAUSTED"])
async def test_a_refused_call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, refusal: str) -> None:
    model = Gated()
    options: dict[str, Any] = {"max_queue_size": 1}
    if refusal == "UNAUTHENTICATED":
        access = tmp_path / "access.toml"
        access.write_text('[anonymous]\noperations = ["health"]\n')
        options = {"access": str(access)}
    async with traced(monkeypatch, {"gated": model}, **options) as it:
        running = []
        if refusal == "RESOURCE_EXHAUSTED":
            running.append(asyncio.ensure_future(it.infer_grpc("gated", 0, traceparent=UNSAMPLED)))
            await model.until_at("infer")
            running.append(asyncio.ensure_future(it.infer_grpc("gated", 1, traceparent=UNSAMPLED)))
            await until(lambda: it.server.dataplane.queue_depth() == 1)
        predict, grps = tensorflow_request("gated"), grps_request("gated")
        for path, data in (
            ("/inference.GRPCInferenceService/ModelInfer", message("gated", 1)),
            ("/tensorflow.serving.PredictionService/Predict", predict),
            ("/grps.protos.v1.GrpsService/Predict", grps),
        ):
            call = it.channel.unary_unary(path)(data.SerializeToString(), metadata=[("traceparent", PARENT)])
            code = (await call.code()).name
            assert code == refusal or (path.startswith("/grps") and code == "OK")
        await it.infer_rest("gated", 1, traceparent=PARENT)
        await it.post("/v1/models/gated:predict", {"instances": [1]}, traceparent=PARENT)
        await it.post("/grps/v1/infer/predict", GRPS_BODY | {"model": "gated-1"}, traceparent=PARENT)
        spans = await it.spans(6)
        assert {(span.code, span.parent, span.kind) for span in spans} == {(refusal, PARENT[36:52], SERVER)}
        assert len({span.name for span in spans}) == 6
        model.open_point("infer")
        await asyncio.gather(*running)
