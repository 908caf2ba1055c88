"""How many objects stand for one unary call, from the transport to the model."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter

import grpc
import pytest

from served_models import serving
from triglot.pb.kserve import inference_pb2 as pb
from triglot.testing import GatedModel
from waiting import until

pytestmark = pytest.mark.both_transports

CALLS = 40
REQUEST = {"InferenceRequest", "InputTensor"}
"""The request and its tensors."""
WIRE = {"RpcHead", "Stream", "_Outgoing"}
"""The request's headers, and the state of its HTTP/2 stream, in and out."""


def living() -> Counter[str]:
    """Our own objects, by type."""
    return Counter(
        type(tracked).__name__
        for tracked in gc.get_objects()
        if str(type(tracked).__module__).startswith("triglot.")
    )


@pytest.mark.parametrize(("transport", "call"), [("h2", "Rpc"), ("aio", "AioCall")])
async def test_a_unary_call_is_three_objects(transport: str, call: str) -> None:
    model = GatedModel("infer")
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
        model.open_point("infer")
        await asyncio.gather(*answers)
    assert of_a_call - REQUEST - WIRE == {call, "Call", "Work"}
