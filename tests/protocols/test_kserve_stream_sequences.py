"""Sequences of a decoupled model on one stream: each one's answers come in the order in which they were made."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Iterator
from typing import Any

import grpc.aio
import numpy as np
import pytest

import triglot
from tests.process import SECONDS
from tests.protocols.stream_requests import Inputs, answers, asking, sending
from tests.transports.live import live
from tests.waiting import until
from triglot.protocols.kserve.stream_requests import _DecoupledRequest

pytestmark = pytest.mark.both_transports

LARGE = 1 << 17
"""Strings of an answer that is encoded beside the event loop."""


class Echo(triglot.Model):
    """Answers a number with so many strings, and then with one; nothing with nothing."""

    inputs = [triglot.TensorSpec("x", "FP32", [1])]
    outputs = [triglot.TensorSpec("y", "BYTES", [-1])]
    decoupled = True
    sequence_batching = triglot.SequenceBatching(max_idle=3600)
    instances = 2

    def infer(self, inputs: Inputs) -> Iterator[dict[str, Any]]:
        if inputs["x"][0] == 0:
            return
        yield {"y": np.full(int(inputs["x"][0]), b"text", object)}
        yield {"y": np.array([b"text"], object)}
        if inputs["x"][0] == 3:
            raise triglot.InvalidArgument("three")


class Endless(Echo):
    """Answers until its stream is closed."""

    def infer(self, inputs: Inputs) -> Iterator[dict[str, Any]]:
        while True:
            yield {"y": np.array([b"text"], object)}


def part(value: int, sequence: int | str, number: int, of: int) -> bytes:
    return asking(
        "echo",
        value,
        f"{sequence} {number}",
        sequence_id=sequence,
        sequence_start=number == 0,
        sequence_end=number == of - 1,
    )


async def test_a_small_answer_does_not_overtake_a_large_one() -> None:
    values = (LARGE, 1, LARGE, 3, LARGE, 0, 0, 2)
    sequences = (1, "two", 3)
    async with live({"echo": Echo()}) as server:
        got = await answers(
            server,
            *(part(value, sequence, at, len(values)) for at, value in enumerate(values) for sequence in sequences),
        )
    for sequence in sequences:
        ids = [answer.infer_response.id for answer in got if answer.infer_response.id.startswith(f"{sequence} ")]
        # To a three there is an error, too.
        response_counts = {0: 0, 3: 3}
        assert ids == [
            f"{sequence} {at}" for at, value in enumerate(values) for _ in range(response_counts.get(value, 2))
        ]
    assert sum("three" in answer.error_message for answer in got) == len(sequences)


async def test_nothing_is_kept_of_requests_that_are_over() -> None:
    """Of a sequence whose next request has come each time before the last one is over."""
    entered, gates = threading.Semaphore(0), [threading.Event() for _ in range(50)]

    class Silent(Echo):
        def infer(self, inputs: Inputs) -> Iterator[dict[str, Any]]:
            entered.release()
            assert gates[int(inputs["x"][0])].wait(SECONDS)
            yield from ()

    def kept() -> int:
        return sum(type(tracked) is _DecoupledRequest for tracked in gc.get_objects())

    gc.collect()
    before = kept()
    async with live({"echo": Silent()}) as server:
        call = server.stream_infer(timeout=SECONDS)
        await call.write(part(0, 1, 0, len(gates)))
        for at, gate in enumerate(gates[:-1]):
            assert await asyncio.to_thread(entered.acquire, timeout=SECONDS)
            await call.write(part(at + 1, 1, at + 1, len(gates)))
            await until(lambda: server.server.telemetry.in_flight == 2)
            gate.set()
        assert await asyncio.to_thread(entered.acquire, timeout=SECONDS)
        await until(lambda: server.server.telemetry.in_flight == 1)
        await until(lambda: kept() - before <= 2)
        gates[-1].set()
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_sequences_do_not_wait_for_each_other() -> None:
    """The first one's only request never ends while the client waits for the second one's answers."""
    async with live({"echo": Endless()}) as server:
        call = server.stream_infer(sending(part(1, 1, 0, 1), part(2, 2, 0, 1)), timeout=30)
        seen = set()
        async for answer in call:
            seen.add(answer.infer_response.id)
            if len(seen) == 2:
                break
        call.cancel()
