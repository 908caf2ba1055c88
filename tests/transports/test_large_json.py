"""16 MiB of JSON is parsed while other calls are answered."""

from __future__ import annotations

import asyncio
import io
import time

import numpy as np
import pytest
from live import Live, live
from scripted_models import Inputs, Plain

pytestmark = pytest.mark.both_transports

COUNT = 900_000
TRIES = 3


class Probe:
    """Asks for the server's health again and again, and keeps the longest time between two answers."""

    def __init__(self, server: Live) -> None:
        self._server = server
        self.answers = 0
        self.longest = 0.0

    async def run(self) -> None:
        last = time.perf_counter()
        while True:
            async with self._server.session.get(f"{self._server.url}/health/live") as response:
                assert response.status == 200
            now = time.perf_counter()
            self.answers += 1
            self.longest = max(self.longest, now - last)
            last = now


def body(numbers: list[str]) -> bytes:
    text = ",".join(numbers)
    return f'{{"inputs":[{{"name":"x","datatype":"FP32","shape":[{len(numbers)}],"data":[{text}]}}]}}'.encode()


@pytest.mark.parametrize("first", ["1.5", "NaN", "-Infinity"])
async def test_other_calls_are_answered_meanwhile(first: str) -> None:
    values = np.random.default_rng(1).standard_normal(COUNT)
    numbers = [first, *map(repr, values.tolist()[1:])]
    sent = body(numbers)
    assert len(sent) >= 16 * 1024 * 1024

    def total(inputs: Inputs) -> dict[str, object]:
        return {"y": np.array([inputs["x"][0], inputs["x"].size], np.float32)}

    async def others_were_answered(server: Live) -> bool:
        probe = Probe(server)
        probing = asyncio.ensure_future(probe.run())
        started = time.perf_counter()
        async with server.session.post(f"{server.url}/models/sum/infer", data=io.BytesIO(sent)) as response:
            assert response.status == 200
            text = await response.read()
        elapsed = time.perf_counter() - started
        probing.cancel()
        await asyncio.wait([probing])
        assert text.endswith(f'"data":[{first},900000.0]}}]}}'.encode()), text[-200:]
        # Relative to the whole call, so that a busy machine does not matter.
        return probe.answers >= 3 and probe.longest < max(0.8 * elapsed, 0.25)

    async with live({"sum": Plain(total)}) as server:
        # A machine that stands still for a moment does so once; a parser that holds the loop, each time.
        for _ in range(TRIES):
            if await others_were_answered(server):
                return
    pytest.fail(f"in none of {TRIES} tries")
