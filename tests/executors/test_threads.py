"""Threads as an executor: what is started on the loop, taken by threads, discarded, and left at the end."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from tests.direct_work import FutureWork
from triglot.core.call import Call
from triglot.core.errors import Code, QueueFull, Unavailable
from triglot.executors.thread import ThreadExecutor
from triglot.executors.work import Explain, Function, explained
from triglot.scheduling.loaded_version import Queue

SECONDS = 30.0


class Noted(FutureWork):
    """Work that notes that it runs, in `taken`, by thread; it is delivered as its `future`."""

    def __init__(self, number: int, taken: dict[str, list[int]]) -> None:
        super().__init__({}, Call())
        self.number = number
        self.taken = taken

    def run(self, function: Function, explain: Explain) -> None:
        """See `Runnable`."""
        self.taken.setdefault(threading.current_thread().name, []).append(self.number)
        function({}, None)  # type: ignore[arg-type]

    def deliver(self) -> None:
        """See `Runnable`."""
        self.future.set_result(None)


@asynccontextmanager
async def executor(function: Callable[..., Any] = lambda *_: None, *, threads: int = 1) -> AsyncIterator[Any]:
    """An executor of so many threads, which have ended in the end."""
    names = map(str, itertools.count())
    made = ThreadExecutor(names, threads, function, partial(explained, "the model"), asyncio.get_running_loop())
    made.open()
    yield made
    made.close()
    await asyncio.to_thread(made.join)
    assert not made.alive


class Gate:
    """A model that holds its thread until it is open."""

    def __init__(self) -> None:
        self.entered = threading.Semaphore(0)
        self.open = threading.Event()

    def __call__(self, *_: object) -> None:
        self.entered.release()
        assert self.open.wait(SECONDS)

    async def has_thread(self) -> None:
        """Wait until a thread is held."""
        assert await asyncio.to_thread(self.entered.acquire, timeout=SECONDS)


async def test_work_runs_in_the_order_in_which_it_was_started() -> None:
    async with executor() as pool:
        taken: dict[str, list[int]] = {}
        works = [Noted(number, taken) for number in range(5)]
        for work in works:
            pool.start(work)
        await asyncio.gather(*(work.future for work in works))
        assert taken == {"0": [0, 1, 2, 3, 4]}


async def test_a_full_queue_refuses_at_once_with_a_retry_hint() -> None:
    gate, taken = Gate(), dict[str, list[int]]()
    async with executor(gate) as pool:
        queue = Queue(2, pool, asyncio.get_running_loop().call_soon)
        works = [Noted(number, taken) for number in range(4)]
        queue.put(works[0])
        await gate.has_thread()
        queue.put(works[1])
        queue.put(works[2])
        with pytest.raises(QueueFull, match="Exceeds maximum queue size: 2 requests are queued") as caught:
            queue.put(works[3])
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        assert caught.value.retry_after is not None
        assert len(queue) == 2
        gate.open.set()
        await asyncio.gather(*(work.future for work in works[:3]))
        queue.put(works[3])
        await works[3].future
        queue.close()
        with pytest.raises(Unavailable, match="unloaded"):
            queue.put(works[3])


async def test_discarded_work_makes_room_and_is_never_run() -> None:
    gate, taken = Gate(), dict[str, list[int]]()
    async with executor(gate) as pool:
        works = [Noted(number, taken) for number in range(3)]
        pool.start(works[0])
        await gate.has_thread()
        pool.start(works[1])
        pool.start(works[2])
        assert pool.discard(works[1])
        assert not pool.discard(works[1])
        assert not pool.discard(works[0])
        gate.open.set()
        await asyncio.gather(works[0].future, works[2].future)
        assert taken == {"0": [0, 2]}


async def test_threads_are_woken_once_for_all_that_one_turn_starts() -> None:
    async with executor() as pool:
        taken, deferred = dict[str, list[int]](), list[Callable[[], None]]()
        works = [Noted(number, taken) for number in range(3)]
        for work in works:
            pool.start(work, deferred.append)
        assert len(deferred) == 1
        deferred.pop()()
        await asyncio.gather(*(work.future for work in works))
        pool.start(again := Noted(3, taken), deferred.append)
        assert len(deferred) == 1
        deferred.pop()()
        await again.future


@pytest.mark.parametrize("threads", [1, 4])
async def test_threads_run_everything_exactly_once(threads: int) -> None:
    async with executor(threads=threads) as pool:
        taken: dict[str, list[int]] = {}
        works = [Noted(number, taken) for number in range(20_000)]
        for work in works:
            pool.start(work)
        await asyncio.gather(*(work.future for work in works))
    assert Counter(number for of in taken.values() for number in of) == Counter(range(20_000))
    assert all(of == sorted(of) for of in taken.values())


async def test_what_waits_is_run_before_the_end() -> None:
    gate, taken = Gate(), dict[str, list[int]]()
    async with executor(gate, threads=2) as pool:
        works = [Noted(number, taken) for number in range(5)]
        for work in works:
            pool.start(work)
        pool.close()
        gate.open.set()
    await asyncio.gather(*(work.future for work in works))
    assert sorted(number for of in taken.values() for number in of) == [0, 1, 2, 3, 4]
