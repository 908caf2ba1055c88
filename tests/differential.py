"""Differential fuzzing: the plain and the compiled build of the package must answer the same inputs alike.

    python3 tests/differential.py FOLDER [--seconds 60] [--seed N] [--only TARGET] [--plain FOLDER]

FOLDER has the compiled build (`codegen/compiled.py` prints it), and with `--plain` another one the plain build.
Each build runs in a process of its own, which makes the inputs of a block from its number and prints a digest of
its answers. Blocks whose digests differ are run again, and the first input with another answer is printed, or the
one that ended a process.

Strategy: inputs are valid ones of every kind with random values, most of them damaged in a few places: those get
furthest. What a target returns, or raises, is compared attribute by attribute, including the texts of errors.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from triglot.core import errors
from triglot.core.http import HttpRequest
from triglot.core.tensor import DATATYPES, Array, Scattered, object_array, pack_bytes
from triglot.core.types import InferenceRequest, InferenceResponse, OutputTensor, TensorSpec
from triglot.model.signature import Signature
from triglot.model.validation import bind_inputs, bind_outputs, check_parameters
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import predict_pb2
from triglot.protocols.grps import codec as grps_codec
from triglot.protocols.grps.message import GrpsMap, GrpsTensor, Message
from triglot.protocols.grps.request import Request, RequestDecoder
from triglot.protocols.grps.tensors import DTYPES, input_tensor, tensor_of
from triglot.protocols.kserve import codec as kserve_codec
from triglot.protocols.kserve import rest as kserve_rest
from triglot.protocols.tfserving import codec as tfserving_codec
from triglot.protocols.tfserving import rest_predict
from triglot.protocols.tfserving.tensor import tensor_message
from triglot.transports.http1.requests import HeadLayouts, Malformed, RequestReader, encode_chunk, response_head
from triglot.transports.http2.core import frames, sending
from triglot.transports.http2.core.connection import Connection, read_buffer
from triglot.transports.http2.core.events import DataReceived
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.receiving import CompleteRequest, RequestReceived

BLOCK = 500
"""Inputs of one block."""
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


class Case:
    """An input, as `text` for a report, and the function that answers it."""

    def __init__(self, text: str, answer: Callable[..., Any], *arguments: Any) -> None:
        self.text = text
        self._answer = answer
        self._arguments = arguments

    def outcome(self) -> str:
        """Return the answer, or its error, as JSON."""
        try:
            found = plain(self._answer(*self._arguments))
        except Exception as error:
            found = ["raised", plain(error)]
        return json.dumps(found)


Target = Callable[[Random], Iterator[Case]]
"""Yields cases without end; those of one block share what a target keeps from input to input, such as layouts."""


# --- answers as plain values, which are the same in both builds ---


def plain(value: Any) -> Any:
    """Return a value of lists, texts and numbers."""
    if value is None or type(value) in (bool, int, str):
        return value
    for kind, form in FORMS:
        if isinstance(value, kind):
            return form(value)
    is_ours = type(value).__module__.partition(".")[0] == "triglot"
    return [type(value).__name__, *([name, plain(item)] for name, item in attributes(value) if is_ours)]


def array_form(array: Array) -> Any:
    elements = array.tolist() if array.dtype.kind in "OSUT" else array.tobytes()
    return [array.dtype.str, list(array.shape), plain(elements)]


FORMS: list[tuple[Any, Callable[[Any], Any]]] = [
    (int, int),
    (float, repr),
    (np.ndarray, array_form),
    (bytes | bytearray | memoryview, lambda data: f"bytes {bytes(data).hex()}"),
    (Scattered, lambda pieces: plain(bytes(pieces))),
    (Mapping, lambda members: sorted(([plain(key), plain(item)] for key, item in members.items()), key=repr)),
    (list | tuple, lambda items: list(map(plain, items))),
    (set | frozenset, lambda items: sorted(map(plain, items), key=repr)),
    (errors.ServingError, lambda error: [type(error).__name__, error.message, error.code, error.retry_after]),
    (Exception, lambda error: [type(error).__name__, str(error)]),
]


def attributes(value: object) -> list[tuple[str, Any]]:
    """Return the public attributes of an object."""
    kind: Any = type(value)
    names = {*attribute_names(kind), *getattr(value, "__dict__", ())}
    return [(name, getattr(value, name, None)) for name in sorted(names) if not name.startswith("_")]


@cache
def attribute_names(kind: type) -> set[str]:
    """Return the attributes that all objects of a type have: compiled ones have descriptors of another type."""
    attribute = MemberDescriptorType | GetSetDescriptorType | property
    return {name for base in kind.__mro__ for name, item in vars(base).items() if isinstance(item, attribute)}


# --- inputs ---


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


# --- targets ---


def report(data: bytes | list[bytes], more: str = "") -> str:
    parts = [data] if isinstance(data, bytes) else data
    return json.dumps([base64.b64encode(part).decode() for part in parts]) + (f" {more}" if more else "")


def layouts(random: Random, make: Callable[[Random], bytes]) -> Iterator[bytes]:
    """Messages; some have the layout of the one before and other values, since values are at the end."""
    while True:
        message = make(random)
        for _ in range(random.choice((1, 1, 3))):
            yield message
            if len(message) > 12:
                at = len(message) - random.randint(1, 12)
                message = message[:at] + random.randbytes(1) + message[at + 1 :]
        yield damaged(random, message)
        # On the path of large messages: an unknown field makes it one.
        if random.random() < 0.05:
            yield damaged(random, message, 2) + b"\xf2\x3f\x80\x80\x02" + bytes(32 * 1024)


def kserve(random: Random) -> Iterator[Case]:
    decode = kserve_codec.InferDecoder()

    def answer(data: bytes, signature: Signature) -> Any:
        request = decode(data)
        return request, checked(signature, request), kserve_codec.identify(data).model_name

    for data in layouts(random, infer_message):
        if has_order(data):
            continue
        yield Case(report(data), answer, data, random.choice(SIGNATURES))


def has_order(data: bytes) -> bool:
    """Whether which error comes first depends on the order of a map, which protobuf does not keep."""
    try:
        request = inference_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        return False
    tensors: list[Any] = [request, *request.inputs, *request.outputs]
    return any(len(tensor.parameters) > 1 for tensor in tensors)


def checked(signature: Signature, request: InferenceRequest) -> Any:
    """The inputs as the model gets them, or the error."""
    try:
        return bind_inputs(signature, request), check_parameters(request.parameters, "m")
    except errors.ServingError as error:
        return error


def tfserving(random: Random) -> Iterator[Case]:
    decode = tfserving_codec.PredictDecoder()

    def answer(data: bytes, signature: Signature) -> Any:
        request = decode(data)
        # A map has no order.
        inputs = sorted(request.inputs, key=lambda tensor: tensor.name)
        bound = checked(signature, InferenceRequest("m", inputs=inputs, lenient_shapes=True))
        return request.spec, inputs, list(request.output_filter), sorted(map(plain, request.unreadable)), bound

    for data in layouts(random, predict_message):
        yield Case(report(data), answer, data, random.choice(SIGNATURES))


def grps(random: Random) -> Iterator[Case]:
    def decode_message(data: Any) -> Request:
        message = grps_codec.decode_message(data)
        return Request(message.model, message)

    decode = RequestDecoder(decode_message)

    def answer(data: bytes) -> Any:
        request = decode(data)
        message = request.message if request.layout is None else request.layout.message(request.values)
        assert message is not None
        tensors = message.data if isinstance(message.data, list) else []
        inputs = [input_tensor(tensor, tensor.name) for tensor in tensors]
        # Maps have no order.
        encoded = None if isinstance(message.data, GrpsMap) else grps_codec.encode_message(message)
        return message, inputs, encoded, grps_codec.model_of(data)

    for data in layouts(random, grps_message):
        yield Case(report(data), answer, data)


def responses(random: Random) -> Iterator[Case]:
    """Responses of every protocol."""
    while True:
        outputs = any_outputs(random)
        parameters = {random.choice(TEXTS): any_parameter(random) for _ in range(random.choice((0, 0, 1)))}
        response = InferenceResponse(random.choice(("m", "é")), "3", random.choice(TEXTS), outputs, parameters)
        response.typed = random.random() < 0.2
        placed = outputs[:1] if random.random() < 0.1 else []
        response.placed = frozenset(output.name for output in placed)
        wanted = kserve_rest.RestInfer(InferenceRequest("m"), frozenset(), random.random() < 0.3)
        form = random.random() < 0.5
        signature = random.choice(SIGNATURES)
        cases: list[tuple[Any, ...]] = [
            (kserve_codec.encode_infer, response),
            (kserve_codec.encode_stream_infer, response),
            (kserve_codec.small_answer, response),
            (kserve_rest.encode_infer, response, wanted),
            (partial(tfserving_codec.encode_predict, as_content=form), response, "s"),
            (partial(rest_predict.encode_predict, named=random.random() < 0.3), outputs, form),
            (grps_answer, outputs),
            (bind_outputs, signature, {output.name: output.array for output in outputs}, (), "m"),
        ]
        which = random.randrange(len(cases))
        yield Case(json.dumps([which, plain(response)]), *cases[which])


def grps_answer(outputs: list[OutputTensor]) -> bytes:
    tensors = [tensor_of(output.name, output.datatype, output.array) for output in outputs]
    return grps_codec.encode_message(Message("m", tensors))


def v2_json(random: Random) -> Iterator[Case]:
    def answer(http: HttpRequest, signature: Signature) -> Any:
        read = kserve_rest.decode_infer(http)
        return read, checked(signature, read.request)

    while True:
        body = damaged(random, v2_body(random), 2)
        if random.random() < 0.1:
            body += b" " * 2048  # As a large one.
        headers = {}
        if random.random() < 0.2:
            headers = {kserve_rest.HEADER_LENGTH: str(len(body) - random.choice((0, 0, 1, -1)))}
            body += random.choice((b"", b"1234"))
        http = HttpRequest({"model": "m"}, headers, body)
        yield Case(report(body, json.dumps(headers)), answer, http, random.choice(SIGNATURES))


def predict_json(random: Random) -> Iterator[Case]:
    def answer(body: bytes, signature: Signature) -> Any:
        return rest_predict.decode_predict(body, lambda _: signature)

    while True:
        body = damaged(random, predict_body(random), 2)
        if random.random() < 0.1:
            body += b" " * 2048
        yield Case(report(body), answer, body, random.choice(SIGNATURES))


REQUEST_LINES = (
    b"GET /x HTTP/1.1\r\n",
    b"POST /v2/models/m/infer HTTP/1.1\r\n",
    b"POST /x HTTP/1.0\r\n",
    b"GET / HTTP/2.0\r\n",
)
FIELD_LINES = (
    b"Host: a\r\n",
    b"Content-Length: %d\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive\r\n",
    b"Upgrade: h2c\r\n",
    b"x-id: %d\r\n",
    b"x-id:  a\t\r\n",
    b"A: \xc3\xa9\r\n",
    b"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
    b"Expect: 100-continue\r\n",
)


def http1_request(random: Random) -> bytes:
    body = random.randbytes(random.choice((0, 3, 5, 40)))
    lines = [random.choice(REQUEST_LINES), b"Host: a\r\n"]
    more = random.choices(FIELD_LINES, k=random.choice((0, 1, 2, 4)))
    lines += [line % random.choice((0, 3, 5, len(body), 10**20)) if b"%d" in line else line for line in more]
    if body and random.random() < 0.5:
        return b"".join(lines) + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if random.random() < 0.4:
        trailer = random.choice((b"", b"", b"A: b\r\n"))
        chunks = (encode_chunk(body) if body else b"") + b"0\r\n" + trailer + b"\r\n"
        return b"".join(lines) + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    return b"".join(lines) + b"\r\n"


def cut(random: Random, data: bytes) -> list[bytes]:
    """The bytes as they may arrive."""
    if random.random() < 0.5:
        return [data]
    parts = []
    while data:
        size = random.choice((1, 2, 9, 17, 60, 1000))
        parts.append(data[:size])
        data = data[size:]
    return parts


def http1(random: Random) -> Iterator[Case]:
    known = HeadLayouts()

    def answer(parts: list[bytes], status: int, fields: list[tuple[str, str]]) -> Any:
        reader = RequestReader(known)
        events: list[Any] = []
        for part in parts:
            events += reader.receive(part)
            while reader.kept and reader.waits and not (events and isinstance(events[-1], Malformed)):
                events += reader.next_request()
        head = response_head(status, fields, "now", length=5, is_http10=False, keep_alive=status == 200)
        return events, reader.kept, reader.waits, head

    while True:
        data = b"".join(http1_request(random) for _ in range(random.choice((1, 1, 2, 3))))
        parts = cut(random, damaged(random, data, 2))
        status = random.choice((200, 204, 404, 799))
        fields = [
            (random.choice(("A", "content-length", "Connection", "é")), random.choice(TEXTS)) for _ in range(2)
        ]
        yield Case(report(parts), answer, parts, status, fields)


BLOCKS = (
    b"\x83\x86\x04\x04/a/b\x00\x0ccontent-type\x10application/grpc",
    b"\x83\x86\x04\x04/a/b\x00\x0ccontent-type\x10application/grpc",
    b"\x83\x86\x04\x04/a/b\x40\x0ccontent-type\x10application/grpc\x40\x04x-id\x03%03d",
    b"\x83\x86\x04\x04/a/b\xbe\xbf",
    b"\x83\x86\x44\x03/%02d\x00\x0ccontent-type\x10application/grpc\x00\x0cgrpc-timeout\x02%dS",
    b"\x83\x87\x04\x89\x61\x05\x74\xd4\x9f\x1d\x3a\x42\xe0\x00\x05x-bin\x04AAEC",
    b"\x83\x86\x04\x04/a/b\x00\x0bgrpc-encoding\x04gzip\x00\x0ccontent-type\x16application/grpc+proto",
    b"\x82\x86\x84\x41\x01a",
)
EARLY = frames.PREFACE + frames.head(0, frames.SETTINGS, 0, 0)


def framed(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return frames.head(len(payload), kind, flags, stream) + payload


def http2_frames(random: Random, at: int) -> bytes:
    """A frame, or those of one request; `at`: how many there were before."""
    stream = 2 * (at if random.random() < 0.9 else random.randint(0, 7)) + 1
    kind = random.randrange(10)
    if kind < 5:
        block = random.choice(BLOCKS)
        block = block.replace(b"%03d", b"%03d" % random.randint(0, 999)).replace(
            b"%02d", b"%02d" % random.randint(0, 99)
        )
        block = block.replace(b"%d", b"%d" % random.randint(0, 9))
        if random.random() < 0.2:
            block = damaged(random, block, 1)
        body = random.randbytes(random.choice((0, 1, 5, 30, 300)))
        message = b"\0" + len(body).to_bytes(4) + body
        if random.random() < 0.1:
            half = len(block) // 2
            heads = framed(frames.HEADERS, 0, stream, block[:half]) + framed(
                frames.CONTINUATION, 4, stream, block[half:]
            )
        else:
            heads = framed(frames.HEADERS, frames.END_HEADERS | random.choice((0, 0, 0, 1)), stream, block)
        if random.random() < 0.2:
            padding = random.randint(0, 9)
            return heads + framed(frames.DATA, 9, stream, bytes([padding]) + message + bytes(padding))
        return heads + framed(frames.DATA, random.choice((1, 1, 1, 0)), stream, message)
    payload = {
        5: b"\0\0" + random.randbytes(2),
        6: random.randbytes(8),
        7: b"\0" + random.choice((b"\4", b"\1", b"\5", b"\3")) + random.randbytes(4),
    }.get(kind, random.randbytes(random.choice((0, 4, 5, 8, 20))))
    known = {5: frames.WINDOW_UPDATE, 6: frames.PING, 7: frames.SETTINGS}
    number = random.choice((0, stream)) if kind == 5 else 0 if kind in known else stream
    flags = random.choice((0, 0, 1, 4, 8, 255)) if kind not in known or random.random() < 0.1 else 0
    return framed(known.get(kind, random.randrange(11)), flags, number, payload)


def http2(random: Random) -> Iterator[Case]:
    buffer = read_buffer()

    def answer(parts: list[bytes], used: Limits, actions: bytes) -> Any:
        connection = Connection(used, lambda: 0.0, buffer)
        seen: list[Any] = []
        for part in parts:
            for event in connection.feed(part):
                seen.append(described(event))
                act(connection, event, actions[len(seen) % len(actions)])
        open_streams = {number: stream.end_stream for number, stream in connection.streams.items()}
        return seen, b"".join(map(bytes, connection.out.take())), open_streams, connection.over

    limits = (
        Limits(),
        Limits(max_streams=2, stream_window=100, first_window=50, max_header_block=200, abuse_budget=9),
    )
    while True:
        data = b"".join(http2_frames(random, at) for at in range(random.choice((1, 2, 4, 8))))
        if random.random() < 0.3:
            data = damaged(random, data)
        parts = cut(random, (EARLY if random.random() < 0.97 else b"") + data)
        used = random.choice(limits)
        # What the server does with each event.
        actions = bytes(random.choices(range(8), k=16))
        yield Case(report(parts, actions.hex()), answer, parts, used, actions)


def described(event: Any) -> Any:
    """An event as plain values, since its data is valid until the next one."""
    if isinstance(event, RequestReceived | CompleteRequest):
        return plain((event, event.headers.read_metadata()))
    return plain(event)


def act(connection: Connection, event: Any, action: int) -> None:
    """Do something that a server may do after this event."""
    number = getattr(event, "stream", 0)
    if isinstance(event, DataReceived) and action:
        connection.consumed(number, sum(map(len, event.parts)))
    out = connection.out
    if action == 1:
        out.respond(number, sending.response_head(), [bytes(40)], 40, sending.OK_TRAILERS)
    elif action == 2:
        out.headers(number, sending.response_head())
        out.data(number, [bytes(300), memoryview(bytes(20))])
        out.trailers(number, sending.trailers(3, "é %", [("k-bin", b"\0\1"), ("k", "v")]))
    elif action == 3:
        connection.reset(number, frames.ErrorCode.CANCEL)
    elif action == 4:
        out.pause()
    elif action == 5:
        out.resume()
    elif action == 6:
        connection.drain()


TARGETS: dict[str, Target] = {
    "http2": http2,
    "http1": http1,
    "kserve": kserve,
    "tfserving": tfserving,
    "grps": grps,
    "responses": responses,
    "v2_json": v2_json,
    "predict_json": predict_json,
}


# --- one build ---


def cases(seed: int, block: int, names: list[str]) -> Iterator[Case]:
    """The cases of a block."""
    random = Random(f"{seed} {block}")
    made = TARGETS[names[block % len(names)]](random)
    for _ in range(BLOCK):
        yield next(made)


def answer_all(seed: int, names: list[str], first: int) -> None:
    """Print a line for each block, without end."""
    block = first
    while True:
        digest = hashlib.sha256()
        for case in cases(seed, block, names):
            digest.update(case.outcome().encode())
        print(digest.hexdigest(), flush=True)
        block += 1


def answer_one(seed: int, names: list[str], block: int) -> None:
    """Print each input of a block, and then its answer."""
    for case in cases(seed, block, names):
        print(case.text, flush=True)
        print(case.outcome(), flush=True)


# --- both ---


class Build:
    """A process that answers with one build."""

    def __init__(self, folder: str, arguments: list[str]) -> None:
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONHASHSEED": "0"}
        command = [sys.executable, __file__, *arguments]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """Return the next line; "" if the process has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def first_difference(folders: tuple[str, str], arguments: list[str]) -> str:
    """Return a text on the first input of a block with different answers; "" if there is none."""
    builds = [Build(folder, arguments) for folder in folders]
    try:
        for at in range(BLOCK):
            text, other_text = (build.line() for build in builds)
            if text != other_text:
                return f"input {at} itself differs:\n{text}\n{other_text}"
            answers = [build.line() for build in builds]
            if answers[0] != answers[1]:
                ends = [
                    None if answer else build.process.wait() for build, answer in zip(builds, answers, strict=True)
                ]
                pairs = enumerate(zip(*answers, strict=False))
                start = max(0, next((place for place, pair in pairs if len(set(pair)) > 1), 0) - 200)
                excerpts = [answer[start : start + 600] for answer in answers]
                return f"input {at}: {text}\nplain:    {excerpts[0]}\ncompiled: {excerpts[1]}\nexit codes: {ends}"
        return ""
    finally:
        for build in builds:
            build.close()


def compare(
    folders: tuple[str, str], seconds: float, seed: int, names: list[str]
) -> tuple[Counter[str], list[str]]:
    """Return how many inputs of each target were compared, and a text for each block that differs."""
    arguments = ["--seed", str(seed), "--only", *names]
    compared: Counter[str] = Counter()
    differences: list[str] = []
    until = time.monotonic() + seconds
    block = 0
    while time.monotonic() < until and len(differences) < 10:
        builds = [Build(folder, [*arguments, "--blocks-from", str(block)]) for folder in folders]
        try:
            while time.monotonic() < until:
                digests = [build.line() for build in builds]
                if digests[0] != digests[1] or not digests[0]:
                    break
                compared[names[block % len(names)]] += BLOCK
                block += 1
            else:
                break
        finally:
            for build in builds:
                build.close()
        found = first_difference(folders, [*arguments, "--block", str(block)])
        differences.append(
            f"{names[block % len(names)]}, seed {seed}, block {block}: {found or 'none the second time'}"
        )
        print(differences[-1], flush=True)
        block += 1
    return compared, differences


def main() -> None:
    """Compare two builds, or answer for one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--plain", default=str(Path(__file__).parents[1] / "server"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--block", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--blocks-from", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.block is not None:
        answer_one(arguments.seed, arguments.only, arguments.block)
    elif arguments.blocks_from is not None:
        answer_all(arguments.seed, arguments.only, arguments.blocks_from)
    else:
        for folder in (arguments.plain, arguments.folder):
            # Else the installed package would answer, which equals itself.
            if not folder or not Path(folder, "triglot").is_dir():
                parser.error(f"expected a folder with the package triglot, got {folder!r}")
        compared, differences = compare(
            (arguments.plain, arguments.folder), arguments.seconds, arguments.seed, arguments.only
        )
        print(f"{compared.total():,} inputs, {len(differences)} differences; {dict(compared)}")
        sys.exit(bool(differences))


if __name__ == "__main__":
    main()
