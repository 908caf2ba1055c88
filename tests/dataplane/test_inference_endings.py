"""A request that is over: whatever its model does then, it ended as it ended."""

from __future__ import annotations

import asyncio
import time

import pytest

from tests.served_models import Arrays, Function, ints, serving
from tests.waiting import until
from triglot import Call
from triglot.core.call import TICKS
from triglot.core.errors import Code
from triglot.model.scheduling import DynamicBatching

LATE = 0.05
"""Seconds until the deadline."""


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "answers"])
async def test_model_that_runs_past_the_deadline(fails: bool) -> None:
    begun, go_on, steps_after = asyncio.Event(), asyncio.Event(), list[int]()

    async def infer(inputs: Arrays) -> Arrays:
        begun.set()
        await go_on.wait()
        steps_after.append(1)
        if fails:
            raise RuntimeError("too late")
        return {"y": inputs["x"]}

    async with serving({"m": Function(infer, dynamic_batching=DynamicBatching())}) as served:
        deadline = time.monotonic() + LATE
        call = Call(deadline)
        asked = asyncio.create_task(served.error("m", ints(1), call))
        await begun.wait()
        # The deadline passes in the turn of the loop in which the model is let go on: it ends in the next one,
        # before whoever has asked.
        asyncio.get_running_loop().call_soon(go_on.set)
        while time.monotonic() <= deadline + 1 / TICKS:
            pass
        assert (await asked).code is Code.DEADLINE_EXCEEDED
        await until(lambda: bool(steps_after))
        await served.is_idle()
