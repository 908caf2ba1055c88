"""`async def` models whose requests are joined: the batches are formed and run on the loop (spec 5.1)."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from typing import Any

import pytest

from tests.direct_work import direct_stream
from tests.scheduling.batched_models import FOREVER, Inputs, Joining, Site, call, first_values, rows
from triglot import Call, InvalidArgument
from triglot.core.errors import DeadlineExceeded, Internal, QueueFull, Unavailable
from triglot.core.request_scheduling import Scheduling
from triglot.model.scheduling import DynamicBatching, QueuePolicy


class OnLoop(Joining):
    """Waits for `gate` in `infer`; a row of -1 fails the batch."""

    def __init__(self, batching: DynamicBatching | None = None, *, open_gate: bool = True, **limits: int) -> None:
        super().__init__(batching, **limits)
        self.gate = asyncio.Event()
        if open_gate:
            self.gate.set()
        self.running = self.most_running = self.cancelled = 0
        self.threads: set[int] = set()

    async def infer(self, inputs: Inputs) -> Any:
        self.batches.append(inputs["x"][:, 0].tolist())
        self.threads.add(threading.get_ident())
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if -1 in inputs["x"]:
            raise InvalidArgument("minus one")
        if -2 in inputs["x"]:
            raise SystemExit(2)
        return {"y": inputs["x"] * 2}


async def until_running(model: OnLoop, batches: int) -> None:
    async with asyncio.timeout(30):
        while len(model.batches) < batches:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)


async def test_what_comes_in_one_turn_of_the_loop_is_executed_together() -> None:
    model = OnLoop()
    site = Site(model)
    calls = [Call() for _ in range(3)]
    answers = await asyncio.gather(*[site.ask(rows(at, at), own) for at, own in enumerate(calls)])
    assert model.batches == [[0, 0, 1, 1, 2, 2]]
    assert [first_values(answer) for answer in answers] == [[0, 0], [2, 2], [4, 4]]
    assert [own.batch_size for own in calls] == [3, 3, 3]
    assert model.threads == {threading.get_ident()}
    assert site.closed() == {"no_delay": 1}
    await site.servable.close()


async def test_concurrent_batches_are_limited_by_instances() -> None:
    model = OnLoop(instances=2, max_batch_size=2, open_gate=False)
    site = Site(model)
    tasks = [site.ask(rows(at)) for at in range(9)]
    await until_running(model, 2)
    await site.until(5)
    model.gate.set()
    answers = await asyncio.gather(*tasks)
    assert [first_values(answer) for answer in answers] == [[2 * at] for at in range(9)]
    assert model.most_running == 2
    assert model.batches == [[0, 1], [2, 3], [4, 5], [6, 7], [8]]
    await site.servable.close()


async def test_the_delay_and_the_preferred_sizes_hold() -> None:
    model = OnLoop(DynamicBatching(max_queue_delay=FOREVER, preferred_sizes=[2]))
    site = Site(model)
    tasks = [site.ask(rows(1))]
    await site.until(1)
    tasks.append(site.ask(rows(2)))
    await asyncio.gather(*tasks)
    assert model.batches == [[1, 2]]
    assert site.closed() == {"preferred": 1}
    await site.servable.close()


async def test_after_the_delay_a_batch_is_run_as_it_is() -> None:
    model = OnLoop(DynamicBatching(max_queue_delay=0.01))
    site = Site(model)
    await asyncio.gather(site.ask(rows(1)), site.ask(rows(2)))
    assert site.closed() == {"delay": 1}
    await site.servable.close()


@pytest.mark.parametrize(("value", "expected_error"), [(-1, InvalidArgument), (-2, Internal)])
async def test_an_exception_fails_its_members_each_with_its_own_error(
    value: float, expected_error: type[Exception]
) -> None:
    model = OnLoop()
    site = Site(model)
    results: Sequence[Any] = await asyncio.gather(
        site.ask(rows(1)), site.ask(rows(value)), site.ask(rows(3, width=2)), return_exceptions=True
    )
    assert [type(result) for result in results[:2]] == [expected_error, expected_error]
    assert results[0] is not results[1]
    assert first_values(results[2]) == [6]
    await site.servable.close()


async def test_a_batch_that_everybody_left_is_cancelled_and_no_other() -> None:
    model = OnLoop(max_batch_size=2, instances=2, open_gate=False)
    site = Site(model)
    tasks = [site.ask(rows(at)) for at in range(4)]
    await until_running(model, 2)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    assert model.cancelled == 0
    tasks[1].cancel()
    await asyncio.wait(tasks[:2])
    async with asyncio.timeout(30):
        while not model.cancelled:  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0)
    model.gate.set()
    assert [first_values(answer) for answer in await asyncio.gather(*tasks[2:])] == [[4], [6]]
    assert model.cancelled == 1
    assert first_values(await site.ask(rows(5))) == [10]
    await site.servable.close()


async def test_a_deadline_ends_its_member_alone() -> None:
    model = OnLoop(open_gate=False)
    site = Site(model)
    late = site.ask(rows(1), Call(time.monotonic() + 1))
    other = site.ask(rows(2))
    with pytest.raises(DeadlineExceeded, match="while the model ran"):
        await late
    waits = site.ask(rows(3), Call(time.monotonic() + 1))
    with pytest.raises(DeadlineExceeded, match="while the request waited"):
        await waits
    model.gate.set()
    assert first_values(await other) == [4]
    assert model.batches == [[1, 2]]
    await site.servable.close()


async def test_the_queue_is_bounded_and_its_policies_hold() -> None:
    policy = QueuePolicy(timeout=FOREVER, allow_timeout_override=True)
    model = OnLoop(DynamicBatching(policy=policy), max_batch_size=1, open_gate=False)
    site = Site(model, max_queue_size=2)
    running = site.ask(rows(0))
    await until_running(model, 1)
    tasks = [site.ask(rows(at), call(Scheduling(timeout=0.01))) for at in range(3)]
    results: Sequence[Any] = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [Unavailable, Unavailable, QueueFull]
    model.gate.set()
    await running
    assert model.batches == [[0]]
    await site.servable.close()


async def test_a_stream_is_a_member_like_others() -> None:
    model = OnLoop()
    site = Site(model)

    async def stream(value: float) -> list[list[float]]:
        return [first_values(answer) async for answer in direct_stream(site.servable, rows(value), Call())]

    assert [*await asyncio.gather(stream(1), stream(2))] == [[[2]], [[4]]]
    assert model.batches == [[1, 2]]
    await site.servable.close()


async def test_closing_runs_what_waits() -> None:
    model = OnLoop(DynamicBatching(max_queue_delay=FOREVER))
    site = Site(model)
    task = site.ask(rows(1))
    await site.until(1)
    closing = asyncio.ensure_future(site.servable.close())
    assert first_values(await task) == [2]
    await closing
    assert site.closed() == {"drained": 1}


class Listing(OnLoop):
    async def infer_batch(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Any]:
        return [{"y": tensor["x"] * len(calls)} for tensor in inputs]


class ListingPlainly(OnLoop):
    def infer_batch(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Any]:
        return [{"y": tensor["x"] * len(calls)} for tensor in inputs]


@pytest.mark.parametrize("model", [Listing, ListingPlainly])
async def test_a_list_of_requests_may_be_awaited_too(model: type[OnLoop]) -> None:
    site = Site(model())
    answers = await asyncio.gather(site.ask(rows(1)), site.ask(rows(2, width=2)))
    assert [first_values(answer) for answer in answers] == [[2], [4]]
    await site.servable.close()
