"""What is counted of batches and their members (spec 5.9)."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

import triglot
from tests.e2e.counting_server import CountingServer, Failing, batches, counting, counts, ns, succeeded
from tests.process import SECONDS
from tests.scheduling.sequence_models import DIRECT
from tests.served_models import Arrays, Function, twice, twice_on_loop
from tests.waiting import until
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING
from triglot.testing import GatedModel

BATCHED: dict[str, Any] = {"max_batch_size": 8, "dynamic_batching": triglot.DynamicBatching()}


async def batch_of(served: CountingServer, gate: Failing, *requests: list[int]) -> tuple[asyncio.Task[Code], ...]:
    """Requests that are executed together when the gate is opened; one more runs already."""
    first = served.ask("m", 1)
    await gate.until_at("infer")
    others = []
    for at, values in enumerate(requests):
        others.append(served.ask("m", *values))
        await served.waiting(at + 1)
    return (first, *others)


async def test_each_member_of_a_batch_has_the_whole_of_its_time() -> None:
    gate = Failing("infer", **BATCHED)
    async with counting({"m": gate}) as served:
        tasks = await batch_of(served, gate, [1], [2, 3], [4, 5, 6])
        gate.open_point("infer")
        assert await asyncio.gather(*tasks) == [Code.OK] * 4
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (succeeded(4, 7, 2), {1: 1, 6: 1})
        single, together = stats["batch_stats"]
        times = ns(stats)
        rounding = 10
        for name in ("compute_input", "compute_infer", "compute_output"):
            assert together[name]["ns"] > 0
            assert times[name] + rounding >= single[name]["ns"] + 3 * together[name]["ns"]


async def test_a_batch_that_fails() -> None:
    gate = Failing("infer", **BATCHED)
    async with counting({"m": gate}) as served:
        tasks = await batch_of(served, gate, [1], [-1, 2])
        gate.open_point("infer")
        assert await asyncio.gather(*tasks) == [Code.OK, Code.INTERNAL, Code.INTERNAL]
        stats = await served.stats("m")
        assert counts(stats) == succeeded(1, executions=2, fail=2)
        assert batches(stats) == {1: 1, 3: 1}
        assert await served.failures("m") == {"BACKEND": 2}


@pytest.mark.parametrize("leaving", [1, 2])
async def test_members_cancelled_before_their_batch(leaving: int) -> None:
    gate = Failing("infer", **BATCHED)
    async with counting({"m": gate}) as served:
        tasks = await batch_of(served, gate, [1], [2, 3])
        for task in tasks[1 : 1 + leaving]:
            task.cancel()
        statistics = served.server.dataplane.servable(EVERYTHING, "m").statistics
        await until(lambda: statistics.fail.count == leaving)
        gate.open_point("infer")
        await asyncio.gather(*tasks, return_exceptions=True)
        stats = await served.stats("m")
        expected = {1: 1, 2: 1} if leaving == 1 else {1: 1}
        inferences = sum(expected)
        assert counts(stats) == succeeded(3 - leaving, inferences, len(expected), fail=leaving)
        assert batches(stats) == expected
        assert await served.failures("m") == {"CANCELED": leaving}


@pytest.mark.parametrize("leaving", [1, 2])
async def test_members_that_leave_while_the_batch_runs(leaving: int) -> None:
    full = triglot.DynamicBatching(preferred_sizes=[3], max_queue_delay=SECONDS)
    gate = Failing("infer", max_batch_size=3, dynamic_batching=full)
    async with counting({"m": gate}) as served:
        tasks = [served.ask("m", 1), served.ask("m", 2, 3)]
        await gate.until_at("infer")
        for task in tasks[:leaving]:
            task.cancel()
        statistics = served.server.dataplane.servable(EVERYTHING, "m").statistics
        await until(lambda: statistics.fail.count == leaving)
        assert statistics.execution_count == 0
        gate.open_point("infer")
        await asyncio.gather(*tasks, return_exceptions=True)
        stats = await served.executed("m", 1)
        good = succeeded(1, 2) if leaving == 1 else {}
        assert (counts(stats), batches(stats)) == (good | {"fail": leaving, "executions": 1}, {3: 1})
        assert await served.failures("m") == {"CANCELED": leaving}


async def test_batches_on_the_loop() -> None:
    full = triglot.DynamicBatching(preferred_sizes=[4], max_queue_delay=SECONDS)
    async with counting({"m": Function(twice_on_loop, max_batch_size=4, dynamic_batching=full)}) as served:
        assert set(await asyncio.gather(served.code("m", 1), served.code("m", 2, 3, 4))) == {Code.OK}
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (succeeded(2, 4, 1), {4: 1})


async def test_batches_that_come_as_lists() -> None:
    def infer_batch(inputs: list[Arrays], _: list[Call]) -> list[Any]:
        return [ValueError("below zero") if tensor["x"][0] < 0 else twice(tensor) for tensor in inputs]

    full = triglot.DynamicBatching(preferred_sizes=[4], max_queue_delay=SECONDS)
    model = Function(twice, max_batch_size=4, dynamic_batching=full, infer_batch=infer_batch)
    async with counting({"m": model}) as served:
        bad, good = await asyncio.gather(served.code("m", -1), served.code("m", 2, 3, 4))
        assert (bad, good) == (Code.INTERNAL, Code.OK)
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (succeeded(1, 3, fail=1), {4: 1})


async def test_a_request_that_is_executed_in_parts() -> None:
    parts = triglot.DynamicBatching(max_execution_size=2)
    async with counting({"m": Function(twice, max_batch_size=8, dynamic_batching=parts)}) as served:
        assert await served.code("m", 1, 2, 3, 4, 5) is Code.OK
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (succeeded(1, 5, 3), {1: 1, 2: 2})


class Sums(GatedModel):
    """The sum of a sequence, in a batch of all sequences."""

    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]
    max_batch_size = 4
    sequence_batching = triglot.SequenceBatching(max_idle=SECONDS, controls=DIRECT.controls)


async def test_sequences() -> None:
    model = Sums("infer")
    async with counting({"m": model}) as served:
        begin, end = {"sequence_start": True}, {"sequence_end": True}
        first = served.ask("m", 1, sequence_id=1, **begin)
        await model.until_at("infer")
        others = [served.ask("m", 2, sequence_id=number, **begin) for number in (2, 3)]
        await served.waiting(2)
        model.open_point("infer")
        assert await asyncio.gather(first, *others) == [Code.OK] * 3
        # Slots without a request are rows of the execution, and no inferences.
        assert batches(await served.stats("m")) == {1: 1, 2: 1}
        assert await served.code("m", 3, sequence_id=2, **end) is Code.OK
        assert await served.code("m", 3, sequence_id=9) is Code.INVALID_ARGUMENT
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (succeeded(4, executions=3), {1: 2, 2: 1})
