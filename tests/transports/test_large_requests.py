"""16 MiB of JSON, or a million strings, are read and answered while other calls are."""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Awaitable, Callable

import numpy as np
import pytest

from tests.scheduling.scripted_models import Inputs, Plain
from tests.transports.live import Live, live
from triglot import Model, TensorSpec
from triglot.core.tensor import pack_bytes
from triglot.pb.kserve import inference_pb2 as pb

pytestmark = pytest.mark.both_transports
TRIES = 3


class Probe:
    """Asks for the server's health again and again, and keeps the longest time between two answers."""

    answers = 0
    longest = 0.0

    async def run(self, server: Live) -> None:
        last = time.perf_counter()
        while True:
            async with server.session.get(f"{server.url}/health/live") as response:
                assert response.status == 200
            now = time.perf_counter()
            self.answers += 1
            self.longest = max(self.longest, now - last)
            last = now


async def check(
    model: Model, call: Callable[[Live], Awaitable[None]], passes: Callable[[Probe, float], bool]
) -> None:
    """`passes`: whether others were answered meanwhile, by the probe and the seconds that the call took.

    A machine that stands still for a moment does so once; work that holds the loop, each time.
    """
    async with live({"m": model}) as server:
        for _ in range(TRIES):
            probe = Probe()
            probing = asyncio.ensure_future(probe.run(server))
            started = time.perf_counter()
            await call(server)
            elapsed = time.perf_counter() - started
            probing.cancel()
            await asyncio.wait([probing])
            if passes(probe, elapsed):
                return
    pytest.fail(f"in none of {TRIES} tries")


@pytest.mark.parametrize("first", ["1.5", "NaN", "-Infinity"])
async def test_other_calls_are_answered_while_json_is_parsed(first: str) -> None:
    numbers = [first, *map(repr, np.random.default_rng(1).standard_normal(900_000).tolist()[1:])]
    tensor = f'{{"name":"x","datatype":"FP32","shape":[{len(numbers)}],"data":[{",".join(numbers)}]}}'
    sent = f'{{"inputs":[{tensor}]}}'.encode()
    assert len(sent) >= 16 * 1024 * 1024

    def total(inputs: Inputs) -> dict[str, object]:
        return {"y": np.array([inputs["x"][0], inputs["x"].size], np.float32)}

    async def call(server: Live) -> None:
        async with server.session.post(f"{server.url}/models/m/infer", data=io.BytesIO(sent)) as response:
            assert response.status == 200
            text = await response.read()
        assert text.endswith(f'"data":[{first},900000.0]}}]}}'.encode()), text[-200:]

    # Relative to the whole call, so that a busy machine does not matter.
    await check(
        Plain(total), call, lambda probe, elapsed: probe.answers >= 3 and probe.longest < max(0.8 * elapsed, 0.25)
    )


class Echo(Model):
    inputs = [TensorSpec("x", "BYTES", [-1])]
    outputs = [TensorSpec("y", "BYTES", [-1])]

    def infer(self, inputs: Inputs) -> dict[str, object]:
        return {"y": inputs["x"]}


async def test_other_calls_are_answered_while_strings_go_in_and_out() -> None:
    count = 1_000_000
    raw = pack_bytes([b"some text"] * count)
    message = pb.ModelInferRequest(model_name="m", raw_input_contents=[raw])
    message.inputs.add(name="x", datatype="BYTES", shape=[count])

    async def call(server: Live) -> None:
        reply = pb.ModelInferResponse.FromString(await server.infer(message.SerializeToString()))
        same = reply.raw_output_contents[0] == raw
        assert same
        assert list(reply.outputs[0].shape) == [count]

    # Three passes over a million elements: off the loop, health was asked all the while.
    await check(Echo(), call, lambda probe, _: probe.answers >= 5)
