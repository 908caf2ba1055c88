"""A server in this process, requests to it, and its statistics and metrics (spec 5.9, 6)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc
import grpc.aio
import numpy as np
from prometheus_client.parser import text_string_to_metric_families

import triglot
from tests.process import SECONDS
from tests.served_models import Arrays, Served, X, Y, serving
from tests.waiting import until
from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING
from triglot.pb.kserve import inference_pb2 as pb
from triglot.testing import GatedModel

METHOD = "/inference.GRPCInferenceService/"
DURATIONS = (
    "success",
    "fail",
    "queue",
    "compute_input",
    "compute_infer",
    "compute_output",
    "cache_hit",
    "cache_miss",
)
RESPONSE_DURATIONS = ("compute_infer", "compute_output", "success", "fail", "empty_response", "cancel")
Stats = Mapping[str, Any]


class CountingServer(Served):
    """A running server, with clients over gRPC (`channel`) and REST (`session`)."""

    def __init__(self, server: triglot.Server, channel: grpc.aio.Channel, session: aiohttp.ClientSession) -> None:
        super().__init__(server)
        self.channel = channel
        self.session = session
        self.url = f"http://127.0.0.1:{server.rest_port}"

    def ask(self, model: str, *values: int, **parameters: int | bool) -> asyncio.Task[Code]:
        """Start a ModelInfer call in a task that returns its status code."""
        return asyncio.ensure_future(self.code(model, *values, **parameters))

    async def code(self, model: str, *values: int, **parameters: int | bool) -> Code:
        """Call ModelInfer with this input; returns the status code."""
        try:
            await self.channel.unary_unary(METHOD + "ModelInfer")(message(model, *values, **parameters))
        except grpc.aio.AioRpcError as error:
            return Code(error.code().value[0])
        return Code.OK

    def stream(self, model: str, *values: int) -> grpc.aio.StreamStreamCall:
        """Start a ModelStreamInfer call with one request; the client then closes its side of the stream."""

        async def requests() -> AsyncIterator[bytes]:
            yield message(model, *values)

        return self.channel.stream_stream(METHOD + "ModelStreamInfer")(requests())

    async def streamed(self, model: str, *values: int) -> list[str]:
        """Call ModelStreamInfer; returns the error of each response, "" for success."""
        parse = pb.ModelStreamInferResponse.FromString
        return [parse(answer).error_message async for answer in self.stream(model, *values)]

    async def get(self, path: str) -> tuple[int, Any]:
        """Send a GET request; returns the response's status and decoded JSON."""
        async with self.session.get(self.url + path) as response:
            return response.status, json.loads(await response.read())

    async def all_stats(self, name: str = "", version: str = "") -> list[Stats]:
        """Return the statistics of models; expects them to be the same over gRPC and REST."""
        request = pb.ModelStatisticsRequest(name=name, version=version)
        call = self.channel.unary_unary(METHOD + "ModelStatistics")(request.SerializeToString(), timeout=SECONDS)
        reply = pb.ModelStatisticsResponse.FromString(await call)
        parts = ["/v2/models", name, *(["versions", version] if version else []), "stats"]
        status, document = await self.get("/".join(filter(None, parts)))
        assert status == 200, document
        assert list(document) == ["model_stats"]
        found: list[Stats] = document["model_stats"]
        assert found == [from_message(stats) for stats in reply.model_stats]
        return found

    async def stats(self, name: str) -> Stats:
        """Return the statistics of a model with one version."""
        (found,) = await self.all_stats(name)
        return found

    async def waiting(self, requests: int) -> None:
        """Wait until this number of requests is queued."""
        await until(lambda: self.server.dataplane.queue_depth() == requests)

    async def executed(self, name: str, times: int) -> Stats:
        """As `stats`, once the model was executed this often, for example after its caller has disconnected."""
        version = self.server.dataplane.servable(EVERYTHING, name)
        await until(lambda: version.statistics.execution_count >= times)
        return await self.stats(name)

    async def metrics(self, model: str) -> dict[str, float]:
        """Return Triton's metrics of a model by name, without "nv_"; failures by their reason."""
        async with self.session.get(self.url + "/metrics") as response:
            text = await response.text()
        return {
            # The parser renames counters as in OpenMetrics, with the suffix "_total".
            sample.labels.get("reason", sample.name.removeprefix("nv_").removesuffix("_total")): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("nv_") and sample.labels.get("model") == model
        }

    async def failures(self, model: str) -> dict[str, int]:
        """Return the numbers of failures by reason, without those that are 0."""
        metrics = await self.metrics(model)
        reasons = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
        assert set(reasons) <= set(metrics)
        return {reason: int(metrics[reason]) for reason in reasons if metrics[reason]}


class Failing(GatedModel):
    """A model that waits until the test lets it, then acts as `failing`."""

    inputs, outputs = X, Y

    def infer(self, inputs: Arrays) -> dict[str, Any]:
        self.wait_at("infer")
        return failing(inputs)


def failing(inputs: Arrays) -> dict[str, Any]:
    """An `infer` that doubles `x`. Raise `ValueError` if an element is below zero."""
    if (inputs["x"] < 0).any():
        raise ValueError("below zero")
    return {"y": inputs["x"] * 2}


@asynccontextmanager
async def counting(models: Mapping[str, triglot.Model], **options: Any) -> AsyncIterator[CountingServer]:
    """Run a server with these models, given by name; `options` are those of `triglot.Config`."""
    async with (
        serving(models, **options) as served,
        grpc.aio.insecure_channel(f"127.0.0.1:{served.server.grpc_port}") as channel,
        aiohttp.ClientSession() as session,
    ):
        yield CountingServer(served.server, channel, session)


def message(model: str, *values: int, **parameters: int | bool) -> bytes:
    """Return a serialized ModelInferRequest with the INT32 input `x` of shape [values]."""
    x = np.array(values, "<i4")
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[x.tobytes()])
    request.inputs.add(name="x", datatype="INT32", shape=x.shape)
    for name, value in parameters.items():
        setattr(request.parameters[name], "bool_param" if isinstance(value, bool) else "int64_param", value)
    return request.SerializeToString()


def from_message(stats: pb.ModelStatistics) -> Stats:
    """Return statistics as REST formats them (spec 3.12), by code independent of the server's."""
    return {
        "name": stats.name,
        "version": stats.version,
        "last_inference": stats.last_inference,
        "inference_count": stats.inference_count,
        "execution_count": stats.execution_count,
        "inference_stats": _durations(stats.inference_stats, DURATIONS),
        "response_stats": {
            index: _durations(stats.response_stats[index], RESPONSE_DURATIONS) for index in stats.response_stats
        },
        "batch_stats": [
            {"batch_size": batch.batch_size}
            | _durations(batch, ("compute_input", "compute_infer", "compute_output"))
            for batch in stats.batch_stats
        ],
        "memory_usage": [],
    }


def _durations(message: Any, names: Sequence[str]) -> dict[str, Any]:
    return {name: {"count": getattr(message, name).count, "ns": getattr(message, name).ns} for name in names}


def counts(stats: Stats) -> dict[str, int]:
    """Return the counts in a model's statistics by name, also `inferences` and `executions`, without zeros."""
    found = {name: stats["inference_stats"][name]["count"] for name in DURATIONS}
    # These count the same requests.
    assert found["compute_input"] == found["compute_infer"] == found.pop("compute_output")
    found |= {"inferences": stats["inference_count"], "executions": stats["execution_count"]}
    found["computed"] = found.pop("compute_input")
    del found["compute_infer"]
    return {name: count for name, count in found.items() if count}


def succeeded(requests: int, inferences: int = 0, executions: int = 0, **more: int) -> dict[str, int]:
    """Return the expected `counts` of successful requests, by default with one inference and execution each."""
    return {
        "success": requests,
        "queue": requests,
        "inferences": inferences or requests,
        "executions": executions or requests,
        "computed": requests,
    } | more


def batches(stats: Stats) -> dict[int, int]:
    """Return the number of batches by their size."""
    found = {}
    for model_stats in stats["batch_stats"]:
        (count,) = {model_stats[name]["count"] for name in ("compute_input", "compute_infer", "compute_output")}
        found[model_stats["batch_size"]] = count
    assert sum(found.values()) == stats["execution_count"]
    return found


def responses(stats: Stats) -> dict[str, dict[str, int]]:
    """Return counts of outcomes by the response's index in a stream; `success` equals the number computed."""
    found = {}
    for index, model_stats in stats["response_stats"].items():
        assert (
            model_stats["compute_infer"]["count"]
            == model_stats["compute_output"]["count"]
            == model_stats["success"]["count"]
        )
        kinds = ("success", "fail", "empty_response", "cancel")
        found[index] = {name: model_stats[name]["count"] for name in kinds if model_stats[name]["count"]}
    return dict(sorted(found.items(), key=lambda item: int(item[0])))


def ns(stats: Stats) -> dict[str, int]:
    """Return the total nanoseconds of each duration."""
    return {name: stats["inference_stats"][name]["ns"] for name in DURATIONS}
