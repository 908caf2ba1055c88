"""Models that are warmed and answer one by one: to their end, and no longer than they are awaited."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.repository.warmed_models import SECONDS, refusal, warmed, zeros
from tests.scheduling.scripted_models import Counting, Inputs, Plain, number, servable
from triglot import Call
from triglot.repository.manager.warm_up import MAX_RESPONSES, warm_up


async def test_a_stream_runs_to_its_end() -> None:
    made: list[str] = []

    def yields(inputs: Inputs) -> Iterator[dict[str, Any]]:
        for _ in range(3):
            yield {"y": inputs["x"]}
        made.append("on a thread")

    async def yields_on_loop(inputs: Inputs) -> AsyncIterator[dict[str, Any]]:
        for _ in range(3):
            yield {"y": inputs["x"]}
        made.append("on the loop")

    await warmed(Plain(yields), zeros())
    await warmed(Plain(yields_on_loop), zeros())
    assert made == ["on a thread", "on the loop"]


async def test_a_stream_without_an_end() -> None:
    model = Counting()
    await warmed(model, zeros())
    assert model.made == MAX_RESPONSES
    assert model.closed.is_set()


async def test_a_stream_without_an_end_on_the_loop() -> None:
    made = []

    async def infer(inputs: Inputs) -> AsyncIterator[dict[str, Any]]:
        try:
            while True:
                made.append(1)
                yield {"y": inputs["x"]}
        finally:
            made.append(-1)

    await warmed(Plain(infer), zeros())
    assert (sum(made), made[-1]) == (MAX_RESPONSES - 1, -1)


async def test_answers_that_are_pushed() -> None:
    pushed = 0

    def infer(inputs: Inputs, call: Call) -> None:
        def push() -> None:
            nonlocal pushed
            while call.respond({"y": inputs["x"]}):
                pushed += 1

        thread = threading.Thread(target=push)
        thread.start()
        thread.join(SECONDS)

    await warmed(Plain(infer), zeros())
    assert pushed == MAX_RESPONSES - 1


async def test_a_pushed_answer_that_is_wrong() -> None:
    taken: list[bool] = []

    def infer(inputs: Inputs, call: Call) -> None:
        taken.extend(call.respond(answer) for answer in ({"y": inputs["x"]}, {"z": 1}, {"y": inputs["x"]}))

    text = await refusal(Plain(infer), zeros())
    assert text == "model_warmup 'one': model 'scripted' returned no output 'y', only ['z']"
    assert taken == [True, False, False]


async def test_a_stream_ends_when_its_warm_up_is_cancelled() -> None:
    begun, cancelled, finished = (threading.Event() for _ in range(3))
    made = 0

    def infer(inputs: Inputs) -> Iterator[dict[str, Any]]:
        nonlocal made
        try:
            begun.set()
            assert cancelled.wait(SECONDS)
            while True:
                made += 1
                yield {"y": inputs["x"]}
        finally:
            finished.set()

    model = Plain(infer)
    model.example = number(1)
    served = servable(model)
    warming = asyncio.ensure_future(warm_up(served))
    assert await asyncio.to_thread(begun.wait, SECONDS)
    warming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await warming
    cancelled.set()
    assert await asyncio.to_thread(finished.wait, SECONDS)
    assert made == 1
    await served.close()
