"""The guard of the event loop: it names the model whose own code held it, and only that one."""

from __future__ import annotations

import asyncio
import gc
import re
import time
import weakref
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.direct_work import direct_infer, direct_stream
from tests.scheduling.batched_models import Joining, Site, rows
from tests.scheduling.scripted_models import Inputs, Plain, number, servable
from triglot import Call, InvalidArgument
from triglot.executors.loop_guard import QUIET_SECONDS, LoopGuard, guarded
from triglot.model.scheduling import DynamicBatching
from triglot.scheduling.servable import Servable

LIMIT = 0.25
LONG = 0.3
"""Nothing else here takes as long, on a machine that has other things to do."""


def watched(infer: Any) -> Servable:
    """A servable of such a model, which has served for some time."""
    here = servable(Plain(infer))
    here.guard.watch(LIMIT)
    return here


def holds(here: Servable) -> float:
    """How often its code has held the loop."""
    (value,) = [reading.value for reading in here.readings() if reading.name == "event_loop_holds"]
    return value


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "blocked the event loop" in record.getMessage()]


def block(inputs: Inputs) -> dict[str, Any]:
    time.sleep(LONG)
    return {"y": inputs["x"]}


async def block_loop(inputs: Inputs) -> dict[str, Any]:
    return block(inputs)


async def test_a_model_that_takes_long(caplog: pytest.LogCaptureFixture) -> None:
    here = watched(block_loop)
    for _ in range(2):
        await direct_infer(here, number(1), Call())
    assert holds(here) == 2
    (line,) = lines(caplog)
    assert re.match(
        r"scripted version 1 blocked the event loop, and every other call, for \d+\.\d{3} s",
        line,
    )
    assert line.endswith(
        "move code that computes or blocks to a plain infer (not async def), which runs on other threads"
    )
    await here.close()


async def test_a_batch_counts_as_one(caplog: pytest.LogCaptureFixture) -> None:
    class Slow(Joining):
        async def infer(self, inputs: Inputs) -> Any:
            return block(inputs)

    site = Site(Slow(DynamicBatching()))
    site.servable.guard.watch(LIMIT)
    await asyncio.gather(site.ask(rows(1)), site.ask(rows(2)))
    assert holds(site.servable) == 1
    assert len(lines(caplog)) == 1
    await site.servable.close()


async def second_step(inputs: Inputs) -> dict[str, Any]:
    await asyncio.sleep(0)
    return block(inputs)


async def failing(inputs: Inputs) -> None:
    try:
        await asyncio.sleep(0)
    finally:
        time.sleep(LONG)  # noqa: ASYNC251 - what the guard is for
    raise InvalidArgument("after all")


async def yielding(inputs: Inputs) -> AsyncIterator[dict[str, Any]]:
    yield {"y": inputs["x"]}
    await asyncio.sleep(0)
    yield block(inputs)


@pytest.mark.parametrize("infer", [second_step, failing, yielding])
async def test_any_step_of_code_that_awaits(infer: Any, caplog: pytest.LogCaptureFixture) -> None:
    here = watched(infer)
    if infer is failing:
        with pytest.raises(InvalidArgument, match="after all"):
            await direct_infer(here, number(1), Call())
    else:
        answers = [answer async for answer in direct_stream(here, number(1), Call())]
        assert len(answers) == 1 + (infer is yielding)
    assert holds(here) == 1
    (line,) = lines(caplog)
    assert "to a plain infer" in line
    await here.close()


async def test_who_waits_is_not_named_for_who_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """Both run while the loop stands still; one of them is why."""
    gate = asyncio.Event()

    async def patient(inputs: Inputs) -> dict[str, Any]:
        await gate.wait()
        return {"y": inputs["x"]}

    waits, blocks = watched(patient), watched(second_step)
    waiting = asyncio.create_task(direct_infer(waits, number(1), Call()))
    await asyncio.sleep(0)
    await direct_infer(blocks, number(1), Call())
    gate.set()
    await waiting
    assert (holds(waits), holds(blocks)) == (0, 1)
    assert len(lines(caplog)) == 1
    await waits.close()
    await blocks.close()


async def test_without_a_limit_nothing_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    here = watched(block_loop)
    here.guard.watch(0)
    await direct_infer(here, number(1), Call())
    assert holds(here) == 0
    assert lines(caplog) == []
    await here.close()


async def test_what_runs_on_threads_has_no_such_metric() -> None:
    here = watched(block)
    await direct_infer(here, number(1), Call())
    assert "event_loop_holds" not in [reading.name for reading in here.readings()]
    await here.close()


def test_one_line_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 100.0
    guard = LoopGuard("m version 1", "do better", lambda: now)
    for seconds in (0.5, 0.25, 0.125):
        guard.saw(seconds)
    now += QUIET_SECONDS
    guard.saw(2)
    first, second = lines(caplog)
    assert first == "m version 1 blocked the event loop, and every other call, for 0.500 s; do better"
    assert "for 2.000 s (and 2 more times since" in second
    assert guard.held == 4


# --- a timed function is what it was ---


async def echo(value: Any) -> Any:
    try:
        return await value
    except KeyError:
        return "caught"


async def test_it_gives_and_raises_what_it_awaits() -> None:
    loop, call = asyncio.get_running_loop(), guarded(echo, LoopGuard("m", "better"))
    futures = [loop.create_future() for _ in range(3)]
    tasks = [asyncio.ensure_future(_awaited(call(future))) for future in futures]
    await asyncio.sleep(0)
    futures[0].set_result(5)
    futures[1].set_exception(KeyError())
    futures[2].set_exception(ValueError("as it is"))
    assert await asyncio.gather(*tasks[:2]) == [5, "caught"]
    with pytest.raises(ValueError, match="as it is"):
        await tasks[2]


async def _awaited(work: Any) -> Any:
    return await work


async def test_it_is_cancelled_as_it_was() -> None:
    raised: list[type[BaseException]] = []

    async def until_cancelled(event: asyncio.Event) -> None:
        try:
            await event.wait()
        except BaseException as error:
            raised.append(type(error))
            raise

    call = guarded(until_cancelled, LoopGuard("m", "better"))
    task = asyncio.ensure_future(_awaited(call(asyncio.Event())))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    steps = call(asyncio.Event()).__await__()
    next(steps)
    steps.close()
    assert raised == [asyncio.CancelledError, GeneratorExit]


class Weights:
    """Something that a frame holds."""


async def test_released_error_keeps_nothing_alive() -> None:
    references: list[weakref.ref[Weights]] = []

    async def fail(future: asyncio.Future[None]) -> None:
        weights = Weights()
        references.append(weakref.ref(weights))
        await future

    call = guarded(fail, LoopGuard("m", "better"))
    gc.disable()
    try:
        for error in (ValueError("no"), asyncio.CancelledError()):
            future = asyncio.get_running_loop().create_future()
            steps = call(future).__await__()
            next(steps)
            with pytest.raises(type(error)) as caught:
                steps.throw(error)
            del steps, error, caught, future
        assert [reference() for reference in references] == [None, None]
    finally:
        gc.enable()


def test_what_only_claims_to_be_async_is_left_alone() -> None:
    claim: Any = lambda value: value  # noqa: E731
    assert guarded(claim, LoopGuard("m", "better"))(5) == 5
