"""Inputs of the differential fuzzer: valid ones of every kind with random values, most of them damaged."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import numpy as np

from triglot.core.tensor import DATATYPES, Array, object_array, pack_bytes
from triglot.core.types import OutputTensor, TensorSpec
from triglot.model.signature import Signature
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import predict_pb2
from triglot.protocols.grps import codec as grps_codec
from triglot.protocols.grps.message import GrpsTensor, Message
from triglot.protocols.grps.tensors import DTYPES, tensor_of
from triglot.protocols.tfserving.tensor import tensor_message

COMMON = (0, 1, 2, 3, 9, 10, 13, 32, 34, 44, 45, 48, 58, 91, 92, 93, 123, 125, 127, 128, 255)
"""Bytes that mean something to one of the targets."""
NUMBERS = (0, 1, -1, 7, 127, 128, 255, 2**15, 2**16 - 1, 2**31 - 1, 2**31, -(2**31), 2**53, 2**63 - 1)
FLOATS = (0.0, -0.0, 1.0, 0.1, -1.5, 1e-7, 1e22, 3.4e38, 1e308, float("inf"), float("nan"), 5e-324)
TEXTS = ("", "x", "y", "FP32", "é", "\U0001f600", "a b", "\x00", '"', "\\", "b64", "a" * 130)
NAMES = ("x", "y", "s", "n", "")
SHAPES = ((), (0,), (1,), (2,), (4,), (1, 4), (2, 2), (3, 0), (-1,), (2**31, 2**31), (1,) * 17)
TYPES = (*DATATYPES, "STRING", "")
OPTIONAL = TensorSpec("n", "INT64", [-1, 2], optional=True)
SPECS = [
    TensorSpec("x", "FP32", [-1]),
    TensorSpec("s", "BYTES", None),
]
SIGNATURES = (
    Signature([*SPECS, OPTIONAL], SPECS),
    Signature([TensorSpec("x", "FP32", [-1, -1])], [TensorSpec("y", "FP32", [-1, -1])], max_batch_size=4),
    Signature([TensorSpec("x", "INT8", None)], [TensorSpec("x", "INT8", None)]),
    Signature([], [], any_tensors=True),
)


def damaged(random: Random, data: bytes, most: int = 3) -> bytes:
    """Return the bytes with up to `most` changes; one in three as it is."""
    for _ in range(max(0, random.randint(-1, most) if most > 1 else random.randint(0, most))):
        at = random.randint(0, len(data))
        size = random.choice((1, 1, 1, 2, 4, 9, 40))
        kind = random.randrange(7)
        if kind == 0 and data:
            at = min(at, len(data) - 1)
            data = data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + size :]
        elif kind == 2:
            data = data[:at] + data[at : at + size] + data[at:]
        elif kind == 3:
            data = data[:at] + bytes([random.choice(COMMON)]) + data[at + 1 :]
        elif kind == 4:
            data = data[:at] + random.randbytes(size) + data[at:]
        elif kind == 5:
            other = random.randint(0, len(data))
            data = data[:at] + data[other : other + size] + data[at:]
        else:
            data = data[:at] if random.random() < 0.3 else data[:at] + bytes([random.choice(COMMON)]) + data[at:]
    return data


def any_array(random: Random, datatype: str, shape: tuple[int, ...]) -> Array:
    count = int(np.prod(shape))
    if datatype == "BYTES":
        return object_array([random.choice(TEXTS).encode() for _ in range(count)], shape)
    dtype = DATATYPES[datatype].dtype
    if datatype == "BOOL":
        return np.array([random.random() < 0.5 for _ in range(count)], dtype).reshape(shape)
    if dtype.kind in "iu":
        return np.frombuffer(random.randbytes(count * dtype.itemsize), dtype).reshape(shape)
    with np.errstate(all="ignore"):
        values = [random.choice(FLOATS) if random.random() < 0.3 else random.gauss(0, 10) for _ in range(count)]
        return np.array(values).astype(dtype).reshape(shape)


def any_outputs(random: Random) -> list[OutputTensor]:
    outputs = []
    for _ in range(random.choice((1, 1, 1, 2, 3, 0))):
        datatype = random.choice(("FP32", "FP32", *DATATYPES))
        shape = random.choice(((1,), (4,), (1, 4), (2, 3), (0,), (), (2, 1, 2)))
        outputs.append(OutputTensor(random.choice(NAMES), datatype, any_array(random, datatype, shape)))
    return outputs


def any_parameter(random: Random) -> Any:
    return random.choice((True, False, random.choice(NUMBERS), random.choice(FLOATS), random.choice(TEXTS)))


def infer_message(random: Random) -> bytes:
    """A ModelInferRequest."""
    request = inference_pb2.ModelInferRequest(model_name=random.choice(TEXTS), id=random.choice(TEXTS))
    request.model_version = random.choice(("", "1", "x"))
    raw = random.random() < 0.7
    for _ in range(random.choice((1, 1, 1, 2, 3, 0))):
        datatype, shape = random.choice(TYPES), random.choice(SHAPES)
        tensor = request.inputs.add(name=random.choice(NAMES), datatype=datatype, shape=shape)
        known = datatype in DATATYPES and all(0 <= dim < 100 for dim in shape)
        array = any_array(random, datatype, shape) if known else np.zeros(2, "f4")
        if raw:
            request.raw_input_contents.append(
                pack_bytes(array.reshape(-1)) if array.dtype == object else array.tobytes()
            )
        elif array.dtype == object:
            tensor.contents.bytes_contents.extend(array.reshape(-1).tolist())
        elif array.dtype.kind in "iu":
            field = {8: "int64_contents", 4: "int_contents"}.get(array.dtype.itemsize, "uint_contents")
            values = array.reshape(-1).astype(
                "i4" if field == "int_contents" else "u4" if field[0] == "u" else "i8"
            )
            getattr(tensor.contents, field).extend(values.tolist())
        elif datatype == "FP64":
            tensor.contents.fp64_contents.extend(array.reshape(-1).tolist())
        else:
            tensor.contents.fp32_contents.extend(array.reshape(-1).tolist() if datatype == "FP32" else [1.5, 2])
        if random.random() < 0.1:
            tensor.parameters[random.choice(("binary_data_size", "k", "shared_memory_region"))].int64_param = 4
    for _ in range(random.choice((0, 0, 1, 2))):
        request.outputs.add(name=random.choice(NAMES))
    if random.random() < 0.3:  # A map of more has no order.
        key = random.choice(("sequence_id", "sequence_start", "priority", "timeout", "k", "binary_data_output"))
        member = random.choice(("bool_param", "int64_param", "string_param", "double_param", "uint64_param"))
        value_of = {"b": True, "i": random.choice(NUMBERS), "s": random.choice(TEXTS), "d": 1.5, "u": 3}
        setattr(request.parameters[key], member, value_of[member[0]])
    return request.SerializeToString(deterministic=True)


def predict_message(random: Random) -> bytes:
    """A PredictRequest."""
    request = predict_pb2.PredictRequest(output_filter=random.choices(NAMES, k=random.choice((0, 0, 1, 2))))
    request.model_spec.name = random.choice(TEXTS)
    if random.random() < 0.2:
        request.model_spec.version.value = random.choice(NUMBERS)
    for _ in range(random.choice((1, 1, 1, 2, 0))):
        tensor = request.inputs[random.choice(NAMES)]
        datatype = random.choice(("FP32", "FP32", "FP64", "INT64", "BYTES", "BOOL", "INT8", "UINT16", "FP16"))
        shape = random.choice(((1,), (4,), (2, 2), (0,), ()))
        array = any_array(random, datatype, shape)
        tensor.CopyFrom(tensor_message(array, datatype))
        if random.random() < 0.4 and datatype != "BYTES":
            for field in ("float_val", "double_val", "int_val", "int64_val", "bool_val", "half_val"):
                tensor.ClearField(field)
            tensor.tensor_content = array.tobytes()
        if random.random() < 0.1:
            tensor.tensor_shape.dim.add(size=random.choice(NUMBERS[:9]))
    return request.SerializeToString(deterministic=True)


def grps_tensor(output: OutputTensor) -> GrpsTensor:
    if output.datatype not in DTYPES:
        return tensor_of(output.name, "INT32", np.arange(2, dtype=np.int32))
    return tensor_of(output.name, output.datatype, output.array)


def grps_message(random: Random) -> bytes:
    """A GrpsMessage."""
    message = grps_pb2.GrpsMessage(model=random.choice(("", "m", "m-1")))
    kind = random.randrange(8)
    if kind < 5:
        return grps_codec.encode_message(Message("m", list(map(grps_tensor, any_outputs(random)))))
    if kind == 5:
        message.str_data = random.choice(TEXTS)
    elif kind == 6:
        message.bin_data = random.choice(TEXTS).encode()
    else:
        message.gmap.s_s[random.choice(TEXTS)] = random.choice(TEXTS)
        message.gmap.s_i32[random.choice(TEXTS)] = 5
    return message.SerializeToString(deterministic=True)


def number_text(random: Random) -> str:
    kind = random.randrange(8)
    if kind < 4:
        return repr(round(random.gauss(0, 100), random.randint(0, 9)))
    if kind == 4:
        return str(random.choice(NUMBERS))
    if kind == 5:
        return random.choice(("NaN", "Infinity", "-Infinity", "1e400", "-0", "-0.0", "1E5", "0.1e-7", "9" * 25))
    if kind == 6:
        return str(random.randint(-(2**65), 2**65))
    return repr(random.choice((1e22, 5e-324, 1.7976931348623157e308, 1e-7, 123456789.125)))


def json_value(random: Random, depth: int = 0) -> str:
    kind = random.randrange(9)
    if kind < 3 and depth < 4:
        count = random.choice((0, 1, 2, 2, 4))
        same = json_value(random, depth + 1)
        return (
            "["
            + ",".join(same if random.random() < 0.7 else json_value(random, depth + 1) for _ in range(count))
            + "]"
        )
    if kind < 6:
        return number_text(random)
    if kind == 6:
        return random.choice(("true", "false", "null", "{}", '{"b64":"YWI="}', '{"b64":1}'))
    if kind == 7:
        return json.dumps(random.choice(TEXTS), ensure_ascii=random.random() < 0.5)
    return '"\\u00e9\\n"' if depth else json.dumps({random.choice(NAMES): 1})


def numbers(random: Random) -> str:
    """A list of numbers, nested in most cases as the shape says."""
    rows, columns = random.choice(((0, 1), (1, 1), (0, 4), (2, 2), (1, 4), (0, 16)))
    rows_texts = ["[" + ",".join(number_text(random) for _ in range(columns)) + "]" for _ in range(max(1, rows))]
    return "[" + ",".join(rows_texts) + "]" if rows else rows_texts[0]


def v2_body(random: Random) -> bytes:
    """An infer body of the V2 REST interface."""
    inputs = []
    for _ in range(random.choice((1, 1, 1, 2, 0))):
        data = numbers(random) if random.random() < 0.7 else json_value(random)
        shape = json.dumps(random.choice(([4], [1], [1, 4], [2, 2], [16], [], [0], [-1], "4", [1.5])))
        members = [
            f'"name":{json.dumps(random.choice(NAMES))}',
            f'"datatype":{json.dumps(random.choice(("FP32", "FP32", *TYPES)))}',
            f'"shape":{shape}',
            f'"data":{data}',
        ]
        if random.random() < 0.1:
            members[3] = '"parameters":{"binary_data_size":4}'
        if random.random() < 0.1:
            random.shuffle(members)
        inputs.append("{" + ",".join(members) + "}")
    parts = [f'"inputs":[{",".join(inputs)}]']
    if random.random() < 0.3:
        parts.append(f'"id":{json_value(random, 3)}')
    if random.random() < 0.2:
        parts.append(
            f'"parameters":{{"k":{json_value(random, 3)},"binary_data_output":{random.choice(("true", "1"))}}}'
        )
    if random.random() < 0.2:
        parts.append(f'"outputs":[{{"name":{json.dumps(random.choice(NAMES))}}}]')
    blank = random.choice(("", "", "", " ", "\n"))
    return ("{" + f"{blank},{blank}".join(parts) + "}").encode()


def predict_body(random: Random) -> bytes:
    """A `:predict` body of TensorFlow Serving's REST interface."""
    kind = random.randrange(5)
    if kind == 0:
        text = f'"instances":{numbers(random)}'
    elif kind == 1:
        rows = [
            f'{{"x":{number_text(random)},"s":{json.dumps(random.choice(TEXTS))}}}'
            for _ in range(random.randint(1, 3))
        ]
        text = f'"instances":[{",".join(rows)}]'
    elif kind == 2:
        text = f'"inputs":{{"x":{numbers(random)},"s":{json_value(random)}}}'
    elif kind == 3:
        text = f'"inputs":{numbers(random)}'
    else:
        text = f'"instances":{json_value(random)}'
    name = random.choice(("", "", "", '"signature_name":"a",', '"inputs":[],'))
    return ("{" + name + text + "}").encode()
