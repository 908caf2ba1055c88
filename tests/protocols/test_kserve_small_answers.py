"""Small answers say what large ones of the same kind say."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from triglot.core.tensor import DATATYPES, SMALL_BYTES, Array
from triglot.core.types import InferenceResponse, OutputTensor
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.codec import FINAL, encode_stream_infer, infer_pieces, small_answer

NAMES = st.text(max_size=20)
FIXED = [datatype for datatype in DATATYPES.values() if datatype.itemsize]


@st.composite
def outputs(draw: st.DrawFn) -> OutputTensor:
    """Of any datatype but BYTES; some are views that are not contiguous, or not in this machine's byte order."""
    datatype = draw(st.sampled_from(FIXED))
    shape = draw(arrays.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    size = int(np.prod(shape)) * datatype.itemsize
    array: Array = np.frombuffer(draw(st.binary(min_size=size, max_size=size)), datatype.dtype).reshape(shape)
    if draw(st.booleans()):
        array = array.T
    if draw(st.booleans()) and array.dtype.kind in "iufc":
        array = array.astype(array.dtype.newbyteorder())
    return OutputTensor(draw(NAMES), datatype.name, array)


@given(
    NAMES,
    st.sampled_from(["1", "12"]),
    NAMES,
    st.lists(outputs(), min_size=1, max_size=3),
    st.sampled_from([None, True, False]),
)
def test_it_is_the_same_message(
    model: str, version: str, request_id: str, given_outputs: list[OutputTensor], final: bool | None
) -> None:
    response = InferenceResponse(model, version, request_id, given_outputs)
    small = small_answer(response, final=final)
    native = all(output.array.dtype.isnative for output in given_outputs)
    assert (small is not None) == native
    if small is None:
        return
    if final is None:
        complete_message = pb.ModelInferResponse.FromString(b"".join(infer_pieces(response)))
        assert pb.ModelInferResponse.FromString(small) == complete_message
    else:
        complete = InferenceResponse(model, version, request_id, given_outputs, {FINAL: final})
        message = pb.ModelStreamInferResponse.FromString(encode_stream_infer(complete))
        assert pb.ModelStreamInferResponse.FromString(small) == message


def output(array: Array, datatype: str = "FP32") -> OutputTensor:
    return OutputTensor("y", datatype, array)


SMALL = output(np.zeros(3, np.float32))


@pytest.mark.parametrize(
    "response",
    [
        InferenceResponse("m", "1", "", []),
        InferenceResponse("m", "1", "", [output(np.array([b"a"], object), "BYTES")]),
        InferenceResponse("m", "1", "", [output(np.array(["a"]), "BYTES")]),
        InferenceResponse("m", "1", "", [output(np.zeros(SMALL_BYTES, np.float32))]),
        InferenceResponse("m", "1", "", [output(np.zeros(SMALL_BYTES // 8, np.float32))] * 3),
        InferenceResponse("m", "1", "", [SMALL], {"mine": 1}),
        InferenceResponse("m", "1", "", [SMALL], placed=frozenset({"y"})),
    ],
)
def test_others_are_left_to_those_who_can(response: InferenceResponse) -> None:
    assert small_answer(response, final=True) is None
