"""A model's array lies over the request's own bytes, and an answer leaves with one copy."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from tests.scheduling.scripted_models import Inputs
from tests.transports.live import live, request
from triglot import Model, TensorSpec
from triglot.core.tensor import DATATYPES
from triglot.core.types import InferenceResponse, OutputTensor
from triglot.protocols.kserve import codec

pytestmark = pytest.mark.both_transports

COUNT = 256 * 1024


class Keeping(Model):
    """Keeps the arrays that it was given."""

    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]

    def __init__(self) -> None:
        self.kept: list[NDArray[Any]] = []

    def infer(self, inputs: Inputs) -> dict[str, Any]:
        self.kept.append(inputs["x"])
        return {"y": inputs["x"][:1]}


def held(array: NDArray[Any]) -> bytes:
    """The bytes of the object that an array lies over, and keeps."""
    base: Any = array
    while type(base) is np.ndarray and type(base.base) is np.ndarray:
        base = base.base
    if type(base) is np.ndarray and base.dtype != np.uint8:
        base = base.base
    return memoryview(base).tobytes()


async def test_a_grpc_tensor_is_a_view_of_the_message() -> None:
    model = Keeping()
    sent = np.arange(COUNT, dtype=np.float32)
    message = request("keeping", sent.tobytes())
    async with live({"keeping": model}) as server:
        await server.infer(message)
    array = model.kept[0]
    np.testing.assert_array_equal(array, sent)
    # The whole message, not only the tensor's part of it, is what holds the memory.
    same = held(array) == message
    assert same
    assert not array.flags.writeable


async def test_a_binary_rest_tensor_is_a_view_of_the_body() -> None:
    model = Keeping()
    sent = np.arange(COUNT, dtype=np.float32)
    head = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[%d],"parameters":{"binary_data_size":%d}}]}' % (
        COUNT,
        sent.nbytes,
    )
    body = head + sent.tobytes()
    async with live({"keeping": model}) as server:
        headers = {"Inference-Header-Content-Length": str(len(head))}
        async with server.session.post(
            f"{server.url}/models/keeping/infer", data=io.BytesIO(body), headers=headers
        ) as response:
            assert response.status == 200
    array = model.kept[0]
    np.testing.assert_array_equal(array, sent)
    same = held(array) == body
    assert same
    assert not array.flags.writeable


@pytest.mark.parametrize("datatype", ["FP32", "INT64", "BOOL", "BF16", "FP16"])
def test_a_numeric_answer_is_joined_from_the_arrays_own_memory(datatype: str) -> None:
    array = np.ones((4, 5), DATATYPES[datatype].dtype)
    response = InferenceResponse("m", "1", "", [OutputTensor("y", datatype, array)])
    pieces = codec.infer_pieces(response)
    assert any(isinstance(piece, np.ndarray) and np.shares_memory(piece, array) for piece in pieces)
    assert codec.encode_infer(response) == b"".join(bytes(piece) for piece in pieces)
