"""A server whose models are asked in all three protocols, and what /metrics says of it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc.aio
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

import triglot
from tests.process import SECONDS, write_model
from triglot import testing
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2

MODEL, VERSION = "half", 1
OTHER_MODEL = "twice"
BROKEN_MODEL, BROKEN_TEXT = "broken", "<img src=x onerror=alert(1)> & co"
MODEL_TEXT = """
import triglot

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        return {{"y": inputs["x"] * {factor}}}
"""
INFERENCE_METHODS = {"ModelInfer", "Predict", "predict"}
"""The methods, as /metrics names them, of the calls that `Load` makes."""


@asynccontextmanager
async def served(folder: Path) -> AsyncIterator[triglot.Server]:
    """Two models that answer, and one that cannot be loaded, on free ports."""
    write_model(folder / MODEL, MODEL_TEXT.format(factor=0.5))
    write_model(folder / OTHER_MODEL, MODEL_TEXT.format(factor=2))
    write_model(folder / BROKEN_MODEL, f"raise RuntimeError({BROKEN_TEXT!r})")
    options: dict[str, Any] = {"exit_on_load_error": False, "grace": 0.0, "server_name": "the <i>server</i>"}
    async with testing.serve(folder, **options) as running:
        yield running.server


class Load:
    """Calls in KServe V2 over gRPC, TensorFlow Serving over REST, and grps over both."""

    def __init__(self, server: triglot.Server, channel: grpc.aio.Channel, session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{server.rest_port}"
        self._session = session
        self._infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        self._predict = channel.unary_unary(
            "/grps.protos.v1.GrpsService/Predict", response_deserializer=grps_pb2.GrpsMessage.FromString
        )

    async def kserve(self, model: str = MODEL, datatype: str = "FP32") -> bool:
        """ModelInfer; whether it went well, as of all of these."""
        request = inference_pb2.ModelInferRequest(
            model_name=model, raw_input_contents=[np.ones(2, "<f4").tobytes()]
        )
        request.inputs.add(name="x", datatype=datatype, shape=[2])
        try:
            await self._infer(request.SerializeToString(), timeout=SECONDS)
        except grpc.aio.AioRpcError:
            return False
        return True

    async def tfserving(self, model: str = MODEL, instance: object = 1.0) -> bool:
        """:predict."""
        return await self._post(f"/v1/models/{model}:predict", {"instances": [instance]})

    async def grps(self, model: str = MODEL, data: object = (1.0, 2.0)) -> bool:
        """/grps/v1/infer/predict."""
        return await self._post("/grps/v1/infer/predict", {"model": f"{model}-{VERSION}", "ndarray": data})

    async def grps_grpc(self, model: str = MODEL) -> bool:
        """Predict."""
        request = grps_pb2.GrpsMessage(model=f"{model}-{VERSION}")
        request.gtensors.tensors.add(name="x", dtype=grps_pb2.DT_FLOAT32, shape=[2], flat_float32=[1.0, 2.0])
        answer = await self._predict(request.SerializeToString(), timeout=SECONDS)
        return bool(answer.status.status == grps_pb2.Status.SUCCESS)

    async def _post(self, path: str, body: object) -> bool:
        async with self._session.post(self.url + path, json=body) as response:
            await response.read()
            return response.status == 200

    async def round(self) -> None:
        """Each protocol once, and well."""
        answers = await asyncio.gather(
            self.kserve(), self.kserve(OTHER_MODEL), self.tfserving(), self.grps(), self.grps_grpc()
        )
        assert all(answers), answers

    async def failures(self) -> None:
        """Each protocol once with an input that the model does not take, and each once for no such model."""
        answers = await asyncio.gather(
            self.kserve(datatype="INT32"),
            self.tfserving(instance="text"),
            self.grps(data="text"),
            self.kserve("nobody"),
            self.tfserving("nobody"),
            self.grps("nobody"),
            self.grps_grpc("nobody"),
        )
        assert not any(answers), answers

    @asynccontextmanager
    async def going_on(self) -> AsyncIterator[None]:
        """One round after the other as long as the block runs; the last one is complete when it ends."""
        ends = asyncio.Event()

        async def rounds() -> None:
            while not ends.is_set():
                await self.round()
                # A page that is looked at shall have its turn.
                with suppress(TimeoutError):
                    await asyncio.wait_for(ends.wait(), 0.01)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(rounds())
            try:
                yield
            finally:
                ends.set()

    async def get(self, path: str) -> str:
        """The text of a page."""
        async with self._session.get(self.url + path) as response:
            assert response.status == 200, path
            return await response.text()


@asynccontextmanager
async def load_of(server: triglot.Server) -> AsyncIterator[Load]:
    """Clients of the server's ports."""
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
        aiohttp.ClientSession() as session,
    ):
        yield Load(server, channel, session)


class Count(NamedTuple):
    """Calls that ran a model, or were to."""

    requests: int = 0
    failures: int = 0


class Numbers(NamedTuple):
    """What the page shows and /metrics says: calls in all, by protocol, by model, and by both."""

    total: Count
    protocols: Mapping[str, Count]
    models: Mapping[str, Count]
    models_and_protocols: Mapping[tuple[str, str], int]


def _counts(samples: list[Any], key: Callable[[Mapping[str, str]], Any]) -> dict[Any, Count]:
    requests: Counter[Any] = Counter()
    failures: Counter[Any] = Counter()
    for sample in samples:
        requests[key(sample.labels)] += int(sample.value)
        failures[key(sample.labels)] += int(sample.value) if sample.labels["code"] != "OK" else 0
    return {name: Count(count, failures[name]) for name, count in requests.items()}


def numbers_of(metrics: str) -> Numbers:
    """What /metrics says."""
    samples = [
        sample
        for sample in _samples(metrics, "triglot_requests_total")
        if sample.labels["method"] in INFERENCE_METHODS
    ]
    # What nobody loaded has no row on the page.
    found = [sample for sample in samples if sample.labels["version"]]
    both = _counts(found, lambda labels: (labels["model"], labels["protocol"]))
    return Numbers(
        _counts(samples, lambda _: "")[""],
        _counts(samples, lambda labels: labels["protocol"]),
        _counts(found, lambda labels: labels["model"]),
        {key: count.requests for key, count in both.items()},
    )


def ready_models(metrics: str) -> dict[str, bool]:
    """Which models serve, by /metrics."""
    return {sample.labels["model"]: sample.value == 1 for sample in _samples(metrics, "triglot_model_ready")}


def _samples(metrics: str, name: str) -> list[Any]:
    families = text_string_to_metric_families(metrics)
    return [sample for family in families for sample in family.samples if sample.name == name]
