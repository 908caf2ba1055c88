"""Streams whose answers a plain function sends by `call.respond`."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest
from scripted_models import Inputs, Plain, number

from triglot import Call
from triglot.core.errors import Cancelled, ServingError
from triglot.executors.stream import STREAM_BUFFER
from triglot.scheduling.servable import Servable
from waiting import until


def servable(infer: Any) -> Servable:
    return Servable("m", 1, Plain(infer), max_queue_size=8)


async def collect(answers: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in answers]


async def test_what_is_sent_comes_in_order_and_the_result_last() -> None:
    def infer(inputs: Inputs, call: Call) -> str:
        for value in range(5 * STREAM_BUFFER):
            assert call.respond(value)
        return "result"

    one = servable(infer)
    assert await collect(one.stream(number(0), Call())) == [*range(5 * STREAM_BUFFER), "result"]
    await one.close()


async def test_a_model_that_sends_nothing_gives_an_empty_stream() -> None:
    one = servable(lambda inputs, call: None)
    assert await collect(one.stream(number(0), Call())) == []
    await one.close()


async def test_a_coroutines_result_is_a_stream_of_one() -> None:
    async def infer(inputs: Inputs) -> str:
        return "result"

    one = servable(infer)
    assert await collect(one.stream(number(0), Call())) == ["result"]
    await one.close()


async def test_nothing_is_lost_when_many_threads_send() -> None:
    def infer(inputs: Inputs, call: Call) -> None:
        def send(thread: int) -> None:
            for value in range(200):
                assert call.respond((thread, value))

        threads = [threading.Thread(target=send, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    one = servable(infer)
    sent = await collect(one.stream(number(0), Call()))
    assert Counter(thread for thread, _ in sent) == dict.fromkeys(range(4), 200)
    assert all([value for sender, value in sent if sender == thread] == list(range(200)) for thread in range(4))
    await one.close()


async def test_a_slow_reader_holds_the_sender_up() -> None:
    sent = 0

    def infer(inputs: Inputs, call: Call) -> None:
        nonlocal sent
        while call.respond(sent + 1):
            sent += 1

    one = servable(infer)
    stream = one.stream(number(0), Call())
    for expected in range(1, 101):
        assert await anext(stream) == expected
        assert sent <= expected + STREAM_BUFFER
    await stream.aclose()
    await one.close()


async def test_a_reader_that_leaves_frees_every_thread_that_sends() -> None:
    refused = threading.Semaphore(0)

    def infer(inputs: Inputs, call: Call) -> None:
        def send() -> None:
            while call.respond(0):
                pass
            refused.release()

        threads = [threading.Thread(target=send) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    one = servable(infer)
    call = Call()
    stream = one.stream(number(0), call)
    await anext(stream)
    await stream.aclose()
    assert call.cancelled
    for _ in range(4):
        assert await asyncio.to_thread(refused.acquire, timeout=30)
    await one.close()


async def test_a_stream_that_is_finished_ends_before_its_model_does() -> None:
    gate, done = threading.Event(), threading.Event()
    after: list[bool] = []

    def infer(inputs: Inputs, call: Call) -> str:
        call.respond("last")
        call.finish()
        assert gate.wait(30)
        after.append(call.respond("too late"))
        done.set()
        return "nobody reads it"

    one = servable(infer)
    assert await collect(one.stream(number(0), Call())) == ["last"]
    gate.set()
    assert await asyncio.to_thread(done.wait, 30)
    assert after == [False]
    await one.close()


async def test_an_error_comes_after_what_was_sent() -> None:
    def infer(inputs: Inputs, call: Call) -> None:
        call.respond(1)
        raise Cancelled("enough")

    one = servable(infer)
    stream = one.stream(number(0), Call())
    assert await anext(stream) == 1
    with pytest.raises(ServingError, match="enough"):
        await anext(stream)
    await one.close()


async def test_outside_of_a_stream_nobody_listens() -> None:
    one = servable(lambda inputs, call: call.respond("?"))
    assert await one.infer(number(0), Call()) is False
    await one.close()


async def test_a_call_knows_how_long_it_waited_and_ran() -> None:
    entered, gate = threading.Semaphore(0), threading.Semaphore(0)

    def infer(inputs: Inputs) -> int:
        entered.release()
        assert gate.acquire(timeout=30)
        return 1

    one = servable(infer)
    # Both wait before the first of them runs.
    busy = asyncio.ensure_future(one.infer(number(0), Call()))
    assert await asyncio.to_thread(entered.acquire, timeout=30)
    first, second = Call(), Call()
    running = [asyncio.ensure_future(one.infer(number(0), call)) for call in (first, second)]
    await until(lambda: one.queue_depth == 2)
    gate.release()
    assert await asyncio.to_thread(entered.acquire, timeout=30)
    assert one.queue_depth == 1
    gate.release(2)
    assert await busy == 1
    assert await asyncio.gather(*running) == [1, 1]
    assert (first.times.batch_size, second.times.batch_size) == (1, 1)
    # The second waited as long as the first ran, at least.
    assert second.times.queue_seconds >= first.times.compute_seconds > 0 < second.times.compute_seconds
    await one.close()
