"""From an instance's thread to the loop: whatever one result does there, the next ones arrive."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path

import pytest

from tests.direct_work import FutureWork, direct_infer
from tests.scheduling.scripted_models import Scripted, number, servable
from triglot.core.call import Call
from triglot.executors.thread import Doorbell, LoopInbox, ThreadExecutor
from triglot.executors.work import explained
from triglot.scheduling.servable import Servable

SECONDS = 30.0


async def test_what_fails_to_be_received_holds_up_nothing_else(caplog: pytest.LogCaptureFixture) -> None:
    received: list[int] = []
    all_received = asyncio.Event()

    def receive(item: int) -> None:
        if item % 3 == 0:
            raise ValueError(f"no {item}")
        received.append(item)
        if item == 8:
            all_received.set()

    inbox = LoopInbox[int](asyncio.get_running_loop(), receive)

    # The loop does not run meanwhile: all of them wait for one wake-up.
    def put_all() -> None:
        for item in range(9):
            inbox.put(item)

    putting = threading.Thread(target=put_all)
    putting.start()
    putting.join()
    await asyncio.wait_for(all_received.wait(), SECONDS)
    assert received == [1, 2, 4, 5, 7, 8]
    assert [f"no {item}" in caplog.text for item in (0, 3, 6)] == [True] * 3


async def test_what_is_put_while_the_bell_is_answered_does_not_silence_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read = os.read
    received: asyncio.Queue[int] = asyncio.Queue()
    inbox = LoopInbox[int](asyncio.get_running_loop(), received.put_nowait)

    def put(item: int) -> None:
        putting = threading.Thread(target=inbox.put, args=(item,))
        putting.start()
        putting.join()

    for before in (True, False):

        def answer(file: int, size: int, before: bool = before) -> bytes:
            monkeypatch.setattr(os, "read", read)
            if before:
                put(2)
            rings = read(file, size)
            if not before:
                put(2)
            return rings

        monkeypatch.setattr(os, "read", answer)
        for item in (1, 3):
            put(item)
            assert await asyncio.wait_for(received.get(), SECONDS) == item
            if item == 1:
                assert await asyncio.wait_for(received.get(), SECONDS) == 2
    inbox.close()


async def test_what_was_put_just_before_the_end_arrives() -> None:
    received: asyncio.Queue[int] = asyncio.Queue()
    inbox = LoopInbox[int](asyncio.get_running_loop(), received.put_nowait)

    def end() -> None:
        inbox.put(1)
        inbox.close()

    ending = threading.Thread(target=end)
    ending.start()
    ending.join()
    assert await asyncio.wait_for(received.get(), SECONDS) == 1


async def test_nothing_is_left_of_servables() -> None:
    def files() -> int:
        gc.collect()
        return len(list(Path("/proc/self/fd").iterdir()))

    async def serve() -> Servable:
        served = servable(Scripted(instances=3))
        await asyncio.gather(*(direct_infer(served, number(value), Call()) for value in range(9)))
        await served.close()
        return served

    await serve()
    at_first = files()
    closed = [await serve() for _ in range(10)]
    assert files() <= at_first
    assert len(closed) == 10


@pytest.mark.parametrize("of", ["eventfd", "pipe"])
def test_doorbell_wakes_before_and_after_a_wait(of: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if of == "pipe":
        monkeypatch.delattr(os, "eventfd")
    forth, back = Doorbell(), Doorbell()
    woken: list[int] = []

    def answer() -> None:
        for count in range(100):
            forth.wait()
            woken.append(count)
            back.ring()

    forth.ring()
    answering = threading.Thread(target=answer)
    answering.start()
    for count in range(1, 100):
        back.wait()
        assert len(woken) == count
        forth.ring()
    answering.join(SECONDS)
    assert not answering.is_alive()


async def test_a_queue_that_fails_does_not_end_the_thread(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    read = os.read
    failures = 3
    failed = threading.Event()

    def fail_at_first(file: int, size: int) -> bytes:
        nonlocal failures
        if threading.current_thread().name == "m" and failures:
            failures -= 1
            if not failures:
                failed.set()
            raise MemoryError("no room to look")
        return read(file, size)

    monkeypatch.setattr(os, "read", fail_at_first)
    executor = ThreadExecutor(iter("m"), 1, lambda inputs, _: inputs, lambda error: explained("m", error), loop)
    executor.open()
    assert await asyncio.to_thread(failed.wait, SECONDS)
    execution = FutureWork({}, Call())
    executor.start(execution)
    assert await asyncio.wait_for(execution.future, SECONDS) == {}
    assert "no room to look" in caplog.text
    executor.close()
    executor.join()
