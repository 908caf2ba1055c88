"""Messages of KServe V2 and TensorFlow Serving as bytes: requests from numpy arrays, numpy arrays from responses.

Strategy: the few fields are written and read by their numbers. Generated classes would take the names that other
clients' classes have in protobuf's pool, and copy each tensor twice. Arrays of responses are views of the message.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

import numpy as np

from triglot.core.tensor import (
    DATATYPES,
    Array,
    array_over,
    byte_length,
    bytes_elements,
    datatype_of,
    object_array,
    raw_buffer,
    unpack_bytes,
)
from triglot.core.types import ParameterValue, RegionSlice
from triglot.core.varint import varint

if TYPE_CHECKING:
    from triglot.client.shared_memory import SharedMemory

Inputs = Mapping[str, Any]
"""Arrays by name, or what `numpy.asarray` takes: their dtypes are those that are sent."""
Parameters = Mapping[str, ParameterValue]
Targets = Mapping[str, Array]
"""Arrays of shared memory that outputs are written to, by the outputs' names."""
NO_TARGETS: Final[Targets] = MappingProxyType({})
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_U64: Final = 1 << 64


class Outputs(dict[str, Array]):
    """A response's arrays by name; BYTES are object arrays of `bytes`.

    `model_version`: the version that answered, "" if the server does not say. `request_id` and `parameters`: those
    of the response, of KServe V2.
    """

    model_version = ""
    request_id = ""

    def __init__(self, arrays: Iterable[tuple[str, Array]] = (), parameters: Parameters | None = None) -> None:
        super().__init__(arrays)
        self.parameters = parameters or {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """What a call asks for; its fields are the arguments of `Client.infer`.

    `inputs`: arrays by name. `version`: its number or label; 0 or "" for the one that the server chooses.
    `signature`: "" for the model's default. `outputs`: names; empty for all; a dict has for each name an array of
    shared memory that the output is written to, or None. `parameters`, `request_id`: KServe V2's. `timeout`, in
    seconds: in place of the client's. `headers`: beside the client's. `regions`: shared memory of the client.
    """

    model: str
    inputs: Inputs
    version: int | str = 0
    signature: str = ""
    outputs: Sequence[str] | Mapping[str, Array | None] = ()
    parameters: Parameters = field(default_factory=dict)
    request_id: str = ""
    timeout: float | None = None
    headers: Mapping[str, str] | None = None
    regions: Collection[SharedMemory] = ()

    def targets(self) -> Targets:
        """Return the arrays that outputs are written to."""
        if not isinstance(self.outputs, Mapping):
            return NO_TARGETS
        return {name: array for name, array in self.outputs.items() if array is not None}


# --- protobuf's encoding ---


def _field(number: int, value: bytes) -> bytes:
    return varint(number << 3 | _BYTES) + varint(len(value)) + value


def _text(number: int, value: str) -> bytes:
    return _field(number, value.encode()) if value else b""


def _number(number: int, value: int) -> bytes:
    return varint(number << 3 | _VARINT) + varint(value % _U64)


def _read_varint(data: memoryview, at: int) -> tuple[int, int]:
    value = data[at]
    if value < 0x80:
        return value, at + 1
    value, shift = value & 0x7F, 7
    while True:
        at += 1
        byte = data[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value % _U64, at + 1
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than ten bytes")


def _fields(data: memoryview) -> Iterator[tuple[int, Any]]:
    """Yield number and value of each field: an int of a varint, else a view. Raise `ValueError`."""
    at, size = 0, len(data)
    try:
        while at < size:
            # Most numbers have one byte; a call of a function for each would be half of the time.
            tag, at = data[at], at + 1
            if tag >= 0x80:
                tag, at = _read_varint(data, at - 1)
            kind = tag & 7
            if kind == _VARINT:
                value, at = _read_varint(data, at)
                yield tag >> 3, value
                continue
            if kind == _BYTES:
                length, at = data[at], at + 1
                if length >= 0x80:
                    length, at = _read_varint(data, at - 1)
            elif kind in (_FIXED64, _FIXED32):
                length = 8 if kind == _FIXED64 else 4
            else:
                raise ValueError(f"a field of unknown kind {kind}")
            if at + length > size:
                raise ValueError(f"{length} bytes expected, {size - at} left")
            yield tag >> 3, data[at : at + length]
            at += length
    except IndexError:
        raise ValueError("it ends within a number") from None


def _signed(value: int) -> int:
    return value - _U64 if value >= 1 << 63 else value


def _numbers(values: Iterable[Any]) -> list[int]:
    """Return the numbers of a repeated field, packed or not."""
    found: list[int] = []
    for value in values:
        if isinstance(value, int):
            found.append(value)
            continue
        at = 0
        while at < len(value):
            number, at = _read_varint(value, at)
            found.append(number)
    return found


# --- KServe V2 ---


def kserve_request(query: Query) -> bytes:
    """Return a ModelInferRequest with raw tensors, or places of shared memory.

    Raise `TypeError` for a dtype or parameter that V2 lacks, `ValueError` for a target outside of shared memory.
    """
    head = [_text(1, query.model), _text(2, str(query.version or "")), _text(3, query.request_id)]
    parameters = query.parameters
    if query.signature:
        parameters = {**parameters, "signature_name": query.signature}
    head += [_field(4, _entry(name, _parameter(name, value))) for name, value in parameters.items()]
    raw: list[Any] = []
    for name, value in query.inputs.items():
        array = np.asarray(value)
        shape = b"".join([varint(size) for size in array.shape])
        tensor = _text(1, name) + _text(2, datatype_of(array)) + (_field(3, shape) if shape else b"")
        if query.regions and (place := _place_of(array, query.regions)) is not None:
            head.append(_field(5, tensor + _place(4, place)))
            continue
        head.append(_field(5, tensor))
        buffer = raw_buffer(array)
        raw += varint(7 << 3 | _BYTES) + varint(byte_length(buffer)), buffer
    targets = query.targets()
    for name in query.outputs:
        output = _text(1, name)
        if name in targets:
            if (place := _place_of(targets[name], query.regions)) is None:
                raise ValueError(f"output {name!r}: expected a contiguous array of the client's shared memory")
            output += _place(2, place)
        head.append(_field(6, output))
    return b"".join(head + raw)


def _place_of(array: Array, regions: Iterable[SharedMemory]) -> RegionSlice | None:
    return next((place for region in regions if (place := region.slice_of(array)) is not None), None)


def _place(number: int, place: RegionSlice) -> bytes:
    """Return the parameters, in the field of this number, that say where a tensor is."""
    values = {
        "shared_memory_region": place.region,
        "shared_memory_byte_size": place.size,
        "shared_memory_offset": place.offset,
    }
    return b"".join([_field(number, _entry(key, _parameter(key, value))) for key, value in values.items()])


def _entry(key: str, value: bytes) -> bytes:
    return _text(1, key) + _field(2, value)


def _parameter(name: str, value: object) -> bytes:
    if isinstance(value, bool):
        return _number(1, value)
    if isinstance(value, int):
        if not -(1 << 63) <= value < 1 << 63:
            raise TypeError(f"parameter {name!r}: expected an int of 64 bits, got {value}")
        return _number(2, value)
    if isinstance(value, str):
        return _field(3, value.encode())
    if isinstance(value, float):
        return varint(4 << 3 | _FIXED64) + struct.pack("<d", value)
    raise TypeError(f"parameter {name!r}: expected bool, int, float or str, got {value!r}")


def kserve_outputs(message: bytes | memoryview, targets: Targets = NO_TARGETS) -> Outputs:
    """Return the arrays of a ModelInferResponse. Raise `ValueError` for a message that is none."""
    tensors: list[_Tensor] = []
    raw: list[memoryview] = []
    parameters: dict[str, ParameterValue] = {}
    version = request_id = ""
    for number, value in _fields(memoryview(message)):
        match number:
            case 2:
                version = str(value, "utf-8")
            case 3:
                request_id = str(value, "utf-8")
            case 4:
                key, entry = _split_entry(value)
                parameters[key] = _parameter_value(entry)
            case 5:
                tensors.append(_tensor(value))
            case 6:
                raw.append(value)
    if raw and len(raw) != len(tensors):
        raise ValueError(f"{len(tensors)} outputs, and raw contents of {len(raw)}")
    outputs = Outputs(parameters=parameters)
    for at, tensor in enumerate(tensors):
        sent = raw[at] if raw else tensor.contents
        if tensor.name in targets and not sent:
            outputs[tensor.name] = _view_of(targets[tensor.name], tensor)
        else:
            outputs[tensor.name] = _raw_array(tensor, sent) if raw else _typed_array(tensor)
    outputs.model_version, outputs.request_id = version, request_id
    return outputs


def kserve_stream_outputs(message: bytes) -> Outputs:
    """Return the arrays of a ModelStreamInferResponse. Raise `StreamError` with the text of an error."""
    response = memoryview(b"")
    for number, value in _fields(memoryview(message)):
        if number == 1:
            raise StreamError(str(value, "utf-8"))
        if number == 2:
            response = value
    return kserve_outputs(response)


class StreamError(Exception):
    """An error of one message of a stream, which has a text and no code."""


@dataclass(slots=True)
class _Tensor:
    name: str
    datatype: str
    shape: list[int]
    contents: memoryview

    def dtype(self) -> np.dtype[Any]:
        """Return the dtype of the datatype. Raise `ValueError` for a datatype that is not known."""
        if self.datatype not in DATATYPES:
            raise ValueError(f"output {self.name!r}: unknown datatype {self.datatype!r}")
        return DATATYPES[self.datatype].dtype


def _tensor(data: memoryview) -> _Tensor:
    tensor, dims = _Tensor("", "", [], memoryview(b"")), []
    for number, value in _fields(data):
        match number:
            case 1:
                tensor.name = str(value, "utf-8")
            case 2:
                tensor.datatype = str(value, "utf-8")
            case 3:
                dims.append(value)
            case 5:
                tensor.contents = value
    tensor.shape = _numbers(dims)
    return tensor


def _raw_array(tensor: _Tensor, data: memoryview) -> Array:
    dtype = tensor.dtype()
    count = _count(tensor.shape)
    if tensor.datatype == "BYTES":
        return object_array(unpack_bytes(data, count), tensor.shape)
    if count * dtype.itemsize != len(data):
        raise ValueError(
            f"output {tensor.name!r}: expected {count * dtype.itemsize} bytes for {tensor.datatype} "
            f"{tensor.shape}, got {len(data)}"
        )
    return array_over(data, dtype, tensor.shape)


def _view_of(target: Array, tensor: _Tensor) -> Array:
    """Return the output that was written to the target."""
    dtype = tensor.dtype()
    if dtype == target.dtype and tuple(tensor.shape) == target.shape:
        return target
    size = _count(tensor.shape) * dtype.itemsize
    if dtype.hasobject or size > target.nbytes:
        raise ValueError(f"output {tensor.name!r}: shared memory has no array of {tensor.datatype} {tensor.shape}")
    view: Array = target.reshape(-1).view(np.uint8)[:size].view(dtype).reshape(tensor.shape)
    return view


def _count(shape: Sequence[int]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count


_TYPED: Final[Mapping[int, tuple[Literal["varint", "f4", "f8"], bool]]] = {
    1: ("varint", False),
    2: ("varint", True),
    3: ("varint", True),
    4: ("varint", False),
    5: ("varint", False),
    6: ("f4", False),
    7: ("f8", False),
}
"""By field of InferTensorContents: how its elements are encoded, and whether they are signed."""


def _typed_array(tensor: _Tensor) -> Array:
    """Return the array of an output with typed contents, as some servers send it."""
    dtype, elements = tensor.dtype(), []
    found: dict[int, list[Any]] = {}
    for number, value in _fields(tensor.contents):
        if number == 8:
            elements.append(bytes(value))
        else:
            found.setdefault(number, []).append(value)
    if tensor.datatype == "BYTES":
        return object_array(elements, tensor.shape)
    values: list[Any] = []
    for number, given in found.items():
        encoding, signed = _TYPED[number]
        if encoding == "varint":
            values += map(_signed, _numbers(given)) if signed else _numbers(given)
        else:
            values += np.frombuffer(b"".join(given), f"<{encoding}").tolist()
    return np.array(values, dtype).reshape(tensor.shape)


def _split_entry(data: memoryview) -> tuple[str, memoryview]:
    key, entry = "", memoryview(b"")
    for number, value in _fields(data):
        if number == 1:
            key = str(value, "utf-8")
        elif number == 2:
            entry = value
    return key, entry


def _parameter_value(data: memoryview) -> ParameterValue:
    for number, value in _fields(data):
        match number:
            case 1:
                return bool(value)
            case 2:
                return _signed(value)
            case 3:
                return str(value, "utf-8")
            case 4:
                return float(struct.unpack("<d", value)[0])
            case 5:
                return int(value)
    return ""


def register_request(region: SharedMemory) -> bytes:
    """Return a SystemSharedMemoryRegisterRequest."""
    return _text(1, region.name) + _text(2, region.key) + _number(4, region.size)


def unregister_request(region: SharedMemory) -> bytes:
    """Return a SystemSharedMemoryUnregisterRequest."""
    return _text(1, region.name)


# --- TensorFlow Serving ---


@dataclass(frozen=True, slots=True)
class _DataType:
    """A row of TensorFlow's DataType: its number, V2's name, and the field of elements that are no raw bytes."""

    number: int
    name: str
    field: int
    read: Callable[[list[Any], np.dtype[Any]], Any]
    """Returns the elements of that field."""


def _integers(values: list[Any], dtype: np.dtype[Any]) -> Array:
    return np.array(_numbers(values), np.uint64).astype(dtype)


def _halves(values: list[Any], dtype: np.dtype[Any]) -> Array:
    return np.array(_numbers(values), np.uint16).view(dtype)


def _floats(values: list[Any], dtype: np.dtype[Any]) -> Array:
    return np.frombuffer(b"".join(values), dtype)


_TENSORFLOW: Final = (
    _DataType(1, "FP32", 5, _floats),
    _DataType(2, "FP64", 6, _floats),
    _DataType(3, "INT32", 7, _integers),
    _DataType(4, "UINT8", 7, _integers),
    _DataType(5, "INT16", 7, _integers),
    _DataType(6, "INT8", 7, _integers),
    _DataType(7, "BYTES", 8, lambda values, _: list(map(bytes, values))),
    _DataType(8, "COMPLEX64", 9, _floats),
    _DataType(9, "INT64", 10, _integers),
    _DataType(10, "BOOL", 11, _integers),
    _DataType(14, "BF16", 13, _halves),
    _DataType(17, "UINT16", 7, _integers),
    _DataType(18, "COMPLEX128", 12, _floats),
    _DataType(19, "FP16", 13, _halves),
    _DataType(22, "UINT32", 16, _integers),
    _DataType(23, "UINT64", 17, _integers),
)
_BY_NUMBER: Final = {row.number: row for row in _TENSORFLOW}
_BY_NAME: Final = {row.name: row for row in _TENSORFLOW}


def predict_request(query: Query) -> bytes:
    """Return a PredictRequest. Raise `TypeError` for a dtype that TensorFlow lacks, and for V2's own fields."""
    if query.parameters or query.request_id or query.targets():
        raise TypeError("parameters, request_id and shared memory are KServe V2's: TensorFlow Serving has none")
    if isinstance(query.version, str):
        version = _text(4, query.version)
    else:
        version = _field(2, _number(1, query.version)) if query.version else b""
    parts: list[Any] = [_field(1, _text(1, query.model) + version + _text(3, query.signature))]
    for name, value in query.inputs.items():
        array = np.asarray(value)
        datatype = datatype_of(array)
        if datatype not in _BY_NAME:
            raise TypeError(f"{name}: TensorFlow Serving has no datatype {datatype}")
        dims = b"".join([_field(2, _number(1, size)) for size in array.shape])
        head = _number(1, _BY_NAME[datatype].number) + _field(2, dims)
        if datatype == "BYTES":
            elements = bytes_elements(array.astype(object))
            content: list[Any] = [b"".join([_field(8, element) for element in elements])]
        else:
            buffer = raw_buffer(array)
            content = [varint(4 << 3 | _BYTES) + varint(byte_length(buffer)), buffer]
        size = len(head) + sum(map(byte_length, content))
        tensor = varint(2 << 3 | _BYTES) + varint(size) + head
        entry = _text(1, name) + tensor
        length = len(entry) + size - len(head)
        parts += varint(2 << 3 | _BYTES) + varint(length) + entry, *content
    parts += [_field(3, name.encode()) for name in query.outputs]
    return b"".join(parts)


def predict_outputs(message: bytes) -> Outputs:
    """Return the arrays of a PredictResponse. Raise `ValueError` for a message that is none."""
    arrays, version = [], ""
    for number, value in _fields(memoryview(message)):
        if number == 1:
            key, tensor = _split_entry(value)
            arrays.append((key, _tensorflow_array(key, tensor)))
        elif number == 2:
            version = _version(value)
    outputs = Outputs(arrays)
    outputs.model_version = version
    return outputs


def _version(spec: memoryview) -> str:
    for number, value in _fields(spec):
        if number == 2:
            for _, version in _fields(value):
                return str(version)
    return ""


def _tensorflow_array(name: str, data: memoryview) -> Array:
    dtype_number, shape, content = 0, [], None
    found: dict[int, list[Any]] = {}
    for number, value in _fields(data):
        if number == 1:
            dtype_number = value
        elif number == 2:
            shape = [_dim(dim) for field, dim in _fields(value) if field == 2]
        elif number == 4:
            content = value
        else:
            found.setdefault(number, []).append(value)
    if dtype_number not in _BY_NUMBER:
        raise ValueError(f"output {name!r}: TensorFlow's datatype {dtype_number} has no array")
    row = _BY_NUMBER[dtype_number]
    dtype, count = DATATYPES[row.name].dtype, _count(shape)
    if content is not None and len(content):
        if len(content) != count * dtype.itemsize:
            raise ValueError(f"output {name!r}: expected {count * dtype.itemsize} bytes, got {len(content)}")
        return array_over(content, dtype, shape)
    elements = row.read(found.get(row.field, []), dtype)
    if row.name == "BYTES":
        return object_array(elements, shape)
    if 0 < len(elements) < count:  # The last one fills the rest (tensor.proto).
        elements = np.concatenate([elements, np.repeat(elements[-1:], count - len(elements))])
    array: Array = elements.reshape(shape)
    return array


def _dim(data: memoryview) -> int:
    return next((_signed(value) for number, value in _fields(data) if number == 1), 0)


# --- health ---


def health_request(model: str) -> bytes:
    """Return a HealthCheckRequest of grpc.health.v1; "" for the server."""
    return _text(1, model)


def is_serving(message: bytes) -> bool:
    """Whether a HealthCheckResponse says SERVING."""
    return any(field == (1, 1) for field in _fields(memoryview(message)))
