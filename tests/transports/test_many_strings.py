"""A million strings go in and out while other calls are answered."""

from __future__ import annotations

import asyncio

import pytest
from live import Live, live
from scripted_models import Inputs
from test_large_json import TRIES, Probe

from triglot import Model, TensorSpec
from triglot.core.tensor import pack_bytes
from triglot.pb.kserve import inference_pb2 as pb

pytestmark = pytest.mark.both_transports

COUNT = 1_000_000


class Echo(Model):
    inputs = [TensorSpec("x", "BYTES", [-1])]
    outputs = [TensorSpec("y", "BYTES", [-1])]

    def infer(self, inputs: Inputs) -> dict[str, object]:
        return {"y": inputs["x"]}


async def test_other_calls_are_answered_meanwhile() -> None:
    raw = pack_bytes([b"some text"] * COUNT)
    message = pb.ModelInferRequest(model_name="echo", raw_input_contents=[raw])
    message.inputs.add(name="x", datatype="BYTES", shape=[COUNT])

    async def others_were_answered(server: Live) -> bool:
        probe = Probe(server)
        probing = asyncio.ensure_future(probe.run())
        reply = pb.ModelInferResponse.FromString(await server.infer(message.SerializeToString()))
        probing.cancel()
        await asyncio.wait([probing])
        same = reply.raw_output_contents[0] == raw
        assert same
        assert list(reply.outputs[0].shape) == [COUNT]
        # Three passes over a million elements: off the loop, health was asked all the while.
        return probe.answers >= 5

    async with live({"echo": Echo()}) as server:
        # A machine that stands still for a moment does so once; passes on the loop hold it each time.
        for _ in range(TRIES):
            if await others_were_answered(server):
                return
    pytest.fail(f"in none of {TRIES} tries")
