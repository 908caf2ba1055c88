"""What is counted of requests, whichever way they are executed and end, by both doors (spec 5.9)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import numpy as np
import pytest
from async_doors import DOORS, MODEL, Door
from counted import DURATIONS, Counted, Stats, batches, counting, counts, message, responses, went_well
from live import live
from scripted_models import Scripted
from sequence_models import DIRECT

import triglot
from process import SECONDS
from served_models import Arrays, Function, both, ensemble, step, twice, twice_on_loop, until
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.scheduling import QueuePolicy
from triglot.core.types import Answer

BATCHED: dict[str, Any] = {"max_batch_size": 8, "dynamic_batching": triglot.DynamicBatching()}
WRONG = b"\x0a\x01m"
NOTHING: dict[str, int] = {}


class Gate:
    """An `infer` that waits for the test; it doubles, and fails for an input that has a number below zero."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.opened = threading.Event()

    def __call__(self, inputs: Arrays) -> dict[str, Any]:
        self.entered.release()
        assert self.opened.wait(SECONDS)
        return failing(inputs)

    async def wait_until_entered(self) -> None:
        assert await asyncio.to_thread(self.entered.acquire, timeout=SECONDS)


def failing(inputs: Arrays) -> dict[str, Any]:
    if (inputs["x"] < 0).any():
        raise ValueError("below zero")
    return {"y": inputs["x"] * 2}


async def waiting(served: Counted, requests: int) -> None:
    await until(lambda: served.server.dataplane.queue_depth() == requests)


def ns(stats: Stats) -> dict[str, int]:
    return {name: stats["inference_stats"][name]["ns"] for name in DURATIONS}


# --- one request, one execution ---


@pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
async def test_calls_of_every_protocol_count(door: Door) -> None:
    async with live({MODEL: Scripted()}) as server:
        counted = Counted(server.server, server.channel, server.session)
        assert counts(await counted.stats(MODEL)) == NOTHING
        before = int(time.time() * 1000)
        assert (await door(server, 3)).value == 6
        await until(lambda: server.server.dataplane.servable(MODEL).statistics.success.count)
        stats = await counted.stats(MODEL)
        assert counts(stats) == went_well(1)
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
        assert (counts(stats), batches(stats)) == (went_well(3), {1: 3})
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
        assert (counts(stats), batches(stats)) == (went_well(1, 3), {3: 1})


async def test_who_fails_and_who_is_refused() -> None:
    async with counting({"m": Function(failing)}) as served:
        assert await served.code("m", 1) is Code.OK
        assert await served.code("m", -1) is Code.INTERNAL
        stats = await served.stats("m")
        # The model was executed for both.
        assert counts(stats) == went_well(1, executions=2, fail=1)
        assert ns(stats)["fail"] > 0
        # These say something that cannot be: nobody has failed.
        with pytest.raises(Exception, match="INVALID_ARGUMENT"):
            await served.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(WRONG + b"\x2a\x00")
        assert await served.code("m", 1, priority=-1) is Code.INVALID_ARGUMENT
        assert await served.code("n", 1) is Code.NOT_FOUND
        assert counts(await served.stats("m")) == counts(stats)
        assert await served.failures("m") == {"BACKEND": 1}


async def test_a_full_queue_is_no_failure() -> None:
    gate = Gate()
    async with counting({"m": Function(gate, max_queue_size=1)}) as served:
        first = served.ask("m", 1)
        await gate.wait_until_entered()
        second = served.ask("m", 2)
        await waiting(served, 1)
        assert (await served.metrics("m"))["inference_pending_request_count"] == 1
        assert await served.code("m", 3) is Code.RESOURCE_EXHAUSTED
        assert counts(await served.stats("m")) == NOTHING
        assert await served.failures("m") == {"REJECTED": 1}
        gate.opened.set()
        assert set(await asyncio.gather(first, second)) == {Code.OK}
        assert counts(await served.stats("m")) == went_well(2)


async def test_who_waits_for_too_long_has_failed() -> None:
    gate = Gate()
    policy = QueuePolicy(timeout=0.01)
    batching = triglot.DynamicBatching(policy=policy)
    async with counting({"m": Function(gate, max_batch_size=1, dynamic_batching=batching)}) as served:
        first = served.ask("m", 1)
        await gate.wait_until_entered()
        assert await served.code("m", 2) is Code.UNAVAILABLE
        assert counts(await served.stats("m")) == {"fail": 1}
        assert await served.failures("m") == {"REJECTED": 1}
        gate.opened.set()
        assert await first is Code.OK
        assert counts(await served.stats("m")) == went_well(1, fail=1)


@both
async def test_who_leaves_has_failed_and_the_execution_counts(on_loop: bool) -> None:
    gate, begun, opened = Gate(), asyncio.Event(), asyncio.Event()

    async def on_the_loop(_: Arrays) -> Any:
        begun.set()
        try:
            await opened.wait()
        finally:
            gate.opened.set()

    async with counting({"m": Function(on_the_loop if on_loop else gate)}) as served:
        call = served.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")(message("m", 1))
        asking = asyncio.ensure_future(call.wait_for_connection())
        await (begun.wait() if on_loop else gate.wait_until_entered())
        assert call.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        statistics = served.server.dataplane.servable("m").statistics
        await until(lambda: statistics.fail.count)
        if not on_loop:
            # The thread runs still.
            assert counts(await served.stats("m")) == {"fail": 1}
        gate.opened.set()
        stats = await served.executed("m", 1)
        assert (counts(stats), batches(stats)) == ({"fail": 1, "executions": 1}, {1: 1})
        assert await served.failures("m") == {"CANCELED": 1}


async def test_a_deadline() -> None:
    gate = Gate()
    async with counting({"m": Function(gate)}) as served:
        assert await served.code("m", 1, timeout=1000) is Code.DEADLINE_EXCEEDED
        gate.opened.set()
        # While it waited, or while the model ran.
        statistics = served.server.dataplane.servable("m").statistics
        assert statistics.fail.count == 1
        assert sum((await served.failures("m")).values()) == 1


# --- batches ---


async def batch_of(served: Counted, gate: Gate, *requests: list[int]) -> tuple[asyncio.Task[Code], ...]:
    """Requests that are executed together when the gate is opened; one more runs already."""
    first = served.ask("m", 1)
    await gate.wait_until_entered()
    others = []
    for at, values in enumerate(requests):
        others.append(served.ask("m", *values))
        await waiting(served, at + 1)
    return (first, *others)


async def test_each_member_of_a_batch_has_the_whole_of_its_time() -> None:
    gate = Gate()
    async with counting({"m": Function(gate, **BATCHED)}) as served:
        tasks = await batch_of(served, gate, [1], [2, 3], [4, 5, 6])
        gate.opened.set()
        assert await asyncio.gather(*tasks) == [Code.OK] * 4
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (went_well(4, 7, 2), {1: 1, 6: 1})
        alone, together = stats["batch_stats"]
        times = ns(stats)
        rounding = 10
        for name in ("compute_input", "compute_infer", "compute_output"):
            assert together[name]["ns"] > 0
            assert times[name] + rounding >= alone[name]["ns"] + 3 * together[name]["ns"]


async def test_a_batch_that_fails() -> None:
    gate = Gate()
    async with counting({"m": Function(gate, **BATCHED)}) as served:
        tasks = await batch_of(served, gate, [1], [-1, 2])
        gate.opened.set()
        assert await asyncio.gather(*tasks) == [Code.OK, Code.INTERNAL, Code.INTERNAL]
        stats = await served.stats("m")
        assert counts(stats) == went_well(1, executions=2, fail=2)
        assert batches(stats) == {1: 1, 3: 1}
        assert await served.failures("m") == {"BACKEND": 2}


@pytest.mark.parametrize("leaving", [1, 2])
async def test_members_that_leave_before_there_is_a_batch(leaving: int) -> None:
    gate = Gate()
    async with counting({"m": Function(gate, **BATCHED)}) as served:
        tasks = await batch_of(served, gate, [1], [2, 3])
        for task in tasks[1 : 1 + leaving]:
            task.cancel()
        statistics = served.server.dataplane.servable("m").statistics
        await until(lambda: statistics.fail.count == leaving)
        gate.opened.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        stats = await served.stats("m")
        expected = {1: 1, 2: 1} if leaving == 1 else {1: 1}
        inferences = sum(expected)
        assert counts(stats) == went_well(3 - leaving, inferences, len(expected), fail=leaving)
        assert batches(stats) == expected
        assert await served.failures("m") == {"CANCELED": leaving}


@pytest.mark.parametrize("leaving", [1, 2])
async def test_members_that_leave_while_the_batch_runs(leaving: int) -> None:
    gate, full = Gate(), triglot.DynamicBatching(preferred_sizes=[3], max_queue_delay=SECONDS)
    async with counting({"m": Function(gate, max_batch_size=3, dynamic_batching=full)}) as served:
        tasks = [served.ask("m", 1), served.ask("m", 2, 3)]
        await gate.wait_until_entered()
        for task in tasks[:leaving]:
            task.cancel()
        statistics = served.server.dataplane.servable("m").statistics
        await until(lambda: statistics.fail.count == leaving)
        assert statistics.execution_count == 0
        gate.opened.set()
        await asyncio.gather(*tasks, return_exceptions=True)
        stats = await served.executed("m", 1)
        good = went_well(1, 2) if leaving == 1 else {}
        assert (counts(stats), batches(stats)) == (good | {"fail": leaving, "executions": 1}, {3: 1})
        assert await served.failures("m") == {"CANCELED": leaving}


async def test_batches_on_the_loop() -> None:
    full = triglot.DynamicBatching(preferred_sizes=[4], max_queue_delay=SECONDS)
    async with counting({"m": Function(twice_on_loop, max_batch_size=4, dynamic_batching=full)}) as served:
        assert set(await asyncio.gather(served.code("m", 1), served.code("m", 2, 3, 4))) == {Code.OK}
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (went_well(2, 4, 1), {4: 1})


async def test_batches_that_come_as_lists() -> None:
    def infer_batch(inputs: list[Arrays], _: list[Call]) -> list[Any]:
        return [ValueError("below zero") if one["x"][0] < 0 else twice(one) for one in inputs]

    full = triglot.DynamicBatching(preferred_sizes=[4], max_queue_delay=SECONDS)
    model = Function(twice, max_batch_size=4, dynamic_batching=full, infer_batch=infer_batch)
    async with counting({"m": model}) as served:
        bad, good = await asyncio.gather(served.code("m", -1), served.code("m", 2, 3, 4))
        assert (bad, good) == (Code.INTERNAL, Code.OK)
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (went_well(1, 3, fail=1), {4: 1})


async def test_a_request_that_is_executed_in_parts() -> None:
    parts = triglot.DynamicBatching(max_execution_size=2)
    async with counting({"m": Function(twice, max_batch_size=8, dynamic_batching=parts)}) as served:
        assert await served.code("m", 1, 2, 3, 4, 5) is Code.OK
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (went_well(1, 5, 3), {1: 1, 2: 2})


# --- streams ---


def three(inputs: Arrays) -> Iterator[Any]:
    for value in range(int(inputs["x"][0])):
        if value == 3:
            raise ValueError("three")
        yield {"y": inputs["x"] + value}


async def three_on_loop(inputs: Arrays) -> AsyncIterator[Any]:
    for answer in three(inputs):
        yield answer


@pytest.mark.parametrize("infer", [three, three_on_loop])
async def test_the_answers_of_a_stream(infer: Any) -> None:
    async with counting({"m": Function(infer)}) as served:
        assert await served.streamed("m", 2) == ["", ""]
        assert await served.streamed("m", 3) == [""] * 3
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (went_well(2), {1: 2})
        end = {"empty_response": 1}
        expected = {"0": {"success": 2}, "1": {"success": 2}, "2": {"success": 1} | end, "3": end}
        assert responses(stats) == expected
        first = stats["response_stats"]["0"]
        parts = first["compute_infer"]["ns"] + first["compute_output"]["ns"]
        assert first["success"]["ns"] == pytest.approx(parts, abs=5)
        assert first["compute_infer"]["ns"] > 0

        *good, bad = await served.streamed("m", 4)
        assert (good, bool(bad)) == ([""] * 3, True)
        stats = await served.executed("m", 3)
        assert counts(stats) == went_well(2, executions=3, fail=1)
        assert responses(stats) == {
            "0": {"success": 3},
            "1": {"success": 3},
            "2": {"success": 2} | end,
            "3": {"fail": 1} | end,
        }


async def test_an_answer_that_says_that_it_is_the_last() -> None:
    def infer(inputs: Arrays) -> Iterator[Any]:
        yield {"y": inputs["x"]}
        yield Answer({"y": inputs["x"]}, final=True)

    async with counting({"m": Function(infer)}) as served:
        assert await served.streamed("m", 1) == ["", ""]
        assert responses(await served.stats("m")) == {"0": {"success": 1}, "1": {"success": 1}}


@both
async def test_a_stream_whose_reader_leaves(on_loop: bool) -> None:
    opened = threading.Event()

    def infer(inputs: Arrays) -> Iterator[Any]:
        yield {"y": inputs["x"]}
        assert opened.wait(SECONDS)
        yield {"y": inputs["x"]}

    async def infer_on_loop(inputs: Arrays) -> AsyncIterator[Any]:
        yield {"y": inputs["x"]}
        await asyncio.sleep(SECONDS)

    async with counting({"m": Function(infer_on_loop if on_loop else infer)}) as served:
        call = served.stream("m", 1)
        await call.read()
        call.cancel()
        statistics = served.server.dataplane.servable("m").statistics
        await until(lambda: statistics.fail.count)
        opened.set()
        stats = await served.executed("m", 1)
        assert counts(stats) == {"fail": 1, "executions": 1}
        assert responses(stats) == {"0": {"success": 1}, "1": {"cancel": 1}}
        assert await served.failures("m") == {"CANCELED": 1}


async def test_a_stream_that_is_refused_has_no_answers() -> None:
    gate = threading.Event()

    def infer(_: Arrays) -> Iterator[Any]:
        assert gate.wait(SECONDS)
        yield from ()

    async with counting({"m": Function(infer, max_queue_size=1)}) as served:
        running = asyncio.ensure_future(served.streamed("m", 1))
        statistics = served.server.dataplane.servable("m").statistics
        await until(lambda: served.leases()["m"] == 1 and not served.server.dataplane.queue_depth())
        second = asyncio.ensure_future(served.streamed("m", 1))
        await waiting(served, 1)
        (text,) = await served.streamed("m", 1)
        assert "queue" in text
        assert (statistics.responses, await served.failures("m")) == ({}, {"REJECTED": 1})
        gate.set()
        assert [*await running, *await second] == []
        assert responses(await served.stats("m")) == {"0": {"empty_response": 2}}


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
        assert counts(await served.stats("one")) == went_well(2)
        for name in ("both", "two"):
            assert counts(await served.stats(name)) == went_well(1, executions=2, fail=1)
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
        assert counts(await served.stats("caller")) == went_well(1)
        assert counts(await served.stats("called")) == went_well(1, 2)


class Sums(triglot.Model):
    """The sum of a sequence, in a batch of all sequences."""

    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]
    max_batch_size = 4
    sequence_batching = triglot.SequenceBatching(max_idle=SECONDS, controls=DIRECT.controls)

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.entered = threading.Event()

    def infer(self, inputs: Arrays) -> dict[str, Any]:
        self.entered.set()
        assert self.gate.wait(SECONDS)
        return {"y": inputs["x"]}


async def test_sequences() -> None:
    model = Sums()
    async with counting({"m": model}) as served:
        begin, end = {"sequence_start": True}, {"sequence_end": True}
        first = served.ask("m", 1, sequence_id=1, **begin)
        await asyncio.to_thread(model.entered.wait, SECONDS)
        others = [served.ask("m", 2, sequence_id=number, **begin) for number in (2, 3)]
        await waiting(served, 2)
        model.gate.set()
        assert await asyncio.gather(first, *others) == [Code.OK] * 3
        # Slots without a request are rows of the execution, and no inferences.
        assert batches(await served.stats("m")) == {1: 1, 2: 1}
        assert await served.code("m", 3, sequence_id=2, **end) is Code.OK
        assert await served.code("m", 3, sequence_id=9) is Code.INVALID_ARGUMENT
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (went_well(4, executions=3), {1: 2, 2: 1})


# --- from the load on ---


async def test_warm_ups_count_nowhere() -> None:
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


async def test_a_version_that_is_loaded_again_begins_at_zero(tmp_path: Path) -> None:
    for name in ("m", "n"):
        (tmp_path / name / "1").mkdir(parents=True)
        (tmp_path / name / "1" / "model.py").write_text(SOURCE.replace("ADDED", "1"))
    config = triglot.Config(grpc_port=0, rest_port=0, model_control_mode="explicit", load_model="*")
    async with (
        triglot.Server([tmp_path], config) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
        aiohttp.ClientSession() as session,
    ):
        served = Counted(server, channel, session)
        assert await served.code("m", 1) is Code.OK
        assert await served.code("n", 1) is Code.OK
        assert (await served.metrics("m"))["model_load_duration_secs"] > 0
        (tmp_path / "m" / "1" / "model.py").write_text(SOURCE.replace("ADDED", "22"))
        await server.dataplane.load_model("m")
        stats = await served.stats("m")
        assert (counts(stats), stats["batch_stats"], stats["last_inference"]) == (NOTHING, [], 0)
        assert counts(await served.stats("n")) == went_well(1)
        assert await served.code("m", 1) is Code.OK
        assert counts(await served.stats("m")) == went_well(1)
        # What was unloaded is not listed.
        server.dataplane.unload_model("m")
        assert [stats["name"] for stats in await served.all_stats()] == ["n"]
        await server.dataplane.load_model("m")
        assert counts(await served.stats("m")) == NOTHING
