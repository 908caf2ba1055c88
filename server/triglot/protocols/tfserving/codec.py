"""TensorFlow Serving's Predict: bytes ⇄ `PredictRequest` and outputs (tfs 2.1). Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

from triglot.core.errors import InvalidArgument
from triglot.core.scattering import may_scatter
from triglot.core.tensor import DATATYPES, MessageBytes, Scattered, element_count, raw_buffer
from triglot.core.types import InferenceResponse, InputTensor, OutputTensor
from triglot.pb.tfserving import model_pb2, predict_pb2
from triglot.protocols.layouts import LayoutDecoder, Make, Rules, Values, length_tag
from triglot.protocols.tfserving.tensor import (
    DOUBLE_VAL,
    FEW_FIELDS,
    FLOAT_VAL,
    JOINED,
    MAX_FILLED_BYTES,
    TENSOR_CONTENT,
    BadTensor,
    TensorValues,
    decode_tensor,
    element_bytes,
    encode_elements,
    memory_field,
    memory_head,
    read_tensor,
)
from triglot.protocols.wire import (
    LENGTH,
    VARINT,
    Limit,
    MessageRules,
    fields,
    length_prefix,
    limit_error,
    parse,
    scan,
    serialize,
)

SCAN_FROM_BYTES: Final = 32 * 1024
"""Below this size protobuf is quicker than cutting."""
ELEMENT_WORK: Final = 16
"""Cost of encoding a single element, in bytes of text."""
MAX_INPUTS: Final = Limit("inputs", 1024)
MAX_FILTER: Final = Limit("names in output_filter", 1024)
_INPUTS: Final = 2
_OUTPUT_FILTER: Final = 3
_KEY: Final = 1
_VALUE: Final = 2
_OUTPUTS: Final = 1
_RULES: Final = MessageRules(cut=frozenset({_INPUTS}), repeats={_INPUTS: MAX_INPUTS, _OUTPUT_FILTER: MAX_FILTER})
_ENTRY_RULES: Final = MessageRules(cut=frozenset({_KEY, _VALUE}))
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """The model that a call is for: a `version`, a version's `label`, or the latest version that is available."""

    name: str
    version: int | None = None
    label: str | None = None
    signature_name: str = ""


class PredictRequest:
    """A Predict call. `spec` is None if it has none; `unreadable` has the errors of invalid inputs, by name."""

    __slots__ = ("inputs", "output_filter", "servable", "spec", "unreadable")

    def __init__(
        self,
        spec: ModelSpec | None,
        inputs: list[InputTensor] | None = None,
        output_filter: Sequence[str] = (),
        unreadable: dict[str, str] | None = None,
    ) -> None:
        self.spec = spec
        self.inputs = [] if inputs is None else inputs
        self.output_filter = output_filter
        self.unreadable = {} if unreadable is None else unreadable
        self.servable: object = None
        """The version that was called, once it is known."""


def decode_spec(message: Any) -> ModelSpec | None:
    """Return the `model_spec` of a request, None if it has none."""
    if not message.HasField("model_spec"):
        return None
    return read_spec(message.model_spec)


def read_spec(spec: model_pb2.ModelSpec) -> ModelSpec:
    """Return the values of a ModelSpec message."""
    version = spec.version.value if spec.HasField("version") else None
    label = spec.version_label if spec.HasField("version_label") else None
    return ModelSpec(spec.name, version, label, spec.signature_name)


def decode_predict(data: MessageBytes) -> PredictRequest:
    """Return the request of a serialized PredictRequest; large tensors are views of `data`.

    Raise `InvalidArgument`, but not for a tensor that cannot be read: an error about the model comes first.
    """
    if len(data) < SCAN_FROM_BYTES:
        message = parse(predict_pb2.PredictRequest, data)
        for count, limit in ((len(message.inputs), MAX_INPUTS), (len(message.output_filter), MAX_FILTER)):
            if count > limit.count:
                raise limit_error(limit)
        request = _request(message)
        _add_inputs(request, list(message.inputs.items()), read_tensor)
        return request
    rest, entries = scan(data, _RULES)
    request = _request(parse(predict_pb2.PredictRequest, rest))
    _add_inputs(request, [named for _, entry in entries if (named := _entry(entry))], decode_tensor)
    return request


def _request(message: predict_pb2.PredictRequest) -> PredictRequest:
    return PredictRequest(decode_spec(message), output_filter=list(message.output_filter))


def _entry(entry: memoryview) -> tuple[str, bytes | memoryview] | None:
    """Return the name and the serialized TensorProto of a map entry.

    None for one with other fields: protobuf treats it as an unknown field.
    """
    rest, parts = scan(entry, _ENTRY_RULES, FEW_FIELDS)
    values = [payload for number, payload in parts if number == _VALUE]
    try:
        names = [bytes(payload).decode() for number, payload in parts if number == _KEY]
    except UnicodeDecodeError:
        raise InvalidArgument(
            "the request is not a valid protobuf message: an input's name is not UTF-8"
        ) from None
    if len(values) > 1 or rest:
        # Each part has to be valid on its own, not only all merged, even in an entry that is dropped.
        for value in values:
            parse(TensorValues, bytes(value))
    return None if rest else (names[-1] if names else "", values[0] if len(values) == 1 else b"".join(values))


def _add_inputs(
    request: PredictRequest, tensors: Sequence[tuple[str, T]], read: Callable[[str, T, int], InputTensor]
) -> None:
    most_filled = MAX_FILLED_BYTES // max(1, len(tensors))
    inputs: dict[str, InputTensor] = {}
    for name, tensor in tensors:
        # Of a repeated name, protobuf keeps the last entry.
        inputs.pop(name, None)
        request.unreadable.pop(name, None)
        try:
            inputs[name] = read(name, tensor, most_filled)
        except BadTensor as error:
            request.unreadable[name] = error.message
    request.inputs.extend(inputs.values())


def decoding_size(data: MessageBytes) -> int:
    """Estimates what `decode_predict` reads one by one of a large message, in bytes. Raise `InvalidArgument`."""
    rest, entries = scan(data, _RULES)
    named = [_entry(entry) for _, entry in entries]
    return len(rest) + sum([element_bytes(tensor[1]) for tensor in named if tensor is not None])


_DTYPE: Final = 1
_SHAPE: Final = 2
_VALUES: Final = {TENSOR_CONTENT: "", FLOAT_VAL: "FP32", DOUBLE_VAL: "FP64"}
"""Fields whose bytes are the array's memory, with the datatype that each is for; "" is any."""


_CUT: Final[Rules] = {length_tag(_INPUTS): {length_tag(_VALUE): {length_tag(number): None for number in _VALUES}}}


class PredictDecoder(LayoutDecoder[PredictRequest]):
    """`decode_predict` that parses the layout of small messages once."""

    def __init__(self) -> None:
        super().__init__(decode_predict, _CUT, _learn, SCAN_FROM_BYTES)


def _learn(data: bytes, request: PredictRequest) -> Make[PredictRequest] | None:
    """Return a builder if each input has all of its bytes in one piece."""
    if request.unreadable or not request.inputs:
        return None
    by_name = {tensor.name: tensor for tensor in request.inputs}
    tensors: list[InputTensor] = []
    for number, wire_type, start, end in fields(data):
        if number == _INPUTS and wire_type == LENGTH:
            tensor = _plain_tensor(data, start, end, by_name)
            if tensor is None:
                return None
            tensors.append(tensor)
    if len({tensor.name for tensor in tensors}) != len(request.inputs) or len(tensors) != len(request.inputs):
        return None
    spec, output_filter = request.spec, tuple(request.output_filter)
    inputs = [(tensor.name, tensor.datatype, tensor.shape) for tensor in tensors]

    def make(values: Values) -> PredictRequest:
        tensors = [
            InputTensor(name, datatype, shape, value)
            for (name, datatype, shape), value in zip(inputs, values, strict=True)
        ]
        return PredictRequest(spec, tensors, output_filter)

    return make


def _plain_tensor(data: bytes, start: int, end: int, by_name: Mapping[str, InputTensor]) -> InputTensor | None:
    """Return the input of a map entry; None unless its data is one piece, in which any bytes are valid."""
    entry = {(number, kind): slice(first, last) for number, kind, first, last in fields(data, start, end)}
    if len(list(fields(data, start, end))) != 2 or entry.keys() != {(_KEY, LENGTH), (_VALUE, LENGTH)}:
        return None
    key = entry[_KEY, LENGTH]
    tensor = by_name[data[key.start : key.stop].decode()]
    value = entry[_VALUE, LENGTH]
    parts = [(number, kind, to - at) for number, kind, at, to in fields(data, value.start, value.stop)]
    values = [(number, size) for number, kind, size in parts if kind == LENGTH and number in _VALUES]
    others = sorted((number, kind) for number, kind, _ in parts if not (kind == LENGTH and number in _VALUES))
    if len(values) != 1 or others not in ([(_DTYPE, VARINT)], [(_DTYPE, VARINT), (_SHAPE, LENGTH)]):
        return None
    number, size = values[0]
    if not size or size != _byte_size(tensor) or _VALUES[number] not in ("", tensor.datatype):
        return None
    return tensor


def _byte_size(tensor: InputTensor) -> int:
    """Return a tensor's size in bytes; 0 for a datatype in which not all bytes are valid."""
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None or tensor.datatype == "BOOL":
        return 0
    return element_count(tensor.shape) * datatype.itemsize


def encode_predict(response: InferenceResponse, signature_name: str, *, as_content: bool = False) -> bytes:
    """Return a serialized PredictResponse, copied once from the arrays' memory where the field has that form."""
    return b"".join(_pieces(response, signature_name, as_content))


def encode_predict_request(
    spec: model_pb2.ModelSpec, inputs: Sequence[OutputTensor], output_filter: Sequence[str]
) -> bytes:
    """Return a serialized PredictRequest, with tensors as `tensor_content` where possible."""
    pieces = [serialize(predict_pb2.PredictRequest(model_spec=spec, output_filter=output_filter))]
    for tensor in inputs:
        pieces += _tensor_pieces(tensor, _INPUTS, as_content=True)
    return b"".join(pieces)


def scatter_predict(
    response: InferenceResponse, signature_name: str, *, as_content: bool = False
) -> bytes | Scattered:
    """Return what `encode_predict` does, but with large arrays sent in place."""
    scatters = may_scatter(response)
    pieces = _pieces(response, signature_name, as_content)
    return Scattered(pieces) if scatters else b"".join(pieces)


def _pieces(response: InferenceResponse, signature_name: str, as_content: bool) -> list[Any]:
    pieces: list[Any] = []
    for output in response.outputs:
        pieces += _tensor_pieces(output, _OUTPUTS, as_content=as_content)
    pieces.append(_encoded_spec(response.model_name, int(response.model_version), signature_name))
    return pieces


def _tensor_pieces(tensor: OutputTensor, entry: int, *, as_content: bool) -> list[Any]:
    """Return the pieces of an entry of the map field `entry`."""
    array, datatype = tensor.array, tensor.datatype
    field = memory_field(datatype, as_content=as_content)
    if field is None:
        encoded = encode_elements(array, datatype)
        return [_entry_head(entry, tensor.name, len(encoded)), encoded]
    return [_memory_entry_head(entry, tensor.name, datatype, array.shape, field), raw_buffer(array)]


@lru_cache(maxsize=1024)
def _memory_entry_head(entry: int, name: str, datatype: str, shape: tuple[int, ...], field: int) -> bytes:
    head = memory_head(datatype, shape, field)
    size = len(head) + element_count(shape) * DATATYPES[datatype].itemsize
    return _entry_head(entry, name, size) + head


def _entry_head(entry: int, name: str, size: int) -> bytes:
    """Return the bytes before a TensorProto of `size` bytes in a map field."""
    encoded = name.encode()
    key = length_prefix(_KEY, len(encoded)) + encoded
    value = length_prefix(_VALUE, size)
    return length_prefix(entry, len(key) + len(value) + size) + key + value


@lru_cache(maxsize=256)
def _encoded_spec(name: str, version: int, signature_name: str) -> bytes:
    return serialize(predict_pb2.PredictResponse(model_spec=spec_message(name, version, signature_name)))


def spec_message(name: str, version: int, signature_name: str = "") -> model_pb2.ModelSpec:
    """Return the ModelSpec of replies: the version that answered, never its label."""
    return model_pb2.ModelSpec(name=name, version={"value": version}, signature_name=signature_name)


def encoding_size(response: InferenceResponse) -> int:
    """Estimates what `encode_predict` processes element by element, in bytes of text."""
    size = 0
    for output in response.outputs:
        if output.datatype not in JOINED:
            size += output.array.size * ELEMENT_WORK
    return size
