"""What is counted of streams, and of their answers one by one (spec 5.9)."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from tests.e2e.counting_server import batches, counting, counts, responses, succeeded
from tests.process import SECONDS
from tests.served_models import Arrays, Function, both
from tests.waiting import until
from triglot.core.operation import EVERYTHING
from triglot.core.types import Answer

pytestmark = pytest.mark.both_transports


def three(inputs: Arrays) -> Iterator[Any]:
    for value in range(int(inputs["x"][0])):
        if value == 3:
            raise ValueError("three")
        yield {"y": inputs["x"] + value}


async def three_on_loop(inputs: Arrays) -> AsyncIterator[Any]:
    for answer in three(inputs):
        yield answer


@pytest.mark.parametrize("infer", [three, three_on_loop])
async def test_the_answers_of_a_stream(infer: Any) -> None:
    async with counting({"m": Function(infer)}) as served:
        assert await served.streamed("m", 2) == ["", ""]
        assert await served.streamed("m", 3) == [""] * 3
        stats = await served.stats("m")
        assert (counts(stats), batches(stats)) == (succeeded(2), {1: 2})
        end = {"empty_response": 1}
        expected = {"0": {"success": 2}, "1": {"success": 2}, "2": {"success": 1} | end, "3": end}
        assert responses(stats) == expected
        first = stats["response_stats"]["0"]
        parts = first["compute_infer"]["ns"] + first["compute_output"]["ns"]
        assert first["success"]["ns"] == pytest.approx(parts, abs=5)
        assert first["compute_infer"]["ns"] > 0

        *good, bad = await served.streamed("m", 4)
        assert (good, bool(bad)) == ([""] * 3, True)
        stats = await served.executed("m", 3)
        assert counts(stats) == succeeded(2, executions=3, fail=1)
        assert responses(stats) == {
            "0": {"success": 3},
            "1": {"success": 3},
            "2": {"success": 2} | end,
            "3": {"fail": 1} | end,
        }


async def test_an_answer_that_says_that_it_is_the_last() -> None:
    def infer(inputs: Arrays) -> Iterator[Any]:
        yield {"y": inputs["x"]}
        yield Answer({"y": inputs["x"]}, final=True)

    async with counting({"m": Function(infer)}) as served:
        assert await served.streamed("m", 1) == ["", ""]
        assert responses(await served.stats("m")) == {"0": {"success": 1}, "1": {"success": 1}}


@both
async def test_a_stream_whose_reader_leaves(on_loop: bool) -> None:
    opened = threading.Event()

    def infer(inputs: Arrays) -> Iterator[Any]:
        yield {"y": inputs["x"]}
        assert opened.wait(SECONDS)
        yield {"y": inputs["x"]}

    async def infer_on_loop(inputs: Arrays) -> AsyncIterator[Any]:
        yield {"y": inputs["x"]}
        await asyncio.sleep(SECONDS)

    async with counting({"m": Function(infer_on_loop if on_loop else infer)}) as served:
        call = served.stream("m", 1)
        await call.read()
        call.cancel()
        statistics = served.server.dataplane.servable(EVERYTHING, "m").statistics
        await until(lambda: statistics.fail.count)
        opened.set()
        stats = await served.executed("m", 1)
        assert counts(stats) == {"fail": 1, "executions": 1}
        assert responses(stats) == {"0": {"success": 1}, "1": {"cancel": 1}}
        assert await served.failures("m") == {"CANCELED": 1}


async def test_a_stream_that_is_refused_has_no_answers() -> None:
    gate = threading.Event()

    def infer(_: Arrays) -> Iterator[Any]:
        assert gate.wait(SECONDS)
        yield from ()

    async with counting({"m": Function(infer, max_queue_size=1)}) as served:
        running = asyncio.ensure_future(served.streamed("m", 1))
        statistics = served.server.dataplane.servable(EVERYTHING, "m").statistics
        await until(lambda: served.leases()["m"] == 1 and not served.server.dataplane.queue_depth())
        second = asyncio.ensure_future(served.streamed("m", 1))
        await served.waiting(1)
        (text,) = await served.streamed("m", 1)
        assert "queue" in text
        assert (statistics.responses, await served.failures("m")) == ({}, {"REJECTED": 1})
        gate.set()
        assert [*await running, *await second] == []
        assert responses(await served.stats("m")) == {"0": {"empty_response": 2}}
