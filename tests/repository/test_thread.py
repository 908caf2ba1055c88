"""Blocking work off the loop: its result, its end, and late results."""

from __future__ import annotations

import asyncio
import threading

import pytest

from triglot.repository.manager.thread import in_thread

SECONDS = 20


async def test_a_result_and_an_error() -> None:
    assert await in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(KeyError):
        await in_thread({}.popitem)


async def test_abandoned_result() -> None:
    begun, go, late = threading.Event(), threading.Event(), threading.Event()
    results: list[object] = []

    def work() -> str:
        begun.set()
        assert go.wait(SECONDS)
        return "model"

    def keep(result: str) -> None:
        results.append(result)
        late.set()

    waiting = asyncio.create_task(in_thread(work, keep))
    assert await asyncio.to_thread(begun.wait, SECONDS)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    assert await asyncio.to_thread(late.wait, SECONDS)
    assert results == ["model"]


class Work:
    """Work that has a result when the test says so."""

    def __init__(self) -> None:
        self.begun, self.go, self.late = threading.Event(), threading.Event(), threading.Event()
        self.thread: threading.Thread | None = None
        self.results: list[object] = []

    def __call__(self) -> str:
        self.thread = threading.current_thread()
        self.begun.set()
        assert self.go.wait(SECONDS)
        return "model"

    def keep(self, result: str) -> None:
        self.results.append(result)
        self.late.set()

    def end(self) -> None:
        """Until the thread has told the loop, which does not turn meanwhile."""
        assert self.thread is not None
        self.go.set()
        self.thread.join(SECONDS)
        assert not self.thread.is_alive()


async def test_a_result_that_comes_in_the_turn_of_the_cancellation() -> None:
    work = Work()
    waiting = asyncio.create_task(in_thread(work, work.keep))
    assert await asyncio.to_thread(work.begun.wait, SECONDS)
    waiting.cancel()
    work.end()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(work.late.wait, SECONDS)
    assert work.results == ["model"]


async def test_a_cancellation_that_comes_in_the_turn_of_the_result() -> None:
    work = Work()
    waiting = asyncio.create_task(in_thread(work, work.keep))
    assert await asyncio.to_thread(work.begun.wait, SECONDS)
    work.end()
    # In this turn the loop delivers the result; the task that waits has its turn after this one.
    await asyncio.sleep(0)
    assert not waiting.done()
    assert waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert await asyncio.to_thread(work.late.wait, SECONDS)
    assert work.results == ["model"]


def test_a_result_when_the_loop_is_closed() -> None:
    work = Work()

    async def main() -> None:
        waiting = asyncio.create_task(in_thread(work, work.keep))
        assert await asyncio.to_thread(work.begun.wait, SECONDS)
        del waiting

    asyncio.run(main())
    work.end()
    assert work.results == ["model"]


def test_work_that_never_ends_does_not_keep_the_loop_from_ending() -> None:
    begun, go = threading.Event(), threading.Event()

    def work() -> None:
        begun.set()
        assert go.wait(SECONDS)

    async def main() -> None:
        waiting = asyncio.create_task(in_thread(work))
        assert await asyncio.to_thread(begun.wait, SECONDS)
        waiting.cancel()

    asyncio.run(main())
    assert not go.is_set()
    go.set()
