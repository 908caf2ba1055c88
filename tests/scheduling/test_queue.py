"""The queue between the loop and the instance threads."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable

import pytest

from triglot.core.errors import Code, QueueFull
from triglot.scheduling.queue import WorkQueue


def immediately(function: Callable[[], None]) -> None:
    function()


def test_work_comes_out_in_the_order_it_went_in() -> None:
    queue: WorkQueue[int] = WorkQueue(10, immediately)
    for number in range(5):
        queue.put(number)
    assert [queue.take() for _ in range(5)] == [0, 1, 2, 3, 4]
    assert len(queue) == 0


def test_a_full_queue_refuses_at_once_with_a_retry_hint() -> None:
    queue: WorkQueue[int] = WorkQueue(2, immediately)
    queue.put(1)
    queue.put(2)
    with pytest.raises(QueueFull, match="Exceeds maximum queue size") as caught:
        queue.put(3)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    assert caught.value.retry_after is not None
    assert queue.take() == 1
    queue.put(3)
    assert len(queue) == 2


def test_discarded_work_makes_room_and_is_never_taken() -> None:
    queue: WorkQueue[str] = WorkQueue(2, immediately)
    queue.put("dead")
    queue.put("alive")
    assert queue.discard("dead")
    queue.put("next")
    assert [queue.take(), queue.take()] == ["alive", "next"]
    assert not queue.discard("alive")


def test_threads_are_called_once_for_all_that_one_turn_puts() -> None:
    deferred: list[Callable[[], None]] = []
    queue: WorkQueue[int] = WorkQueue(10, deferred.append)
    for number in range(3):
        queue.put(number)
    assert len(deferred) == 1
    deferred.pop()()
    queue.put(3)
    assert len(deferred) == 1


@pytest.mark.parametrize("threads", [1, 4])
def test_many_threads_take_everything_exactly_once(threads: int) -> None:
    queue: WorkQueue[int] = WorkQueue(100_000, immediately)
    taken: list[list[int]] = [[] for _ in range(threads)]

    def drain(into: list[int]) -> None:
        while (work := queue.take()) is not None:
            into.append(work)

    workers = [threading.Thread(target=drain, args=(into,)) for into in taken]
    for worker in workers:
        worker.start()
    for number in range(1, 20_001):
        queue.put(number)
    queue.close()
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()
    assert Counter(number for into in taken for number in into) == Counter(range(1, 20_001))
    assert all(into == sorted(into) for into in taken)


def test_close_ends_threads_that_wait() -> None:
    queue: WorkQueue[int] = WorkQueue(1, immediately)
    waiting = [threading.Thread(target=queue.take) for _ in range(3)]
    for thread in waiting:
        thread.start()
    queue.close()
    for thread in waiting:
        thread.join(10)
        assert not thread.is_alive()
