"""Streams whose answers a plain function sends by `call.respond`."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from queue import SimpleQueue
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_infer, direct_stream
from tests.scheduling.scripted_models import Inputs, Plain, number
from tests.waiting import until
from triglot import Call, Model
from triglot.core.errors import Cancelled, Code, ServingError, UnreadResponses
from triglot.core.response_buffer import RESPONSE_BYTES, STREAM_BUFFER, memory_of
from triglot.model.scheduling import DynamicBatching
from triglot.scheduling.servable import Servable


def servable(infer: Any) -> Servable:
    return Servable("m", 1, Plain(infer), max_queue_size=8)


async def collect(answers: AsyncIterator[Any]) -> list[Any]:
    return [answer async for answer in answers]


async def test_what_is_sent_comes_in_order_and_the_result_last() -> None:
    def infer(inputs: Inputs, call: Call) -> str:
        for value in range(5 * STREAM_BUFFER):
            assert call.respond(value)
        return "result"

    served = servable(infer)
    assert await collect(direct_stream(served, number(0), Call())) == [*range(5 * STREAM_BUFFER), "result"]
    await served.close()


async def test_a_model_that_sends_nothing_gives_an_empty_stream() -> None:
    served = servable(lambda inputs, call: None)
    assert await collect(direct_stream(served, number(0), Call())) == []
    await served.close()


async def test_a_coroutines_result_is_a_stream_of_one() -> None:
    async def infer(inputs: Inputs) -> str:
        return "result"

    served = servable(infer)
    assert await collect(direct_stream(served, number(0), Call())) == ["result"]
    await served.close()


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

    served = servable(infer)
    sent = await collect(direct_stream(served, number(0), Call()))
    assert Counter(thread for thread, _ in sent) == dict.fromkeys(range(4), 200)
    assert all([value for sender, value in sent if sender == thread] == list(range(200)) for thread in range(4))
    await served.close()


async def test_a_slow_reader_holds_the_sender_up() -> None:
    sent = 0

    def infer(inputs: Inputs, call: Call) -> None:
        nonlocal sent
        while call.respond(sent + 1):
            sent += 1

    served = servable(infer)
    stream = direct_stream(served, number(0), Call())
    for expected in range(1, 101):
        assert await anext(stream) == expected
        assert sent <= expected + STREAM_BUFFER
    await stream.aclose()
    await served.close()


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

    served = servable(infer)
    call = Call()
    stream = direct_stream(served, number(0), call)
    await anext(stream)
    await stream.aclose()
    assert call.cancelled
    for _ in range(4):
        assert await asyncio.to_thread(refused.acquire, timeout=30)
    await served.close()


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

    served = servable(infer)
    assert await collect(direct_stream(served, number(0), Call())) == ["last"]
    gate.set()
    assert await asyncio.to_thread(done.wait, 30)
    assert after == [False]
    await served.close()


async def test_an_error_comes_after_what_was_sent() -> None:
    def infer(inputs: Inputs, call: Call) -> None:
        call.respond(1)
        raise Cancelled("enough")

    served = servable(infer)
    stream = direct_stream(served, number(0), Call())
    assert await anext(stream) == 1
    with pytest.raises(ServingError, match="enough"):
        await anext(stream)
    await served.close()


async def test_pushed_responses_outside_a_stream_are_discarded() -> None:
    served = servable(lambda inputs, call: call.respond("?"))
    assert await direct_infer(served, number(0), Call()) is False
    await served.close()


async def test_a_call_knows_how_long_it_waited_and_ran() -> None:
    entered, gate = threading.Semaphore(0), threading.Semaphore(0)

    def infer(inputs: Inputs) -> int:
        entered.release()
        assert gate.acquire(timeout=30)
        return 1

    served = servable(infer)
    # Both wait before the first of them runs.
    busy = asyncio.ensure_future(direct_infer(served, number(0), Call()))
    assert await asyncio.to_thread(entered.acquire, timeout=30)
    first, second = Call(), Call()
    running = [asyncio.ensure_future(direct_infer(served, number(0), call)) for call in (first, second)]
    await until(lambda: served.queue_depth == 2)
    gate.release()
    assert await asyncio.to_thread(entered.acquire, timeout=30)
    assert served.queue_depth == 1
    gate.release(2)
    assert await busy == 1
    assert await asyncio.gather(*running) == [1, 1]
    assert (first.batch_size, second.batch_size) == (1, 1)
    # The second waited as long as the first ran, at least.
    assert second.queue_seconds >= first.compute_seconds > 0 < second.compute_seconds
    await served.close()


# --- a reader that does not read ---

LIMIT = 50_000
LARGE = np.zeros(1000, np.uint8)
LATE = "max_unread_bytes"


def limited(model: Model) -> Servable:
    return Servable("m", 1, model, max_queue_size=8, max_unread_bytes=LIMIT)


def endless(inputs: Inputs) -> Iterator[Any]:
    yield LARGE
    while not inputs["x"][0]:
        yield LARGE


def pushing(inputs: Inputs, call: Call) -> None:
    while call.respond(LARGE) and not inputs["x"][0]:
        pass


class FromOneThread(Model):
    """Two instances, whose responses one thread sends, in turn."""

    inputs, outputs, instances = Plain.inputs, Plain.outputs, 2

    def __init__(self) -> None:
        self.queue: SimpleQueue[tuple[Call, threading.Event, int] | None] = SimpleQueue()
        self.thread = threading.Thread(target=self.send_all)
        self.thread.start()

    def infer(self, inputs: Inputs, call: Call) -> None:
        done = threading.Event()
        self.queue.put((call, done, int(inputs["x"][0])))
        assert done.wait(30)

    def send_all(self) -> None:
        while (item := self.queue.get()) is not None:
            call, done, last = item
            if call.respond(LARGE) and not last:
                self.queue.put(item)
            else:
                done.set()

    def close(self) -> None:
        self.queue.put(None)
        self.thread.join()


class Batched(Model):
    """Two requests in a call, to each of which it sends in turn."""

    inputs, outputs = Plain.inputs, Plain.outputs
    dynamic_batching = DynamicBatching(max_batch_size=2, max_queue_delay=30)

    def infer(self, inputs: Inputs, call: Call) -> Any:
        raise AssertionError("infer_batch is there")

    def infer_batch(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Any]:
        open_ = [(call, tensor["x"][0]) for tensor, call in zip(inputs, calls, strict=True)]
        while open_:
            open_ = [(call, last) for call, last in open_ if call.respond(LARGE) and not last]
        return [None] * len(calls)


@pytest.mark.parametrize(
    "make",
    [lambda: Plain(endless), lambda: Plain(pushing), FromOneThread, Batched],
    ids=["generator", "respond", "one thread", "batch"],
)
async def test_unread_stream_stalls_no_other_and_gets_an_error(make: Callable[[], Model]) -> None:
    served = limited(make())
    call = Call()
    stalled, other = direct_stream(served, number(0), call), direct_stream(served, number(1), Call())
    first = asyncio.ensure_future(anext(stalled))
    assert len(await asyncio.wait_for(collect(other), 30)) == 1
    await first
    await until(lambda: call.cancelled)
    with pytest.raises(UnreadResponses, match=LATE) as caught:
        await collect(stalled)
    assert caught.value.code is Code.RESOURCE_EXHAUSTED
    await served.close()


async def test_a_burst_for_a_reader_that_reads_is_no_error() -> None:
    def infer(inputs: Inputs, call: Call) -> None:
        def send() -> None:
            for _ in range(count):
                assert call.respond(LARGE)

        thread = threading.Thread(target=send)
        thread.start()
        thread.join()

    count = 40 * LIMIT // LARGE.nbytes
    served = limited(Plain(infer))
    assert len(await collect(direct_stream(served, number(0), Call()))) == count
    await served.close()


@pytest.mark.parametrize(
    ("response", "size"),
    [
        ({}, 0),
        ({"y": np.zeros(1000, np.float32)}, 4000),
        ({"y": np.zeros(100), "z": np.zeros(100)}, 1600),
        ({"y": np.array([b"x" * 1000, "y" * 1000], object)}, 2000),
        ({"y": np.array([b"x" * 1000])}, 1000),
        ({"y": [0.0] * 1000}, 8000),
        (b"x" * 1000, 1000),
    ],
)
def test_what_a_response_takes(response: object, size: int) -> None:
    assert size <= memory_of(response) - RESPONSE_BYTES <= size + 200


async def test_one_response_is_never_too_large() -> None:
    served = limited(Plain(lambda inputs: {"y": np.zeros(LIMIT)}))
    assert len(await collect(direct_stream(served, number(0), Call()))) == 1
    await served.close()
