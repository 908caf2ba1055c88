"""The two readers of tensors, one of parsed messages and one of bytes: one outcome, whatever the bytes are.

Neither costs more memory than the bytes are worth, and large tensors are never copied on the path.
"""

from __future__ import annotations

import struct
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.wire_bytes import (
    UNKNOWN_FIELDS,
    damaged,
    field,
    fixed32_field,
    fixed64_field,
    number,
    packed,
    varint_field,
)
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, Array, array_over
from triglot.core.types import InferenceResponse, InputTensor, OutputTensor
from triglot.pb.tfserving import tensor_pb2 as pb
from triglot.protocols.tfserving.codec import encode_predict
from triglot.protocols.tfserving.tensor import (
    FEW_FIELDS,
    MAX_FILLED_BYTES,
    TYPES,
    BadTensor,
    decode_tensor,
    read_tensor,
    tensor_pieces,
)
from triglot.protocols.wire import MessageRules, parse, scan

MIB = 2**20
MANY_FIELDS = varint_field(99, 0) * (FEW_FIELDS + 1)


def plain(tensor: InputTensor) -> tuple[Any, ...]:
    """The tensor as values that can be compared; the type of `data` does not matter."""
    head = (tensor.name, tensor.datatype, tensor.shape)
    if tensor.datatype not in DATATYPES:
        return (*head, tensor.data)
    data = tensor.data
    array = data if isinstance(data, np.ndarray) else np.frombuffer(data, DATATYPES[tensor.datatype].dtype)
    assert array.shape == (int(np.prod(tensor.shape)),)
    return (*head, array.tolist() if array.dtype.hasobject else array.tobytes())


def outcome(read: Any, data: Any) -> Any:
    """The tensor, or the kind of refusal: no protobuf message, or a message that is no tensor."""
    try:
        return plain(read("x", data))
    except InvalidArgument as error:
        return type(error)


HANDLES_AND_VARIANTS = MessageRules(cut=frozenset({14, 15}))


def parse_and_read(name: str, data: bytes) -> InputTensor:
    try:
        message = parse(pb.TensorProto, data)
    except InvalidArgument:
        # No tensor here is made of those, and the reader of bytes does not look into them.
        message = parse(pb.TensorProto, scan(data, HANDLES_AND_VARIANTS)[0])
    return read_tensor(name, message)


def assert_one_outcome(data: bytes) -> Any:
    expected = outcome(parse_and_read, data)
    assert outcome(decode_tensor, data) == expected
    assert outcome(decode_tensor, memoryview(data)) == expected
    assert outcome(decode_tensor, MANY_FIELDS + data) == expected
    return expected


BITS = st.sampled_from([0.0, -0.0, 1.5, -2.25, 1e38, 1e-45, float("inf"), float("-inf")]) | st.floats(
    width=32, allow_nan=False
)
INT32S = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 300)


def few(values: st.SearchStrategy[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(values, max_size=5)


CONTENTS: dict[str, st.SearchStrategy[Any]] = {
    "version_number": INT32S,
    "tensor_content": st.binary(max_size=40),
    "half_val": few(INT32S),
    "float_val": few(BITS),
    "double_val": few(BITS),
    "int_val": few(INT32S),
    "string_val": few(st.binary(max_size=3)),
    "scomplex_val": few(BITS),
    "int64_val": few(st.integers(-(2**63), 2**63 - 1)),
    "bool_val": few(st.booleans()),
    "dcomplex_val": few(BITS),
    "uint32_val": few(st.integers(0, 2**32 - 1)),
    "uint64_val": few(st.integers(0, 2**64 - 1)),
    "float8_val": st.binary(max_size=4),
    "resource_handle_val": few(st.builds(pb.ResourceHandleProto, name=st.text(max_size=2))),
    "variant_val": few(st.builds(pb.VariantTensorDataProto, type_name=st.text(max_size=2))),
}
SHAPES = st.none() | st.builds(
    pb.TensorShapeProto,
    dim=st.lists(
        st.builds(pb.TensorShapeProto.Dim, size=st.integers(0, 3) | st.sampled_from([-1, 2**31, 2**62])),
        max_size=3,
    ),
    unknown_rank=st.sampled_from([False, False, False, True]),
)
DTYPES = st.sampled_from(sorted(TYPES.values())) | st.integers(-1, 140)
# Often with one field only, or two: with all of them, hardly any tensor would be right.
TENSORS = st.lists(st.sampled_from(sorted(CONTENTS)), max_size=2, unique=True).flatmap(
    lambda names: st.builds(
        pb.TensorProto,
        dtype=DTYPES,
        tensor_shape=SHAPES,
        **{name: CONTENTS[name] for name in names},
    )
)


@given(TENSORS)
def test_parsed_and_cut_tensors_are_the_same(message: pb.TensorProto) -> None:
    assert assert_one_outcome(message.SerializeToString()) is not InvalidArgument


@given(TENSORS)
def test_a_datatypes_own_values(message: pb.TensorProto) -> None:
    """With content of just the right length, and with each type in turn."""
    for datatype, dtype in TYPES.items():
        message.dtype = dtype
        message.tensor_content = b"\1" * (6 * DATATYPES[datatype].itemsize)
        message.tensor_shape.CopyFrom(pb.TensorShapeProto(dim=[{"size": 2}, {"size": 3}]))
        expected = assert_one_outcome(message.SerializeToString())
        assert (
            expected == ("x", datatype, (2, 3), b"\1" * (6 * DATATYPES[datatype].itemsize)) or datatype == "BYTES"
        )


# Fields of a tensor in any wire type that may hold it, and some that may not.
PIECES = st.one_of(
    st.sampled_from([varint_field(1, dtype) for dtype in TYPES.values()]),
    st.lists(st.integers(0, 3), max_size=2).map(
        lambda dims: field(2, b"".join(field(2, varint_field(1, dim)) for dim in dims))
    ),
    st.builds(varint_field, st.integers(1, 18), st.integers(0, 2**64 - 1)),
    st.builds(field, st.integers(1, 18), st.binary(max_size=16)),
    st.builds(
        field, st.sampled_from([7, 10, 11, 13, 16, 17]), st.lists(st.integers(0, 300), max_size=4).map(packed)
    ),
    st.builds(
        fixed32_field, st.integers(1, 18), st.binary(min_size=4, max_size=4).filter(lambda raw: raw[3] < 127)
    ),
    st.builds(
        lambda tag, values: field(tag, struct.pack(f"<{len(values)}f", *values)),
        st.sampled_from([5, 9]),
        st.lists(BITS, max_size=4),
    ),
    st.builds(
        lambda tag, values: field(tag, struct.pack(f"<{len(values)}d", *values)),
        st.sampled_from([6, 12]),
        st.lists(BITS, max_size=4),
    ),
    st.builds(fixed64_field, st.integers(1, 18)),
    UNKNOWN_FIELDS,
)


@given(st.lists(PIECES, max_size=8).map(b"".join))
def test_tensors_in_pieces(data: bytes) -> None:
    assert_one_outcome(data)


@given(st.lists(PIECES, min_size=1, max_size=5).map(b"".join).flatmap(damaged))
def test_damaged_tensors(data: bytes) -> None:
    assert_one_outcome(data)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_tensor_or_refused(data: bytes) -> None:
    assert_one_outcome(data)


FLOAT_OF_2 = varint_field(1, pb.DT_FLOAT) + field(2, field(2, varint_field(1, 2)))


@pytest.mark.parametrize(
    "data",
    [
        FLOAT_OF_2 + field(5, bytes(9)),
        FLOAT_OF_2 + field(5, bytes(7)),
        FLOAT_OF_2 + field(5, bytes(2)) + field(5, bytes(2)),
        FLOAT_OF_2 + field(4, bytes(8)) + field(5, bytes(3)),
        FLOAT_OF_2 + field(5, bytes(8)) + field(6, bytes(4)),
        varint_field(1, pb.DT_DOUBLE) + field(6, bytes(12)),
        varint_field(1, pb.DT_STRING) + field(5, bytes(3)),
        FLOAT_OF_2 + field(2, b"\x12\x05") + field(2, b"12345"),
    ],
)
def test_bytes_that_protobuf_refuses(data: bytes) -> None:
    """That is another thing than a tensor that TensorFlow refuses: nothing can be said about the request."""
    assert assert_one_outcome(data) is InvalidArgument


def owner(tensor: InputTensor) -> Any:
    assert isinstance(tensor.data, memoryview)
    return tensor.data.obj


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_content_is_a_view_of_the_message(datatype: str) -> None:
    raw = np.ones(1000, DATATYPES[datatype].dtype).tobytes()
    message = pb.TensorProto(dtype=TYPES[datatype], tensor_shape={"dim": [{"size": 1000}]}, tensor_content=raw)
    data = message.SerializeToString()
    tensor = decode_tensor("x", memoryview(data))
    assert owner(tensor) is data
    array = array_over(tensor.data, DATATYPES[datatype].dtype, tensor.shape)  # type: ignore[arg-type]
    assert np.shares_memory(array, np.frombuffer(data, np.uint8))
    assert array.tobytes() == raw


@pytest.mark.parametrize(("datatype", "member"), [("FP32", "float_val"), ("FP64", "double_val")])
def test_packed_floats_are_a_view_of_the_message(datatype: str, member: str) -> None:
    values: Any = {member: [0.5] * 1000}
    message = pb.TensorProto(dtype=TYPES[datatype], tensor_shape={"dim": [{"size": 1000}]}, **values)
    data = message.SerializeToString()
    assert owner(decode_tensor("x", data)) is data
    # Surplus ones are left out of the view.
    message.tensor_shape.dim[0].size = 999
    data = message.SerializeToString()
    surplus = decode_tensor("x", data).data
    assert isinstance(surplus, np.ndarray)
    assert np.shares_memory(surplus, np.frombuffer(data, np.uint8))


def shares(pieces: list[Any], array: Array) -> bool:
    return any(isinstance(piece, np.ndarray) and np.shares_memory(piece, array) for piece in pieces)


@pytest.mark.parametrize("datatype", [name for name in DATATYPES if name != "BYTES"])
def test_outputs_are_joined_from_the_arrays_own_memory(datatype: str) -> None:
    array = np.ones((4, 5), DATATYPES[datatype].dtype)
    typed = tensor_pieces(array, datatype)
    assert shares(typed, array) == (datatype in ("FP32", "FP64", "BOOL", "COMPLEX64", "COMPLEX128"))
    content = tensor_pieces(array, datatype, as_content=True)
    assert shares(content, array)
    response = InferenceResponse("m", "1", "", [OutputTensor("y", datatype, array)])
    for pieces, as_content in ((typed, False), (content, True)):
        joined = b"".join(pieces)
        assert field(1, field(1, "y") + field(2, joined)) in encode_predict(response, "s", as_content=as_content)


# What a message may cost.

MEASURE = """
import re, sys
from pathlib import Path
from triglot.core.errors import InvalidArgument
from triglot.protocols.tfserving.tensor import decode_tensor

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024

head, piece, times, wrap = sys.argv[1:]
data = bytes.fromhex(piece) * int(times)
if wrap:
    data = bytes.fromhex(wrap) + data
data = bytes.fromhex(head) + data
before = peak()
try:
    decode_tensor("x", data)
except InvalidArgument:
    pass
print(peak() - before)
"""
INT32_OF_1 = varint_field(1, pb.DT_INT32) + varint_field(7, 1)
EMPTY_FIELDS = 2 * MIB


def grown(head: bytes, piece: bytes, times: int, inside: int = 0) -> int:
    """The memory that a tensor takes which holds a piece many times, in a field of it if one is given."""
    wrap = number(inside << 3 | 2) + number(len(piece) * times) if inside else b""
    command = [sys.executable, "-c", MEASURE, head.hex(), piece.hex(), str(times), wrap.hex()]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


@pytest.mark.parametrize("head", [INT32_OF_1, INT32_OF_1 + MANY_FIELDS], ids=["few fields", "many fields"])
@pytest.mark.parametrize(
    ("piece", "inside"),
    [(field(2, ""), 2), (field(3, ""), 15), (field(6, ""), 14), (field(14, ""), 0), (field(15, ""), 0)],
    ids=["dims", "tensors in a variant", "types in a handle", "handles", "variants"],
)
def test_messages_within_are_never_made(head: bytes, piece: bytes, inside: int) -> None:
    """4 MiB of empty messages would become 90 to 360 MiB of objects."""
    assert grown(head, piece, EMPTY_FIELDS, inside) < 20 * MIB


@pytest.mark.parametrize(
    "claim",
    [
        varint_field(1, pb.DT_FLOAT) + field(2, field(2, varint_field(1, 2**60))),
        varint_field(1, pb.DT_STRING) + field(2, field(2, varint_field(1, 2**60))),
        varint_field(1, pb.DT_STRING) + field(2, field(2, varint_field(1, 2**30))) + field(4, bytes(100)),
        varint_field(1, pb.DT_BOOL) + field(2, field(2, varint_field(1, 2**62))) + varint_field(11, 1),
        varint_field(1, pb.DT_FLOAT) + field(2, field(2, varint_field(1, 2**30))) + field(5, bytes(4)),
        varint_field(1, pb.DT_DOUBLE) + field(2, field(2, varint_field(1, 2**30))) + field(4, bytes(800)),
    ],
)
def test_huge_claims_allocate_nothing(claim: bytes) -> None:
    with pytest.raises(BadTensor):
        decode_tensor("x", claim)
    assert grown(claim, b"", 0) < MIB


def test_what_is_filled_is_bounded() -> None:
    def zeros(dtype: int, count: int) -> bytes:
        return varint_field(1, dtype) + field(2, field(2, varint_field(1, count))) + field(4, "")

    most = MAX_FILLED_BYTES // 8
    for dtype in (pb.DT_DOUBLE, pb.DT_STRING, pb.DT_INT64):
        assert len(decode_tensor("x", zeros(dtype, most)).data) == most
        with pytest.raises(BadTensor):
            decode_tensor("x", zeros(dtype, most + 1))
        with pytest.raises(BadTensor):
            decode_tensor("x", zeros(dtype, most), MAX_FILLED_BYTES - 1)
