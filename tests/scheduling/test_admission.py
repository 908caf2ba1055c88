"""What may be held at a time: counted exactly, and refused only beside something else."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.direct_work import direct_infer, direct_stream
from tests.scheduling.scripted_models import Counting, Inputs, Plain, Scripted, number, servable
from triglot import Call
from triglot.core.errors import Code, DeadlineExceeded, QueueFull
from triglot.scheduling.loaded_version import Admission, Gate, Limits
from triglot.scheduling.servable import Servable

SIZES = st.integers(1, 20)
STEPS = st.lists(st.tuples(st.integers(0, 1), st.one_of(SIZES, st.none())), max_size=60)
"""Which of two models: a request of this size comes, or, None, its oldest one goes."""


@given(STEPS, st.builds(Limits, st.integers(0, 40), st.integers(0, 6), st.integers(0, 60)))
def test_what_is_held_is_never_more_than_the_limits_say(steps: list[Any], limits: Limits) -> None:
    admission = Admission(limits)
    gates = [Gate(admission), Gate(admission)]
    held: list[list[int]] = [[], []]
    refused = 0
    for which, size in steps:
        mine, everything = held[which], held[0] + held[1]
        if size is None:
            if mine:
                gates[which].leave(mine.pop(0))
            continue
        fits = (
            (not mine or not limits.model_bytes or sum(mine) + size <= limits.model_bytes)
            and (not everything or not limits.total_requests or len(everything) < limits.total_requests)
            and (not everything or not limits.total_bytes or sum(everything) + size <= limits.total_bytes)
        )
        if fits:
            gates[which].enter(size)
            mine.append(size)
        else:
            refused += 1
            with pytest.raises(QueueFull) as caught:
                gates[which].enter(size)
            assert caught.value.code is Code.RESOURCE_EXHAUSTED
            assert caught.value.retry_after is not None
    everything = held[0] + held[1]
    assert (admission.requests, admission.bytes) == (len(everything), sum(everything))
    for gate, mine in zip(gates, held, strict=True):
        readings = {reading.name: reading.value for reading in gate.readings() if not reading.counter}
        assert readings == {"held_requests": len(mine), "held_bytes": sum(mine)}
    assert sum(reading.value for gate in gates for reading in gate.readings() if reading.counter) == refused


def received_call(size: int, deadline: float | None = None) -> Call:
    call = Call(deadline)
    call.size = size
    return call


def held(admission: Admission) -> tuple[int, int]:
    return admission.requests, admission.bytes


@pytest.mark.parametrize("on_loop", [False, True])
async def test_calls_without_a_client_are_not_counted(on_loop: bool) -> None:
    def infer(inputs: Inputs) -> Any:
        return dict(inputs)

    async def infer_on_loop(inputs: Inputs) -> Any:
        return dict(inputs)

    served = servable(Plain(infer_on_loop if on_loop else infer))
    admission = Admission(Limits(total_requests=1))
    served.bound(admission)
    admission.requests = 1  # Others hold it.
    await direct_infer(served, number(1), Call())
    assert [len(answer) async for answer in direct_stream(served, number(1), Call())] == [1]
    with pytest.raises(QueueFull):
        await direct_infer(served, number(1), received_call(1))
    with pytest.raises(QueueFull):
        await anext(direct_stream(served, number(1), received_call(1)))
    assert held(admission) == (1, 0)
    await served.close()


async def test_a_request_is_held_until_its_call_has_ended() -> None:
    model = Scripted(open_gate=False)
    served = servable(model)
    admission = Admission(Limits())
    served.bound(admission)
    running = asyncio.ensure_future(direct_infer(served, number(0), received_call(10)))
    await model.until_at("infer")
    late = received_call(20, time.monotonic() + 1)
    waiting = [
        asyncio.ensure_future(direct_infer(served, number(1), late)),
        asyncio.ensure_future(direct_infer(served, number(2), received_call(30))),
    ]
    await asyncio.sleep(0)
    assert held(admission) == (3, 60)
    with pytest.raises(DeadlineExceeded, match="the deadline passed while the request waited in the queue"):
        await waiting[0]
    assert held(admission) == (2, 40)
    waiting[1].cancel()
    await asyncio.wait(waiting)
    assert held(admission) == (1, 10)
    running.cancel()
    await asyncio.wait([running])
    assert held(admission) == (0, 0)
    model.open_point("infer")
    await served.close()


async def test_a_stream_is_held_until_it_is_closed() -> None:
    served = servable(Counting())
    admission = Admission(Limits())
    served.bound(admission)
    stream = direct_stream(served, number(0), received_call(10))
    await anext(stream)
    assert held(admission) == (1, 10)
    await stream.aclose()
    assert held(admission) == (0, 0)
    await served.close()


async def test_expired_work_is_not_even_queued() -> None:
    model = Scripted()
    served = servable(model)
    with pytest.raises(DeadlineExceeded, match="before the request was started"):
        await direct_infer(served, number(0), Call(time.monotonic()))
    assert model.started == []
    await served.close()


async def test_a_call_ends_at_its_deadline_though_the_model_does_not() -> None:
    model = Scripted(open_gate=False)
    served = servable(model)
    call = Call(time.monotonic() + 2)
    running = asyncio.ensure_future(direct_infer(served, number(0), call))
    await model.until_at("infer")
    with pytest.raises(DeadlineExceeded, match="the deadline passed while the model ran"):
        await running
    assert model.calls == [call]
    assert call.cancelled is True
    model.open_point("infer")
    assert (await direct_infer(served, number(1), Call(time.monotonic() + 30)))["y"][0] == 2
    await served.close()


async def test_a_models_own_timeout_is_no_deadline() -> None:
    async def infer(inputs: Inputs) -> Any:
        raise TimeoutError("a secret")

    served = servable(Plain(infer))
    with pytest.raises(Exception, match="scripted version 1 failed") as caught:
        await direct_infer(served, number(0), Call(time.monotonic() + 30))
    assert getattr(caught.value, "code", None) is Code.INTERNAL
    await served.close()


async def test_slow_reader_of_code_on_the_loop_gets_an_error() -> None:
    async def infer(inputs: Inputs) -> Any:
        while True:
            yield dict(inputs)

    servable = Servable("m", 1, Plain(infer), max_queue_size=1)
    call = Call(time.monotonic() + 30)
    stream = direct_stream(servable, number(0), call)
    await anext(stream)
    call.deadline = time.monotonic()
    with pytest.raises(DeadlineExceeded, match="while the model was streaming"):
        await anext(stream)
    await servable.close()


def test_a_deadline_can_only_be_made_earlier() -> None:
    call = Call()
    call.limit(50, "one")
    first = call.deadline
    call.limit(100, "another")
    assert call.deadline == first
    assert call.overdue("now").message == "one passed now"
    call.limit(10, "a third")
    assert call.deadline is not None
    assert first is not None
    assert call.deadline < first
    assert call.child().overdue("now").message == "a third passed now"
    assert np.isclose(call.deadline, call.child().deadline or 0)
