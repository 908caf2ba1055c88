"""What would hold up the event loop runs beside it."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator

import pytest

from triglot.engine.off_loop import MOST_THREADS, OffLoop


@pytest.fixture(name="off_loop")
async def opened() -> AsyncIterator[OffLoop]:
    off_loop = OffLoop()
    yield off_loop
    await off_loop.close()


async def test_what_it_returns_and_raises_comes_back(off_loop: OffLoop) -> None:
    main = threading.get_ident()
    assert await off_loop(threading.get_ident) != main
    error = KeyError("it")

    def fails() -> None:
        raise error

    with pytest.raises(KeyError) as raised:
        await off_loop(fails)
    assert raised.value is error
    assert await off_loop(lambda: 3) == 3


async def test_several_run_at_the_same_time_and_others_wait(off_loop: OffLoop) -> None:
    together = threading.Barrier(MOST_THREADS)
    places = await asyncio.gather(*[off_loop(together.wait) for _ in range(3 * MOST_THREADS)])
    assert sorted(places) == sorted(3 * list(range(MOST_THREADS)))


async def test_what_nobody_awaits_any_more_is_not_begun(off_loop: OffLoop) -> None:
    goes_on, begun = threading.Event(), []
    held = [asyncio.ensure_future(off_loop(goes_on.wait)) for _ in range(MOST_THREADS)]
    left = asyncio.ensure_future(off_loop(lambda: begun.append(1)))
    await asyncio.sleep(0)
    left.cancel()
    with pytest.raises(asyncio.CancelledError):
        await left
    held.pop().cancel()  # This one has begun, or has not: its thread goes on either way.
    goes_on.set()
    assert await asyncio.gather(*held) == [True] * (MOST_THREADS - 1)
    assert await off_loop(lambda: 4) == 4
    assert begun == []


async def test_the_end_waits_for_what_has_begun() -> None:
    off_loop, begun, ended = OffLoop(), threading.Event(), []
    await off_loop.close()  # Nothing was asked of it.

    def work() -> None:
        begun.set()
        ended.append(1)

    running = asyncio.ensure_future(off_loop(work))
    await asyncio.to_thread(begun.wait)
    await off_loop.close()
    assert ended == [1]
    await running


class Large:
    def measure(self) -> int:
        return 7


async def test_nothing_of_it_is_kept(off_loop: OffLoop) -> None:
    async def once() -> weakref.ref[Large]:
        large = Large()
        assert await off_loop(large.measure) == 7
        return weakref.ref(large)

    gc.disable()
    try:
        kept = await once()
        await off_loop(lambda: None)  # The thread has gone on to something else.
        assert kept() is None
    finally:
        gc.enable()
