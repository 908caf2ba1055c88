"""Calls that come close to each other are handled together, over grpc.aio."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from live import live, request
from scripted_models import Plain

from triglot.pb.kserve import inference_pb2 as pb
from triglot.transports.gathering import (
    MOST_CALLS,
    MOST_DOUBLINGS,
    PATIENCE,
    PROBED_EVERY,
    SHORT_SECONDS,
    WORTH_CALLS,
    Gathering,
    gathered,
)
from triglot.transports.off_loop import OFF_LOOP_BYTES
from triglot.transports.short_timer import ShortTimer

SECONDS = 20
"""How long anything may take; only a test that fails waits so long."""
BURST = 8


@pytest.fixture
def _busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that is busy with something else does not make calls look as if they took long."""
    monkeypatch.setattr("triglot.transports.gathering.SHORT_SECONDS", SECONDS)


@pytest.fixture
async def gathering() -> AsyncIterator[Gathering]:
    one = Gathering()
    one.open()
    yield one
    one.close()


async def echo(data: bytes, _: Any) -> bytes:
    return data


async def burst(gathering: Gathering, count: int) -> list[bool]:
    """So many calls that come at once: of each, whether it was to wait when all had come."""
    turns = [gathering.join() for _ in range(count)]
    waits = [turn is not None and not turn.done() for turn in turns]
    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*filter(None, turns))
    await asyncio.sleep(0)
    return waits


async def test_all_are_handled_before_the_first_answer_leaves(gathering: Gathering) -> None:
    seen: list[str] = []

    async def unary(data: bytes, _: Any) -> bytes:
        seen.append("in")
        return data

    handle = gathered(unary, gathering)

    async def call(number: int) -> None:
        assert await handle(b"%d" % number, None) == b"%d" % number
        seen.append("out")

    async with asyncio.timeout(SECONDS):
        await asyncio.gather(*map(call, range(BURST)))
    assert seen == ["in"] * BURST + ["out"] * BURST


async def test_answers_that_come_later_wait_for_none(gathering: Gathering) -> None:
    gates = [asyncio.Event() for _ in range(BURST)]

    async def unary(data: bytes, _: Any) -> bytes:
        await gates[data[0]].wait()
        return data

    handle = gathered(unary, gathering)
    calls = [asyncio.ensure_future(handle(bytes([number]), None)) for number in range(BURST)]
    for gate, call in zip(gates, calls, strict=True):
        gate.set()
        await asyncio.wait_for(call, SECONDS)
    assert [call.result() for call in calls] == [bytes([number]) for number in range(BURST)]


async def test_calls_that_come_singly_soon_wait_no_more(gathering: Gathering) -> None:
    waited = [(await burst(gathering, 1))[0] for _ in range(1 << MOST_DOUBLINGS)]
    assert all(waited[:PATIENCE])
    assert sum(waited) <= PATIENCE + MOST_DOUBLINGS


@pytest.mark.usefixtures("_busy")
async def test_they_wait_again_when_they_come_together(gathering: Gathering) -> None:
    for _ in range(2 * PATIENCE):
        await burst(gathering, 1)
    for _ in range(1 << PATIENCE):
        waits = await burst(gathering, WORTH_CALLS)
    assert all(waits)


@pytest.mark.usefixtures("_busy")
async def test_a_burst_of_the_usual_size_waits_for_no_more(gathering: Gathering) -> None:
    # One less is expected after each that ends with a pause.
    waits = [await burst(gathering, BURST) for _ in range(MOST_CALLS + PROBED_EVERY)]
    # But for one that looks whether there are more.
    assert sum(map(any, waits[-PROBED_EVERY:])) == 1


async def test_calls_that_take_long_do_not_wait_for_each_other(gathering: Gathering) -> None:
    async def compute(data: bytes, _: Any) -> bytes:
        time.sleep(2 * SHORT_SECONDS)  # noqa: ASYNC251 - a model that runs on the loop.
        return data

    handle = gathered(compute, gathering)
    for _ in range(PATIENCE):
        await asyncio.gather(*(handle(b"", None) for _ in range(WORTH_CALLS)))
    assert gathering.join() is None


async def test_who_leaves_while_it_waits_does_so_alone(gathering: Gathering) -> None:
    handle = gathered(echo, gathering)
    calls = [asyncio.ensure_future(handle(b"%d" % number, None)) for number in range(BURST)]
    await asyncio.sleep(0)
    calls[2].cancel()
    async with asyncio.timeout(SECONDS):
        done = await asyncio.gather(*calls, return_exceptions=True)
    assert isinstance(done.pop(2), asyncio.CancelledError)
    assert done == [b"%d" % number for number in range(BURST) if number != 2]


async def test_large_requests_do_not_wait(gathering: Gathering) -> None:
    call: Any = gathered(echo, gathering)(bytes(OFF_LOOP_BYTES + 1), None)
    with pytest.raises(StopIteration):
        call.send(None)


async def test_nothing_waits_before_it_is_open_and_after_it_is_closed() -> None:
    gathering = Gathering()
    assert gathering.join() is None
    gathering.open()
    turn = gathering.join()
    assert turn is not None
    gathering.close()
    await asyncio.wait_for(turn, SECONDS)
    assert gathering.join() is None


async def test_a_timer_rings_once_for_each_start() -> None:
    loop = asyncio.get_running_loop()
    rung: asyncio.Queue[None] = asyncio.Queue()
    timer = ShortTimer(loop, 1, lambda: rung.put_nowait(None))
    try:
        for _ in range(3):
            timer.start()
            await asyncio.wait_for(rung.get(), SECONDS)
        later = ShortTimer(loop, 100, lambda: rung.put_nowait(None))
        try:
            later.start()
            await asyncio.wait_for(rung.get(), SECONDS)
        finally:
            later.close()
        assert rung.empty()
    finally:
        timer.close()


async def test_each_call_gets_its_own_answer() -> None:
    async with live({"echo": Plain(lambda inputs: {"y": inputs["x"]})}, grpc_transport="aio") as door:

        async def ask(number: int) -> None:
            raw = number.to_bytes(4, "little")
            answer = pb.ModelInferResponse.FromString(await door.infer(request("echo", raw), timeout=SECONDS))
            assert answer.raw_output_contents == [raw]

        for count in (1, 2, BURST, 1, 3 * MOST_CALLS):
            await asyncio.gather(*map(ask, range(count)))


async def test_each_message_gets_its_own_answer() -> None:
    async with live({"echo": Plain(lambda inputs: {"y": inputs["x"]})}, grpc_transport="aio") as door:
        sent = [number.to_bytes(4, "little") for number in range(5 * MOST_CALLS)]

        async def send() -> AsyncIterator[bytes]:
            for raw in sent:
                yield request("echo", raw)

        got = [
            answer.infer_response.raw_output_contents[0]
            async for answer in door.stream_infer(send(), timeout=SECONDS)
        ]
    assert got == sent
