"""The queue of a batched model: bounds, priorities, policies (spec 5.1). No test sleeps to win a race."""

from __future__ import annotations

import asyncio
import gc
import weakref

import numpy as np
import pytest

from tests.scheduling.batched_models import FOREVER, Batched, Site, call, first_values, rows
from triglot import InvalidArgument
from triglot.core.errors import QueueFull, Unavailable
from triglot.core.request_scheduling import Scheduling
from triglot.model.scheduling import DynamicBatching, QueuePolicy
from triglot.scheduling.batch_queue import MAX_EMPTY_LANES, Level


async def test_a_full_queue_refuses_at_once() -> None:
    model = Batched(open_gate=False)
    site = Site(model, max_queue_size=2)
    busy = await site.busy(model)
    tasks = await site.ask_and_wait(rows(1), rows(2))
    with pytest.raises(QueueFull, match="Exceeds maximum queue size: 2") as caught:
        await site.ask(rows(3))
    assert caught.value.retry_after is not None
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    tasks += await site.ask_and_wait(rows(4))
    model.open_point("infer")
    await asyncio.gather(busy, *tasks[1:])
    assert model.batches == [[0], [2, 4]]
    await site.servable.close()


async def test_cancelled_request_releases_its_data() -> None:
    model = Batched(open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    kept = await site.ask_and_wait(rows(1))
    for _ in range(5):
        inputs = [rows(at) for at in range(100)]
        given_up = [weakref.ref(tensor["x"]) for tensor in inputs]
        tasks = await site.ask_and_wait(*inputs)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        assert site.servable.queue_depth == 1
        del inputs, tasks, task
        gc.collect()
        assert not any(reference() is not None for reference in given_up)
    model.open_point("infer")
    await asyncio.gather(busy, *kept)
    assert model.batches == [[0], [1]]
    await site.servable.close()


async def test_higher_priorities_go_first() -> None:
    batching = DynamicBatching(priority_levels=3, default_priority_level=2)
    model = Batched(batching, open_gate=False, max_batch_size=2)
    site = Site(model)
    busy = await site.busy(model)
    tasks = [
        site.ask(rows(value), call(Scheduling(priority=priority)))
        for value, priority in ((1, 3), (2, 0), (3, 1), (4, 7), (5, 1), (6, 3), (7, 2))
    ]
    await site.until(7)
    model.open_point("infer")
    await asyncio.gather(busy, *tasks)
    assert model.batches == [[0], [3, 5], [2, 4], [7, 1], [6]]
    await site.servable.close()


async def test_levels_without_number_leave_nothing_behind() -> None:
    batching = DynamicBatching(priority_levels=2**64 - 1, default_priority_level=2**63)
    model = Batched(batching, open_gate=False, max_batch_size=1)
    site = Site(model)
    priorities = [*range(100, 0, -1), 2**64 - 1, 0]
    gc.collect()
    others = [tracked for tracked in gc.get_objects() if type(tracked) is Level]
    for _ in range(2):
        model.close_point("infer")
        model.batches.clear()
        busy = await site.busy(model)
        tasks = [
            site.ask(rows(at + 1), call(Scheduling(priority=priority))) for at, priority in enumerate(priorities)
        ]
        await site.until(len(tasks))
        model.open_point("infer")
        await asyncio.gather(busy, *tasks)
        assert model.batches == [[0], *([at] for at in range(100, 0, -1)), [102], [101]]
        kept = sum(type(tracked) is Level for tracked in gc.get_objects()) - len(others)
        assert kept <= MAX_EMPTY_LANES
    await site.servable.close()


async def test_a_levels_own_queue_can_be_full() -> None:
    batching = DynamicBatching(
        priority_levels=2, default_priority_level=1, policies={2: QueuePolicy(max_queue_size=1)}
    )
    model = Batched(batching, open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    low = site.ask(rows(1), call(Scheduling(priority=2)))
    others = await site.ask_and_wait(rows(2))
    await site.until(2)
    with pytest.raises(QueueFull, match="1 requests of priority level 2 are queued"):
        await site.ask(rows(3), call(Scheduling(priority=2)))
    low.cancel()
    await asyncio.wait([low])
    again = site.ask(rows(4), call(Scheduling(priority=2)))
    await site.until(2)
    model.open_point("infer")
    await asyncio.gather(busy, again, *others)
    low = site.ask(rows(5), call(Scheduling(priority=2)))
    assert first_values(await low) == [10]
    await site.servable.close()


@pytest.mark.parametrize(
    ("policy", "own", "refused"),
    [
        (QueuePolicy(timeout=0.01), 0.0, True),
        (QueuePolicy(timeout=FOREVER, allow_timeout_override=True), 0.01, True),
        # A request's own timeout only shortens one, and only where that is allowed.
        (QueuePolicy(timeout=FOREVER), 0.01, False),
        (QueuePolicy(allow_timeout_override=True), 0.01, False),
        (QueuePolicy(timeout=0.01, allow_timeout_override=True), FOREVER, True),
    ],
)
async def test_a_request_that_has_waited_too_long_is_refused_while_every_instance_is_busy(
    policy: QueuePolicy, own: float, refused: bool
) -> None:
    # What keeps the instance busy is of another level, and may be late.
    batching = DynamicBatching(
        policy=policy, priority_levels=2, default_priority_level=2, policies={1: QueuePolicy()}
    )
    model = Batched(batching, open_gate=False)
    site = Site(model)
    busy = await site.busy(model, call(Scheduling(priority=1)))
    task = site.ask(rows(1), call(Scheduling(timeout=own)))
    if refused:
        with pytest.raises(Unavailable, match=r"^Request timeout expired$"):
            await task
        assert site.reading("queue_timeouts") == 1
        model.open_point("infer")
        await busy
    else:
        await site.until(1)
        model.open_point("infer")
        await asyncio.gather(busy, task)
    assert model.batches == [[0]] + ([] if refused else [[1]])
    await site.servable.close()


async def test_a_request_that_expires_while_its_batch_grows_is_refused() -> None:
    batching = DynamicBatching(max_queue_delay=FOREVER, policy=QueuePolicy(timeout=0.01))
    site = Site(Batched(batching))
    with pytest.raises(Unavailable, match="Request timeout expired"):
        await site.ask(rows(1))
    assert site.closed() == {}
    await site.servable.close()


async def test_expired_requests_go_behind_the_others() -> None:
    policy = QueuePolicy(timeout=FOREVER, delay_expired=True, allow_timeout_override=True)
    model = Batched(DynamicBatching(policy=policy), open_gate=False, max_batch_size=2)
    site = Site(model)
    busy = await site.busy(model)
    own = call(Scheduling(timeout=1e-6))
    tasks = [site.ask(rows(1), own), *(await site.ask_and_wait(rows(2), rows(3), rows(4)))]
    await site.until(4)
    model.open_point("infer")
    await asyncio.gather(busy, *tasks)
    assert model.batches == [[0], [2, 3], [4, 1]]
    await site.servable.close()


async def test_tensorflow_servings_limits_and_texts() -> None:
    batching = DynamicBatching(max_batch_size=4, max_waiting_batches=2)
    model = Batched(batching, open_gate=False, max_batch_size=0)
    site = Site(model)
    busy = await site.busy(model)
    tasks = await site.ask_and_wait(rows(1, 2, 3), rows(4, 5, 6), rows(7, 8))
    with pytest.raises(
        Unavailable,
        match=r"^The batch scheduling queue to which this task was submitted is full; "
        r"currently 2 batches enqueued and max_enqueued_batches is 2$",
    ):
        await site.ask(rows(9))
    for inputs, text in (
        (rows(1, 2, 3, 4, 5), "Task size 5 is larger than maximum input batch size 4"),
        ({"x": np.float32(1)}, "Batching Run.. input tensors must have at least one dimension"),
        ({"x": np.zeros(2), "y": np.zeros(3)}, "Batching Run.. input tensors must have equal 0th-dimension size"),
    ):
        with pytest.raises(InvalidArgument, match=text):
            await site.ask(inputs)
    model.open_point("infer")
    await asyncio.gather(busy, *tasks)
    await site.servable.close()
