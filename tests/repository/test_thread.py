"""Blocking work off the loop: its result, its end, and what comes too late."""

from __future__ import annotations

import asyncio
import threading

import pytest

from triglot.repository.thread import in_thread

SECONDS = 20


async def test_a_result_and_an_error() -> None:
    assert await in_thread(threading.get_ident) != threading.get_ident()
    with pytest.raises(KeyError):
        await in_thread({}.popitem)


async def test_a_result_that_nobody_waits_for() -> None:
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
