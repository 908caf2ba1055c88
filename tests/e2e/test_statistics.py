"""What is counted of requests, whichever way they are executed and end, over gRPC and REST (spec 5.9)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import numpy as np
import pytest

import triglot
from tests.e2e.counting_server import (
    CountingServer,
    Failing,
    batches,
    counting,
    counts,
    failing,
    message,
    ns,
    succeeded,
)
from tests.process import SECONDS
from tests.protocol_clients.every_protocol import INTERFACES, MODEL, Interface
from tests.scheduling.scripted_models import Scripted
from tests.served_models import Arrays, Function, both, ensemble, step, twice, twice_on_loop
from tests.transports.live import live
from tests.waiting import until
from triglot import testing
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING
from triglot.model.scheduling import QueuePolicy

NO_INPUT = b"\x0a\x01m\x2a\x00"
"""For model "m"; its input has no name."""
NOTHING: dict[str, int] = {}


# --- one request, one execution ---


@pytest.mark.parametrize("interface", INTERFACES.values(), ids=INTERFACES)
async def test_calls_of_every_protocol_count(interface: Interface) -> None:
    async with live({MODEL: Scripted()}) as server:
        counting = CountingServer(server.server, server.channel, server.session)
        assert counts(await counting.stats(MODEL)) == NOTHING
        before = int(time.time() * 1000)
        assert (await interface(server, 3)).value == 6
        await until(lambda: server.server.dataplane.servable(EVERYTHING, MODEL).statistics.success.count)
        stats = await counting.stats(MODEL)
        assert counts(stats) == succeeded(1)
        assert batches(stats) == {1: 1}
        assert before <= stats["last_inference"] <= int(time.time() * 1000) + 1
        assert (stats["name"], stats["version"], stats["response_stats"]) == (MODEL, "1", {})


@pytest.mark.parametrize("infer", [twice, twice_on_loop])
async def test_the_parts_of_a_request_are_no_more_than_the_whole(infer: Any) -> None:
    async with counting({"m": Function(infer)}) as served:
        for _ in range(3):
            assert await served.code("m", 1, 2) is Code.OK
        stats = await served.stats("m")
        # It has no batch dim: two numbers are one inference.
        assert (counts(stats), batches(stats)) == (succeeded(3), {1: 3})
        times = ns(stats)
        parts = [times[name] for name in ("queue", "compute_input", "compute_infer", "compute_output")]
        assert all(parts)
        assert sum(parts) <= times["success"]
        assert times["fail"] == times["cache_hit"] == times["cache_miss"] == 0
        metrics = await served.metrics("m")
        assert (metrics["inference_request_success"], metrics["inference_exec_count"]) == (3, 3)
        assert metrics["inference_request_duration_us"] == round(times["success"] / 1000)


async def test_a_batch_of_one_request() -> None:
    async with counting({"m": Function(twice, max_batch_size=4)}) as served:
        assert await served.code("m", 1, 2, 3) is Code.OK
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (succeeded(1, 3), {3: 1})


async def test_who_fails_and_who_is_refused() -> None:
    async with counting({"m": Function(failing)}) as served:
        assert await served.code("m", 1) is Code.OK
        assert await served.code("m", -1) is Code.INTERNAL
        stats = await served.stats("m")
        # The model was executed for both.
        assert counts(stats) == succeeded(1, executions=2, fail=1)
        assert ns(stats)["fail"] > 0
        # These say something that cannot be: nobody has failed.
        with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT"):
            await served.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(NO_INPUT)
        assert await served.code("m", 1, priority=-1) is Code.INVALID_ARGUMENT
        assert await served.code("n", 1) is Code.NOT_FOUND
        assert counts(await served.stats("m")) == counts(stats)
        assert await served.failures("m") == {"BACKEND": 1}


async def test_a_full_queue_is_no_failure() -> None:
    gate = Failing("infer", max_queue_size=1)
    async with counting({"m": gate}) as served:
        first = served.ask("m", 1)
        await gate.until_at("infer")
        second = served.ask("m", 2)
        await served.waiting(1)
        assert (await served.metrics("m"))["inference_pending_request_count"] == 1
        assert await served.code("m", 3) is Code.RESOURCE_EXHAUSTED
        assert counts(await served.stats("m")) == NOTHING
        assert await served.failures("m") == {"REJECTED": 1}
        gate.open_point("infer")
        assert set(await asyncio.gather(first, second)) == {Code.OK}
        assert counts(await served.stats("m")) == succeeded(2)


async def test_who_waits_for_too_long_has_failed() -> None:
    policy = QueuePolicy(timeout=SECONDS, allow_timeout_override=True)
    gate = Failing("infer", max_batch_size=1, dynamic_batching=triglot.DynamicBatching(policy=policy))
    async with counting({"m": gate}) as served:
        first = served.ask("m", 1)
        await gate.until_at("infer")
        assert await served.code("m", 2, timeout=10_000) is Code.UNAVAILABLE
        assert counts(await served.stats("m")) == {"fail": 1}
        assert await served.failures("m") == {"REJECTED": 1}
        gate.open_point("infer")
        assert await first is Code.OK
        assert counts(await served.stats("m")) == succeeded(1, fail=1)


@both
async def test_who_leaves_has_failed_and_the_execution_counts(on_loop: bool) -> None:
    gate, begun, opened = Failing("infer"), asyncio.Event(), asyncio.Event()

    async def on_the_loop(_: Arrays) -> Any:
        begun.set()
        try:
            await opened.wait()
        finally:
            gate.open_point("infer")

    async with counting({"m": Function(on_the_loop) if on_loop else gate}) as served:
        call = served.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message("m", 1))
        asking = asyncio.ensure_future(call.wait_for_connection())
        await (begun.wait() if on_loop else gate.until_at("infer"))
        assert call.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        statistics = served.server.dataplane.servable(EVERYTHING, "m").statistics
        await until(lambda: statistics.fail.count)
        if not on_loop:
            # The thread runs still.
            assert counts(await served.stats("m")) == {"fail": 1}
        gate.open_point("infer")
        stats = await served.executed("m", 1)
        assert (counts(stats), batches(stats)) == ({"fail": 1, "executions": 1}, {1: 1})
        assert await served.failures("m") == {"CANCELED": 1}


async def test_a_deadline() -> None:
    gate = Failing("infer")
    async with counting({"m": gate}, default_timeout=0.001) as served:
        assert await served.code("m", 1) is Code.DEADLINE_EXCEEDED
        gate.open_point("infer")
        # While it waited, or while the model ran.
        statistics = served.server.dataplane.servable(EVERYTHING, "m").statistics
        assert statistics.fail.count == 1
        assert sum((await served.failures("m")).values()) == 1


# --- the response cache ---


async def test_what_the_response_cache_has() -> None:
    async with counting({"m": Function(failing, response_cache=True)}, response_cache_bytes=1 << 20) as served:
        for value, code in ((1, Code.OK), (1, Code.OK), (2, Code.OK), (1, Code.OK), (-1, Code.INTERNAL)):
            assert await served.code("m", value) is code
        stats = await served.stats("m")
        assert counts(stats) == {
            "success": 4,
            "queue": 4,
            "fail": 1,
            "cache_hit": 2,
            "cache_miss": 2,
            "computed": 2,
            "inferences": 2,
            "executions": 3,
        }
        times, metrics = ns(stats), await served.metrics("m")
        assert times["cache_hit"] > 0
        assert times["cache_miss"] > 0
        assert (metrics["cache_num_hits_per_model"], metrics["cache_num_misses_per_model"]) == (2, 2)
        assert metrics["cache_hit_duration_per_model"] == round(times["cache_hit"] / 1000)


async def test_who_is_not_cached_has_no_such_metrics() -> None:
    async with counting({"m": Function(twice)}, response_cache_bytes=1 << 20) as served:
        assert not [name for name in await served.metrics("m") if name.startswith("cache")]


# --- models and models ---


async def test_the_steps_of_an_ensemble_count_in_their_models() -> None:
    models = {
        "both": ensemble(step("one", "x", "m"), step("two", "m", "y")),
        "one": Function(twice),
        "two": Function(failing),
    }
    async with counting(models) as served:
        assert await served.code("both", 1) is Code.OK
        assert await served.code("both", -1) is Code.INTERNAL
        assert counts(await served.stats("one")) == succeeded(2)
        for name in ("both", "two"):
            assert counts(await served.stats(name)) == succeeded(1, executions=2, fail=1)
        assert (await served.failures("two"), await served.failures("both")) == ({"BACKEND": 1}, {"OTHER": 1})


@both
async def test_what_models_ask_of_others_counts_in_these(on_loop: bool) -> None:
    def thread(inputs: Arrays, call: Call) -> Any:
        return {"y": call.infer("called", {"x": inputs["x"]})["y"]}

    async def loop(inputs: Arrays, call: Call) -> Any:
        return {"y": (await call.infer("called", {"x": inputs["x"]}))["y"]}

    models = {"caller": Function(loop if on_loop else thread), "called": Function(twice, max_batch_size=4)}
    async with counting(models) as served:
        assert await served.code("caller", 1, 2) is Code.OK
        assert counts(await served.stats("caller")) == succeeded(1)
        assert counts(await served.stats("called")) == succeeded(1, 2)


# --- from the load on ---


async def test_warm_ups_are_not_counted() -> None:
    example = {"x": np.array([1], np.int32)}

    def asks(inputs: Arrays, call: Call) -> Any:
        return call.infer("called", {"x": inputs["x"]})

    models = {"called": Function(twice, example=example), "caller": Function(asks, example=example)}
    async with counting(models) as served:
        for stats in await served.all_stats():
            assert (counts(stats), stats["batch_stats"], stats["last_inference"]) == (NOTHING, [], 0)


SOURCE = """
import triglot


class Says(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"] + ADDED}
"""


@asynccontextmanager
async def of_folder(folder: Path, **options: Any) -> AsyncIterator[CountingServer]:
    async with (
        testing.serve(folder, **options) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
        aiohttp.ClientSession() as session,
    ):
        yield CountingServer(server.server, channel, session)


async def test_a_version_that_is_loaded_again_begins_at_zero(tmp_path: Path) -> None:
    for name in ("m", "n"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(SOURCE.replace("ADDED", "1"))
    async with of_folder(tmp_path, model_control_mode="explicit", load_model="*") as served:
        dataplane = served.server.dataplane
        assert await served.code("m", 1) is Code.OK
        assert await served.code("n", 1) is Code.OK
        assert (await served.metrics("m"))["model_load_duration_secs"] > 0
        (tmp_path / "m" / "1" / "model.py").write_text(SOURCE.replace("ADDED", "22"))
        await dataplane.load_model(EVERYTHING, "m")
        stats = await served.stats("m")
        assert (counts(stats), stats["batch_stats"], stats["last_inference"]) == (NOTHING, [], 0)
        assert counts(await served.stats("n")) == succeeded(1)
        assert await served.code("m", 1) is Code.OK
        assert counts(await served.stats("m")) == succeeded(1)
        # What was unloaded is not listed.
        await dataplane.unload_model(EVERYTHING, "m")
        assert [stats["name"] for stats in await served.all_stats()] == ["n"]
        await dataplane.load_model(EVERYTHING, "m")
        assert counts(await served.stats("m")) == NOTHING


async def test_instances_that_are_processes(tmp_path: Path) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    in_a_process = '    execution = "process"\n    example = {"x": np.array([1], "i4")}\n\n'
    text = SOURCE.replace("ADDED", "1").replace("    def", f"{in_a_process}    def")
    (tmp_path / "m" / "1" / "model.py").write_text("import numpy as np\n" + text)
    async with of_folder(tmp_path) as served:
        assert counts(await served.stats("m")) == NOTHING
        for _ in range(2):
            assert await served.code("m", 1, 2) is Code.OK
        assert counts(await served.stats("m")) == succeeded(2)
