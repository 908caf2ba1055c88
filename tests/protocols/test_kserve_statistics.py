"""ModelStatistics: which models it reports, how, and what it refuses, over gRPC and REST (spec 1.3, 3.12)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.process import write_model
from tests.protocols.control_clients import ask, put, put_config
from tests.protocols.kserve_served import Served, serve_models
from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING
from triglot.core.statistics import MAX_RESPONSES, Statistics
from triglot.pb.kserve import inference_pb2 as pb

ALL = "version_policy { all {} }"
MANY = 500_000
"""Texts that take long to make of a request's bytes."""


async def by_grpc(served: Served, name: str = "", version: str = "") -> Code | list[str]:
    """The reported versions, or the error."""
    request = pb.ModelStatisticsRequest(name=name, version=version)
    code, text, reply = await served.grpc.call("ModelStatistics", request.SerializeToString())
    if code is not Code.OK:
        assert name in text
        return code
    return [f"{stats.name}/{stats.version}" for stats in pb.ModelStatisticsResponse.FromString(reply).model_stats]


async def by_rest(served: Served, path: str) -> tuple[int, Any]:
    status, headers, reply = await served.rest.call("GET", path)
    assert headers["Content-Type"] == "application/json"
    return status, json.loads(reply)


async def versions_by_rest(served: Served, path: str) -> int | list[str]:
    status, document = await by_rest(served, path)
    return (
        status if status != 200 else [f"{stats['name']}/{stats['version']}" for stats in document["model_stats"]]
    )


async def test_reported_versions(tmp_path: Path) -> None:
    for number in ("1", "2"):
        put(tmp_path / "a" / number)
    put_config(tmp_path / "a", ALL)
    put(tmp_path / "b" / "1")
    put(tmp_path / "never" / "1")
    options: dict[str, Any] = {"model_control_mode": "explicit", "load_model": "a,b"}
    async with serve_models([tmp_path], **options) as served:
        for name, version, found in (
            ("", "", ["a/1", "a/2", "b/1"]),
            ("a", "", ["a/1", "a/2"]),
            ("a", "2", ["a/2"]),
            ("b", "", ["b/1"]),
        ):
            assert await by_grpc(served, name, version) == found
            model = f"/{name}/versions/{version}" if version else f"/{name}" if name else ""
            assert await versions_by_rest(served, f"/v2/models{model}/stats") == found
        assert await by_grpc(served, version="2") == ["a/1", "a/2", "b/1"]

        await served.server.dataplane.unload_model(EVERYTHING, "a")
        assert await by_grpc(served) == await versions_by_rest(served, "/v2/models/stats") == ["b/1"]
        for version in ("", "2"):
            assert await by_grpc(served, "a", version) is Code.INVALID_ARGUMENT
            path = f"/v2/models/a/versions/{version}/stats" if version else "/v2/models/a/stats"
            assert await by_rest(served, path) == (400, {"error": "requested model 'a' is not available"})


async def test_missing_models_and_versions(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1")
    async with serve_models([tmp_path]) as served:
        for name, version, code, status in (
            ("other", "", Code.NOT_FOUND, 404),
            ("a", "2", Code.NOT_FOUND, 404),
            ("other", "1", Code.NOT_FOUND, 404),
            ("a", "one", Code.NOT_FOUND, 404),
            ("a", "1.0", Code.NOT_FOUND, 404),
        ):
            assert await by_grpc(served, name, version) is code
            model = f"{name}/versions/{version}" if version else name
            assert await versions_by_rest(served, f"/v2/models/{model}/stats") == status
        for name, version in (("a", "-1"), ("", "one")):
            assert await by_grpc(served, name, version) is Code.INVALID_ARGUMENT
        assert (await served.rest.call("POST", "/v2/models/a/stats"))[0] == 405


async def test_the_extension_is_named(tmp_path: Path) -> None:
    put(tmp_path / "a" / "1")
    async with serve_models([tmp_path]) as served:
        status, metadata = await by_rest(served, "/v2")
        assert (status, "statistics" in metadata["extensions"]) == (200, True)


@pytest.mark.parametrize("called", [False, True])
async def test_every_key_is_present_and_every_number_an_integer(tmp_path: Path, called: bool) -> None:
    """perf_analyzer looks at all of them without asking (spec 3.12)."""
    put(tmp_path / "a" / "1", says=7)
    async with serve_models([tmp_path]) as served:
        if called:
            assert await ask(served, "a") == 7
        status, document = await by_rest(served, "/v2/models/a/stats")
        (stats,) = document["model_stats"]
        assert status == 200
        assert list(stats) == [
            "name",
            "version",
            "last_inference",
            "inference_count",
            "execution_count",
            "inference_stats",
            "batch_stats",
            "memory_usage",
            "response_stats",
        ]
        inference = stats["inference_stats"]
        assert list(inference) == [
            "success",
            "fail",
            "queue",
            "compute_input",
            "compute_infer",
            "compute_output",
            "cache_hit",
            "cache_miss",
        ]
        parts = ("compute_input", "compute_infer", "compute_output")
        durations = [*inference.values(), *(stats[part] for stats in stats["batch_stats"] for part in parts)]
        assert len(durations) == 8 + 3 * called
        assert all(list(duration) == ["count", "ns"] for duration in durations)
        numbers = [stats["last_inference"], stats["inference_count"], stats["execution_count"]]
        numbers += [number for duration in durations for number in duration.values()]
        assert {type(number) for number in numbers} == {int}
        assert (numbers[0] > 0, numbers[1:3]) == (called, [called, called])
        assert stats["response_stats"] == {}


def test_endless_streams_are_distinguished_up_to_some_index() -> None:
    statistics = Statistics()
    for index in range(MAX_RESPONSES + 100):
        statistics.response(index).success.add(1.0)
    assert len(statistics.responses) == MAX_RESPONSES + 1
    last = statistics.responses[MAX_RESPONSES].success
    assert (last.count, last.seconds) == (100, 100.0)


TEXTS = """
import triglot

class Texts(triglot.Model):
    inputs = [triglot.TensorSpec("x", "BYTES", [-1])]
    outputs = [triglot.TensorSpec("y", "BYTES", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"][:1]}
"""


async def test_time_that_the_inputs_take_is_no_time_in_the_queue(tmp_path: Path) -> None:
    write_model(tmp_path / "texts" / "1", TEXTS)
    texts = b"".join(b"\x04\x00\x00\x00text" for _ in range(MANY))
    request = pb.ModelInferRequest(model_name="texts", raw_input_contents=[texts])
    request.inputs.add(name="x", datatype="BYTES", shape=[MANY])
    async with serve_models([tmp_path]) as served:
        code, text, _ = await served.grpc.call("ModelInfer", request.SerializeToString())
        assert code is Code.OK, text
        _, document = await by_rest(served, "/v2/models/texts/stats")
        durations = document["model_stats"][0]["inference_stats"]
        assert durations["compute_input"]["ns"] > 10_000_000
        assert durations["queue"]["ns"] < durations["compute_input"]["ns"] / 2
