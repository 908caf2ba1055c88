"""How many objects stand for one unary call, from the transport to the model."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections import Counter
from typing import Any

import grpc
import pytest
from numpy.typing import NDArray

import triglot
from served_models import serving
from triglot.pb.kserve import inference_pb2 as pb
from waiting import until

CALLS = 40
REQUEST = {"InferenceRequest", "InputTensor"}
"""The request and its tensors."""
WIRE = {"RpcHead", "Stream", "_Outgoing"}
"""The request's headers, and the state of its HTTP/2 stream, in and out."""


class Held(triglot.Model):
    """Runs one call at a time, until `gate` is set the first one."""

    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def __init__(self) -> None:
        self.gate = threading.Event()

    def infer(self, inputs: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        assert self.gate.wait(60)
        return {"y": inputs["x"]}


def living() -> Counter[str]:
    """Our own objects, by type."""
    return Counter(
        type(tracked).__name__
        for tracked in gc.get_objects()
        if str(type(tracked).__module__).startswith("triglot.")
    )


@pytest.mark.parametrize(("transport", "call"), [("h2", "Rpc"), ("aio", "AioCall")])
async def test_a_unary_call_is_three_objects(transport: str, call: str) -> None:
    model = Held()
    async with (
        serving({"m": model}, grpc_transport=transport) as here,
        grpc.aio.insecure_channel(f"127.0.0.1:{here.server.grpc_port}") as channel,
    ):
        infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        request = pb.ModelInferRequest(model_name="m", raw_input_contents=[bytes(4)])
        request.inputs.add(name="x", datatype="FP32", shape=[1])
        data = request.SerializeToString()
        gc.collect()
        before = living()
        answers = [asyncio.ensure_future(infer(data, timeout=60)) for _ in range(CALLS)]
        await until(lambda: here.server.dataplane.queue_depth() == CALLS - 1)
        gc.collect()
        of_a_call = {name for name, count in (living() - before).items() if count >= CALLS}
        model.gate.set()
        await asyncio.gather(*answers)
    assert of_a_call - REQUEST - WIRE == {call, "Call", "Work"}
