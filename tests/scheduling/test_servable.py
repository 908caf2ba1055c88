"""One model version: threads, bursts, refusal, deadlines and cancellation. No test sleeps to win a race."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
import time
import weakref
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_infer, direct_stream
from tests.scheduling.scripted_models import Counting, Inputs, Plain, Scripted, idle, number, servable
from tests.waiting import until, wait_until
from triglot import Call, Cancelled, InvalidArgument
from triglot.core.errors import Code, DeadlineExceeded, Internal, QueueFull, ServingError
from triglot.core.response_buffer import STREAM_BUFFER
from triglot.scheduling.servable import Servable


async def test_blocking_code_runs_on_the_instances_threads() -> None:
    model = Scripted(instances=3, open_gate=False)
    served = servable(model)
    calls = [asyncio.ensure_future(direct_infer(served, number(value), Call())) for value in range(3)]
    await model.until_at("infer", 3)
    assert len(model.threads) == 3
    assert threading.get_ident() not in model.threads
    model.open_point("infer")
    assert [answer["y"][0] for answer in await asyncio.gather(*calls)] == [0, 2, 4]
    await served.close()


async def test_instances_are_started_for_waiting_work() -> None:
    def threads() -> int:
        return sum(thread.name.startswith("many/1#") for thread in threading.enumerate())

    model = Scripted(instances=5, open_gate=False)
    servable = Servable("many", 1, model, max_queue_size=10)
    assert threads() == 1
    await until(lambda: idle(servable) == 1)
    calls = []
    for running in range(1, 4):
        calls.append(asyncio.ensure_future(direct_infer(servable, number(0), Call())))
        await model.until_at("infer")
        assert threads() == running
    calls += [asyncio.ensure_future(direct_infer(servable, number(0), Call())) for _ in range(7)]
    await model.until_at("infer", 2)
    assert (threads(), servable.queue_depth) == (5, 5)
    model.open_point("infer")
    await asyncio.gather(*calls)
    await servable.close()
    assert threads() == 0


async def test_async_code_runs_on_the_loop() -> None:
    async def infer(inputs: Inputs) -> dict[str, Any]:
        assert threading.get_ident() == here
        await asyncio.sleep(0)
        return {"y": inputs["x"]}

    here = threading.get_ident()
    served = servable(Plain(infer))
    assert (await direct_infer(served, number(7), Call()))["y"][0] == 7
    await served.close()


async def test_burst_is_answered_with_few_wake_ups(monkeypatch: pytest.MonkeyPatch) -> None:
    rung: list[int] = []
    write = os.write

    def counting(file: int, data: bytes) -> int:
        rung.append(threading.get_ident())
        return write(file, data)

    monkeypatch.setattr(os, "write", counting)
    model = Scripted(open_gate=False)
    served = servable(model)
    calls = [asyncio.ensure_future(direct_infer(served, number(value), Call())) for value in range(200)]
    await model.until_at("infer")
    model.open_point("infer")
    # The loop is held until all but the last are back: it is open, otherwise, who gets the interpreter when.
    wait_until(lambda: len(model.started) == len(calls))
    answers = await asyncio.gather(*calls)
    assert [answer["y"][0] for answer in answers] == [2 * value for value in range(200)]
    assert 1 <= sum(thread in model.threads for thread in rung) <= 2
    await served.close()


async def test_a_result_does_not_wait_for_the_next_one_in_its_burst() -> None:
    second = threading.Event()

    def infer(inputs: Inputs) -> dict[str, Any]:
        if inputs["x"][0] == 2:
            assert second.wait(30)
        return dict(inputs)

    served = servable(Plain(infer))
    first, last = (asyncio.ensure_future(direct_infer(served, number(value), Call())) for value in (1, 2))
    assert (await first)["x"][0] == 1
    assert not last.done()
    second.set()
    await last
    await served.close()


async def test_a_full_queue_refuses_and_then_serves_on() -> None:
    model = Scripted(open_gate=False)
    served = servable(model, max_queue_size=2)
    running = asyncio.ensure_future(direct_infer(served, number(0), Call()))
    await model.until_at("infer")
    waiting = [asyncio.ensure_future(direct_infer(served, number(value), Call())) for value in (1, 2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await direct_infer(served, number(3), Call())
    model.open_point("infer")
    await asyncio.gather(running, *waiting)
    assert (await direct_infer(served, number(4), Call()))["y"][0] == 8
    assert 3 not in model.started
    await served.close()


async def test_async_code_is_bounded_too() -> None:
    gate = asyncio.Event()

    async def infer(inputs: Inputs) -> dict[str, Any]:
        await gate.wait()
        return dict(inputs)

    served = servable(Plain(infer), max_queue_size=2)

    async def leased() -> None:
        with served:
            await direct_infer(served, number(0), Call())

    calls = [asyncio.ensure_future(leased()) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(QueueFull):
        await leased()
    gate.set()
    await asyncio.gather(*calls)
    await leased()
    await served.close()


async def test_cancelled_work_is_never_started() -> None:
    model = Scripted(open_gate=False)
    served = servable(model, max_queue_size=2)
    running = asyncio.ensure_future(direct_infer(served, number(0), Call()))
    await model.until_at("infer")
    left = Call()
    leaving = [asyncio.ensure_future(direct_infer(served, number(value), left)) for value in (1, 2)]
    await asyncio.sleep(0)
    for task in leaving:
        task.cancel()
    await asyncio.wait(leaving)
    assert left.cancelled
    # Their places in the queue are free at once.
    staying = [asyncio.ensure_future(direct_infer(served, number(value), Call())) for value in (3, 4)]
    await asyncio.sleep(0)
    model.open_point("infer")
    await asyncio.gather(running, *staying)
    assert model.started == [0, 3, 4]
    await served.close()


async def test_expired_work_is_dropped_when_it_is_dequeued() -> None:
    model = Scripted(open_gate=False)
    served = servable(model)
    running = asyncio.ensure_future(direct_infer(served, number(0), Call()))
    await model.until_at("infer")
    late = asyncio.ensure_future(direct_infer(served, number(1), Call(deadline=time.monotonic())))
    await asyncio.sleep(0)
    model.open_point("infer")
    await running
    with pytest.raises(DeadlineExceeded):
        await late
    assert model.started == [0]
    await served.close()


async def test_running_model_can_ask_whether_its_call_is_cancelled() -> None:
    model = Scripted(open_gate=False)
    served = servable(model)
    call = Call(deadline=time.monotonic() + 100)
    task = asyncio.ensure_future(direct_infer(served, number(0), call))
    await model.until_at("infer")
    assert model.calls == [call]
    before = call.cancelled
    assert before is False
    assert 0 < (call.remaining or 0) <= 100
    task.cancel()
    await asyncio.wait([task])
    assert call.cancelled is True
    model.open_point("infer")
    # The instance lives on.
    assert (await direct_infer(served, number(5), Call()))["y"][0] == 10
    await served.close()


def exit_process(inputs: Inputs) -> Any:
    raise SystemExit(3)


def cancel_oneself(inputs: Inputs) -> Any:
    raise asyncio.CancelledError


def secret(inputs: Inputs) -> Any:
    raise ValueError("a secret")


async def async_exit(inputs: Inputs) -> Any:
    raise SystemExit(3)


async def async_secret(inputs: Inputs) -> Any:
    raise ValueError("a secret")


@pytest.mark.parametrize("infer", [exit_process, cancel_oneself, secret, async_exit, async_secret])
async def test_whatever_a_model_raises_fails_its_own_call_alone(infer: Any) -> None:
    served = servable(Plain(infer))
    for _ in range(2):
        with pytest.raises(Internal) as caught:
            await direct_infer(served, number(0), Call())
        assert "secret" not in caught.value.message
        assert "scripted" in caught.value.message
    assert served.alive
    await served.close()


async def test_a_models_own_serving_error_is_kept() -> None:
    def infer(inputs: Inputs) -> Any:
        raise InvalidArgument("too short")

    served = servable(Plain(infer))
    with pytest.raises(InvalidArgument, match="too short"):
        await direct_infer(served, number(0), Call())
    await served.close()


async def test_inputs_are_released_while_the_instance_waits() -> None:
    served = servable(Plain(lambda inputs: {"y": np.zeros(1, np.float32)}))
    array = np.zeros(4, np.float32)
    reference = weakref.ref(array)
    await direct_infer(served, {"x": array}, Call())
    del array
    # The last call's arrays may be held until the thread has looked for more work.
    await direct_infer(served, number(0), Call())
    gc.collect()
    assert reference() is None
    await served.close()


# Streams


async def collect(answers: AsyncIterator[Any]) -> list[float]:
    return [float(answer["x"][0]) async for answer in answers]


async def test_a_generators_answers_come_in_order_and_all() -> None:
    def infer(inputs: Inputs) -> Iterator[dict[str, Any]]:
        for value in range(5 * STREAM_BUFFER):
            yield number(value)

    served = servable(Plain(infer))
    assert served.decoupled
    assert await collect(direct_stream(served, number(0), Call())) == list(range(5 * STREAM_BUFFER))
    await served.close()


async def test_an_async_generators_answers_come_in_order_and_all() -> None:
    async def infer(inputs: Inputs) -> AsyncIterator[dict[str, Any]]:
        for value in range(50):
            yield number(value)

    served = servable(Plain(infer))
    assert served.decoupled
    assert await collect(direct_stream(served, number(0), Call())) == list(range(50))
    await served.close()


async def test_a_slow_reader_holds_the_model_up() -> None:
    model = Counting()
    served = servable(model)
    stream = direct_stream(served, number(0), Call())
    for expected in range(1, 101):
        answer = await anext(stream)
        assert answer["y"][0] == expected
        # Those that were read, those that wait, and the one that it holds in its hand.
        assert model.made <= expected + STREAM_BUFFER + 1
    await stream.aclose()
    assert await asyncio.to_thread(model.closed.wait, 30)
    await served.close()


async def test_a_reader_that_leaves_stops_the_model_and_frees_the_instance() -> None:
    model = Counting()
    served = servable(model)
    call = Call()
    stream = direct_stream(served, number(0), call)
    await anext(stream)
    await stream.aclose()
    assert call.cancelled
    assert await asyncio.to_thread(model.closed.wait, 30)
    again = direct_stream(served, number(0), Call())
    await anext(again)
    await again.aclose()
    await served.close()


async def test_a_streams_error_comes_after_what_it_yielded() -> None:
    def infer(inputs: Inputs) -> Iterator[dict[str, Any]]:
        yield number(1)
        raise Cancelled("enough")

    served = servable(Plain(infer))
    stream = direct_stream(served, number(0), Call())
    assert (await anext(stream))["x"][0] == 1
    with pytest.raises(ServingError, match="enough") as caught:
        await anext(stream)
    assert caught.value.code is Code.CANCELLED
    await served.close()


@pytest.mark.parametrize("coroutine", [False, True])
@pytest.mark.parametrize("streamed", [False, True])
async def test_what_fails_after_the_deadline_fails_for_the_deadline(streamed: bool, coroutine: bool) -> None:
    """A model that asks another one with its own deadline fails before the server's timer fires."""

    def infer(inputs: Inputs, call: Call) -> None:
        call.deadline = time.monotonic()
        raise ValueError("what was asked gave no answer in time")

    async def infer_on_loop(inputs: Inputs, call: Call) -> None:
        infer(inputs, call)

    served = servable(Plain(infer_on_loop if coroutine else infer))
    call = Call(deadline=time.monotonic() + 100)
    with pytest.raises(DeadlineExceeded, match="while the model"):
        await (
            anext(direct_stream(served, number(0), call)) if streamed else direct_infer(served, number(0), call)
        )
    await served.close()


async def test_a_stream_past_its_deadline_ends_with_that_error() -> None:
    released = threading.Event()

    def infer(inputs: Inputs, call: Call) -> Iterator[dict[str, Any]]:
        yield number(1)
        call.deadline = time.monotonic()
        released.set()
        yield number(2)

    served = servable(Plain(infer))
    stream = direct_stream(served, number(0), Call(deadline=time.monotonic() + 100))
    assert (await anext(stream))["x"][0] == 1
    with pytest.raises(DeadlineExceeded):
        await anext(stream)
    assert released.is_set()
    await served.close()


async def test_a_model_whose_close_calls_exit_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    served = servable(Plain(secret))
    served.model.close = exit  # type: ignore[method-assign] # As a class of a user's may do.
    await served.close()
    assert [record.message for record in caplog.records] == [f"{served} failed to close"]
