"""Batches that threads take from a queue themselves."""

from __future__ import annotations

import threading
import time

from triglot.scheduling.forming import Rules, Waiting
from triglot.scheduling.thread_queue import ThreadQueue


def place(work: str, key: object) -> Waiting:
    return Waiting(work, 1, key, time.monotonic())


def taken(queue: ThreadQueue) -> list[str]:
    batch = queue.take(lambda: False)
    assert batch is not None
    return [member.work for member in batch.members]


def test_batch_has_requests_of_the_oldest_ones_kind() -> None:
    queue = ThreadQueue(Rules(2))
    for work, key in (("a1", "a"), ("b1", "b"), ("a2", "a"), ("a3", "a")):
        queue.put(place(work, key))
    assert [taken(queue), taken(queue), taken(queue)] == [["a1", "a2"], ["b1"], ["a3"]]
    assert len(queue) == 0


def test_discarded_request_is_in_no_batch() -> None:
    queue = ThreadQueue(Rules(2))
    first, second = place("first", "a"), place("second", "a")
    for request in (first, second):
        queue.put(request)
    queue.discard(first)
    queue.discard(first)
    assert taken(queue) == ["second"]


def test_waiting_thread_takes_what_arrives_and_ends_when_it_has_to() -> None:
    queue, ends, works = ThreadQueue(Rules(1)), threading.Event(), []

    def run() -> None:
        while batch := queue.take(ends.is_set):
            works.extend([member.work for member in batch.members])
            ends.set()

    thread = threading.Thread(target=run)
    thread.start()
    queue.put(place("x", None))
    thread.join(30)
    assert works == ["x"]

    ends.clear()
    thread = threading.Thread(target=run)
    thread.start()
    ends.set()
    queue.wake()
    thread.join(30)
    assert not thread.is_alive()
