"""TensorProtos such as no client makes them: too much or too little in them, wrong fields, and no tensors."""

from __future__ import annotations

import random
from typing import Any

from tests.protocols.wire_bytes import number, varint_field
from triglot.core.tensor import DATATYPES, element_count
from triglot.pb.tfserving import tensor_pb2 as pb
from triglot.protocols.tfserving.tensor import TYPES

INT32S = [0, 1, -1, 300, 40000, 15360, -(2**31), 2**31 - 1]
FLOATS = [0.0, -0.0, 1.5, -2.25, 1e30, float("inf"), float("-inf")]
VALUES: dict[str, list[Any]] = {
    "float_val": FLOATS,
    "double_val": FLOATS,
    "scomplex_val": FLOATS,
    "dcomplex_val": FLOATS,
    "int_val": INT32S,
    "half_val": INT32S,
    "int64_val": [*INT32S, -(2**63), 2**63 - 1],
    "uint32_val": [0, 7, 2**32 - 1],
    "uint64_val": [0, 7, 2**64 - 1],
    "bool_val": [False, True],
    "string_val": [b"", b"a\0", b"\xff", b"long" * 50],
}
OWN = dict.fromkeys(("UINT8", "UINT16", "INT8", "INT16", "INT32"), "int_val") | {
    "BOOL": "bool_val",
    "BYTES": "string_val",
    "FP16": "half_val",
    "BF16": "half_val",
    "FP32": "float_val",
    "FP64": "double_val",
    "INT64": "int64_val",
    "UINT32": "uint32_val",
    "UINT64": "uint64_val",
    "COMPLEX64": "scomplex_val",
    "COMPLEX128": "dcomplex_val",
    **dict.fromkeys(("QINT8", "QUINT8", "QINT16", "QUINT16", "QINT32"), "int_val"),
}
NO_TYPES = [0, 34, 100, 101, 107, 119, 999, -1]


def odd_tensors(count: int) -> list[pb.TensorProto]:
    """The same ones each time."""
    chance = random.Random(7)
    return [odd_tensor(chance) for _ in range(count)]


def odd_tensor(chance: random.Random) -> pb.TensorProto:
    datatype = chance.choice(list(TYPES))
    shape = tuple(chance.choice([0, 1, 1, 2, 2, 3]) for _ in range(chance.randint(0, 3)))
    message = pb.TensorProto(dtype=TYPES[datatype])
    message.tensor_shape.dim.extend([pb.TensorShapeProto.Dim(size=dim) for dim in shape])
    members = chance.sample(sorted(VALUES), chance.randint(0, 2))
    for member in {*members, OWN[datatype]} if chance.random() < 0.8 else members:
        getattr(message, member).extend(chance.choices(VALUES[member], k=chance.randint(0, 9)))
    if chance.random() < 0.4:
        message.tensor_content = content(datatype, element_count(shape), chance)
    spoil(message, chance)
    return message


def content(datatype: str, count: int, chance: random.Random) -> bytes:
    if datatype == "BYTES":
        sizes = chance.choices([0, 1, 2, 200], k=count)
        return b"".join(map(number, sizes)) + chance.randbytes(sum(sizes))
    return bytes(chance.choices([0, 1], k=count * DATATYPES[datatype].itemsize))


def spoil(message: pb.TensorProto, chance: random.Random) -> None:
    """Now and then, make it a tensor of another kind, or none."""
    match chance.randint(0, 30):
        case 0:
            message.ClearField("tensor_shape")
        case 1:
            message.tensor_shape.unknown_rank = True
        case 2:
            message.tensor_shape.dim.add(size=-1)
        case 3:
            message.MergeFromString(varint_field(1, chance.choice(NO_TYPES)))
        case 4:
            message.dtype = chance.choice(list(TYPES.values()))
        case 5 | 6:
            message.tensor_content += b"\1"
        case 7 | 8:
            message.tensor_content = message.tensor_content[:-1]
        case 9:
            message.tensor_content = message.tensor_content.replace(b"\1", b"\2")
