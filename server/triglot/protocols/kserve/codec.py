"""KServe V2 messages: bytes ⇄ `InferenceRequest`/`InferenceResponse` (spec 1.2, 2.1–2.6). Pure functions.

Strategy: of a ModelInferRequest, only the id, the parameters and the raw tensors differ from call to call. These
are cut out by `InferDecoder`; the rest is the key of the layout, which is parsed once. See `protocols.layouts`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import numpy as np

from triglot.core.errors import InvalidArgument, QueueFull, ServingError
from triglot.core.scattering import may_scatter
from triglot.core.tensor import (
    DATATYPES,
    SMALL_BYTES,
    Array,
    Buffer,
    MessageBytes,
    Scattered,
    byte_length,
    bytes_elements,
    element_count,
    object_array,
    raw_buffer,
)
from triglot.core.types import (
    InferenceRequest,
    InferenceResponse,
    InputTensor,
    OutputOptions,
    ParameterValue,
    RegionSlice,
    TensorOptions,
    TensorParameters,
)
from triglot.model.validation import InvalidRequest
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.parameters import (
    REGION,
    model_parameters_of,
    output_options_of,
    region_of,
    set_parameters,
)
from triglot.protocols.layouts import Layouts, length_tag, long_length
from triglot.protocols.wire import (
    LENGTH,
    MAX_FIELDS,
    Limit,
    MessageRules,
    length_prefix,
    limit_error,
    parse,
    scan,
    serialize,
)

SCAN_FROM_BYTES: Final = 32 * 1024
"""Below this size protobuf is quicker than cutting; what it can be made to allocate is forty times as much."""

BYTES_WORK: Final = 16
"""Cost of an element of a BYTES tensor, in bytes of text."""
MAX_INPUTS: Final = Limit("inputs", 1024)
MAX_OUTPUTS: Final = Limit("requested outputs", 1024)
MAX_RAW: Final = Limit("raw_input_contents", 1024)
MAX_DIMS: Final = Limit("dims in a shape", 16)
MAX_PARAMETERS: Final = Limit("parameters", 256)
_SHAPE: Final = 3
_TENSOR_PARAMETERS: Final = 4
_OUTPUT_PARAMETERS: Final = 2
ID: Final = 3
REQUEST_PARAMETERS: Final = 4
RAW_INPUTS: Final = 7
_INPUTS: Final = 5
_OUTPUTS: Final = 6
_RAW_OUTPUTS: Final = 6
_INFER_RESPONSE: Final = 2
FINAL: Final = "triton_final_response"
Layout = tuple[tuple[str, str, tuple[int, ...], tuple[tuple[str, ParameterValue], ...]], ...]
"""Names, datatypes, shapes and parameters of outputs."""


@dataclass(frozen=True, slots=True)
class StreamError:
    """An error to send in band, with the request that failed, as far as it could be decoded."""

    request: InferenceRequest
    error: ServingError


_INFER_RULES: Final = MessageRules(
    cut=frozenset({RAW_INPUTS}),
    repeats={
        REQUEST_PARAMETERS: MAX_PARAMETERS,
        _INPUTS: MAX_INPUTS,
        _OUTPUTS: MAX_OUTPUTS,
        RAW_INPUTS: MAX_RAW,
    },
    nested={
        _INPUTS: MessageRules(repeats={_TENSOR_PARAMETERS: MAX_PARAMETERS}, varints={_SHAPE: MAX_DIMS}),
        _OUTPUTS: MessageRules(repeats={_OUTPUT_PARAMETERS: MAX_PARAMETERS}),
    },
)

_CONTENTS_FIELD: Final = {
    "BOOL": "bool_contents",
    "INT8": "int_contents",
    "INT16": "int_contents",
    "INT32": "int_contents",
    "INT64": "int64_contents",
    "UINT8": "uint_contents",
    "UINT16": "uint_contents",
    "UINT32": "uint_contents",
    "UINT64": "uint64_contents",
    "FP32": "fp32_contents",
    "FP64": "fp64_contents",
    "BYTES": "bytes_contents",
}
_DATATYPE_OF_CONTENTS: Final = {
    "bool_contents": "BOOL",
    "int_contents": "INT32",
    "int64_contents": "INT64",
    "uint_contents": "UINT32",
    "uint64_contents": "UINT64",
    "fp32_contents": "FP32",
    "fp64_contents": "FP64",
    "bytes_contents": "BYTES",
}


def decode_infer(data: MessageBytes) -> InferenceRequest:
    """Return the request of a serialized ModelInferRequest; raw tensors of a large one are views of `data`.

    Raise `InvalidArgument`.
    """
    raw: Sequence[Buffer]
    if len(data) < SCAN_FROM_BYTES:
        message = parse(pb.ModelInferRequest, data)
        _check_counts(message)
        raw = message.raw_input_contents
    else:
        rest, cuts = scan(data, _INFER_RULES)
        raw = [payload for _, payload in cuts]
        message = parse(pb.ModelInferRequest, rest)
    return _request_of(message, raw)


def identify(data: MessageBytes) -> InferenceRequest:
    """Return model and id, as far as they can be decoded, of a request that `decode_infer` rejects."""
    try:
        message = parse(pb.ModelInferRequest, data if len(data) < SCAN_FROM_BYTES else scan(data, _INFER_RULES)[0])
    except InvalidArgument:
        return InferenceRequest("")
    return InferenceRequest(message.model_name, message.model_version, message.id)


def _check_counts(message: pb.ModelInferRequest) -> None:
    """Enforce the limits of `_INFER_RULES` on a message that was small enough to parse first."""
    counts = [
        (len(message.inputs), MAX_INPUTS),
        (len(message.outputs), MAX_OUTPUTS),
        (len(message.raw_input_contents), MAX_RAW),
        (len(message.parameters), MAX_PARAMETERS),
    ]
    counts += [(len(tensor.shape), MAX_DIMS) for tensor in message.inputs]
    counts += [(len(tensor.parameters), MAX_PARAMETERS) for tensor in message.inputs]
    counts += [(len(output.parameters), MAX_PARAMETERS) for output in message.outputs]
    for count, limit in counts:
        if count > limit.count:
            raise limit_error(limit)


def _request_of(message: pb.ModelInferRequest, raw: Sequence[Buffer]) -> InferenceRequest:
    request = InferenceRequest(message.model_name, message.model_version, message.id)
    if message.parameters:
        set_parameters(request, decode_parameters(message.parameters))
    next_raw = 0
    regions: dict[int, RegionSlice] = {}
    for tensor in message.inputs:
        data: Buffer | Array
        if tensor.parameters and REGION in tensor.parameters:
            regions[len(request.inputs)] = _decode_region(tensor, message.model_name)
            data = b""
        elif tensor.HasField("contents") and not (raw and _is_empty(tensor.contents)):
            if raw:
                raise InvalidArgument(
                    "contents field must not be specified when using raw_input_contents for "
                    f"'{tensor.name}' for model '{message.model_name}'"
                )
            data = _decode_contents(tensor, message.model_name)
        elif next_raw < len(raw):
            data = raw[next_raw]
            next_raw += 1
        else:
            raise InvalidArgument(
                f"unable to find data for input tensor '{tensor.name}' for model '{message.model_name}' "
                "in request."
            )
        request.inputs.append(InputTensor(tensor.name, tensor.datatype, _shape_of(tensor, data), data))
    request.input_parameters = _own_parameters(message.inputs)
    if next_raw < len(raw):
        raise InvalidArgument(
            f"the request has {len(raw)} raw_input_contents for {next_raw} inputs that take one, "
            f"for model '{message.model_name}'"
        )
    output_options: dict[str, OutputOptions] = {}
    if message.outputs:
        request.outputs = [output.name for output in message.outputs]
        for output in message.outputs:
            if output.parameters and (options := _decode_output_options(output)) is not None:
                output_options[output.name] = options
        request.output_parameters = _own_parameters(message.outputs)
    if regions or output_options:
        request.options = TensorOptions(regions, output_options)
    return request


def _shape_of(tensor: pb.ModelInferRequest.InferInputTensor, data: Buffer | Array) -> tuple[int, ...]:
    shape = tuple(tensor.shape)
    if tensor.datatype == "BYTES" and isinstance(data, np.ndarray) and data.size == 1:
        return shape_of_text(shape, data.item())
    return shape


def shape_of_text(shape: tuple[int, ...], text: bytes) -> tuple[int, ...]:
    """Return the shape of one BYTES element; MLServer's users give [n] for one of n bytes or characters."""
    counts_text = len(shape) == 1 and shape[0] in (len(text), len(text.decode(errors="replace")))
    return (1,) if counts_text else shape


def _is_empty(contents: pb.InferTensorContents) -> bool:
    """Whether the message holds no elements: MLServer's client writes such a one beside raw tensors."""
    return not contents.ListFields()


def _decode_region(tensor: pb.ModelInferRequest.InferInputTensor, model: str) -> RegionSlice:
    if not _is_empty(tensor.contents):
        raise InvalidArgument(
            "contents field must not be specified when using shared memory for "
            f"'{tensor.name}' for model '{model}'"
        )
    region = region_of(_values(tensor.parameters), f"input '{tensor.name}'")
    assert region is not None  # The caller found its key.
    return region


def _decode_output_options(output: pb.ModelInferRequest.InferRequestedOutputTensor) -> OutputOptions | None:
    return output_options_of(_values(output.parameters), f"output '{output.name}'", least=1)


def _own_parameters(
    tensors: Iterable[pb.ModelInferRequest.InferInputTensor | pb.ModelInferRequest.InferRequestedOutputTensor],
) -> TensorParameters | None:
    by_tensor = (
        (tensor.name, model_parameters_of(_values(tensor.parameters))) for tensor in tensors if tensor.parameters
    )
    return {name: own for name, own in by_tensor if own} or None


def _values(parameters: Mapping[str, pb.InferParameter]) -> dict[str, ParameterValue]:
    """Return a tensor's parameters; one without a value is ""."""
    choices = ((key, parameter, parameter.WhichOneof("parameter_choice")) for key, parameter in parameters.items())
    return {key: getattr(parameter, choice) if choice else "" for key, parameter, choice in choices}


def decode_parameters(parameters: Mapping[str, pb.InferParameter]) -> dict[str, ParameterValue]:
    """Return a request's parameters. Raise `InvalidArgument` for one without a value."""
    values: dict[str, ParameterValue] = {}
    for key, parameter in parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None or (choice == "uint64_param" and key != "priority"):
            raise InvalidArgument(
                f"parameter '{key}': expected bool_param, int64_param, string_param or double_param, "
                f"got {choice or 'no value'}"
            )
        values[key] = getattr(parameter, choice)
    return values


def _decode_contents(tensor: pb.ModelInferRequest.InferInputTensor, model: str) -> Array:
    """Return the elements of typed contents as a flat array, checked against the datatype's range."""
    datatype = DATATYPES.get(tensor.datatype)
    wanted = _CONTENTS_FIELD.get(tensor.datatype)
    contents = tensor.contents
    for filled, _ in contents.ListFields():
        if filled.name != wanted:
            raise InvalidArgument(
                f"unexpected explicit tensor data for input tensor '{tensor.name}' for model '{model}' of type "
                f"'{_DATATYPE_OF_CONTENTS.get(filled.name, filled.name)}', expected datatype '{tensor.datatype}'"
            )
    if datatype is None or wanted is None:
        # No typed field exists for the datatype: valid only if the shape has no elements.
        return np.empty(0, np.uint8 if datatype is None else datatype.dtype)
    elements = getattr(contents, wanted)
    if wanted == "bytes_contents":
        return object_array(list(elements), (len(elements),))
    field_dtype = DATATYPES[_DATATYPE_OF_CONTENTS[wanted]].dtype
    array: Array = np.array(elements, dtype=field_dtype)
    if datatype.dtype != field_dtype:
        bounds = np.iinfo(datatype.dtype)
        if array.size and (array.min() < bounds.min or array.max() > bounds.max):
            raise InvalidArgument(
                f"{wanted} of input tensor '{tensor.name}' for model '{model}' hold a value outside "
                f"{tensor.datatype}'s range [{bounds.min}, {bounds.max}]"
            )
        array = array.astype(datatype.dtype)
    return array


# --- requests with a known layout ---

VIEW_FROM_BYTES: Final = 16 * 1024
"""Tensors of larger messages are views of the message; in smaller ones, copies are quicker."""
_ID, _PARAMETERS, _RAW, _INPUT = map(length_tag, (ID, REQUEST_PARAMETERS, RAW_INPUTS, _INPUTS))
_CONTENTS: Final = length_tag(5)
_FLOATS: Final = (length_tag(6), length_tag(7))
"""`fp32_contents` and `fp64_contents`: packed, they are the tensor's bytes."""
LONG_INPUT: Final = 64
"""A longer input is looked through for such contents; a raw tensor's has a name, a datatype and a shape."""
_Bytes = bytes | memoryview
IN_REGION, IS_RAW, IN_CONTENTS = range(3)
"""Where the data of an input is."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """What requests of a layout share. `inputs`: name, datatype, shape, and where the data is.

    `cut_count`: how many tensors `_cut` returns; `all_raw`: each input has one, and it is raw.
    """

    model_name: str
    model_version: str
    inputs: Sequence[tuple[str, str, tuple[int, ...], int]]
    outputs: Sequence[str]
    options: TensorOptions | None
    output_parameters: TensorParameters | None
    cut_count: int
    all_raw: bool


class InferDecoder:
    """`codec.decode_infer` that parses each layout once. On the event loop."""

    def __init__(self) -> None:
        self._layouts: Layouts[_Layout] = Layouts()

    def __call__(self, data: MessageBytes) -> InferenceRequest:
        """Return the request of a serialized ModelInferRequest. Raise `InvalidArgument`."""
        try:
            key, request_id, parameters, tensors = _cut(data)
        except (IndexError, ValueError):
            return decode_infer(data)  # It raises a precise error if the message is invalid.
        layout = self._layouts.known.get(key)
        if layout is None:
            request = decode_infer(data)
            if (layout := _layout_of(request, len(tensors))) is not None:
                self._layouts.put(key, layout)
            return request
        if len(tensors) != layout.cut_count or sum(map(len, parameters)) > SCAN_FROM_BYTES:
            return decode_infer(data)
        if layout.all_raw:
            inputs = [
                InputTensor(name, datatype, shape, tensor)
                for (name, datatype, shape, _), tensor in zip(layout.inputs, tensors, strict=True)
            ]
        else:
            inputs = _inputs_of(layout, iter(tensors))
        request = InferenceRequest(
            layout.model_name,
            layout.model_version,
            request_id,
            inputs,
            layout.outputs,
            options=layout.options,
            output_parameters=layout.output_parameters,
        )
        if parameters:
            message = parse(pb.ModelInferRequest, b"".join(parameters))
            if len(message.parameters) > MAX_PARAMETERS.count:
                raise limit_error(MAX_PARAMETERS)
            set_parameters(request, decode_parameters(message.parameters))
        return request


def _inputs_of(layout: _Layout, tensors: Iterator[_Bytes]) -> list[InputTensor]:
    """Return a request's inputs, for which `tensors` has what `_cut` returned."""
    inputs = []
    for name, datatype, shape, where in layout.inputs:
        tensor: Buffer | Array = b"" if where == IN_REGION else next(tensors)
        if where == IN_CONTENTS:
            tensor = np.frombuffer(tensor, DATATYPES[datatype].dtype)
        inputs.append(InputTensor(name, datatype, shape, tensor))
    return inputs


def _cut(data: MessageBytes) -> tuple[bytes, str, list[_Bytes], list[_Bytes]]:
    """Return the layout's key, the id, the fields that hold parameters, and the tensors: raw, or packed floats.

    Raise `IndexError` or `ValueError` for an unusual or damaged message.
    """
    end = len(data)
    buffer = data if end < VIEW_FROM_BYTES else memoryview(data)
    request_id = ""
    kept: list[_Bytes] = []
    parameters: list[_Bytes] = []
    tensors: list[_Bytes] = []
    at = since = 0
    for _ in range(MAX_FIELDS):
        if at == end:
            break
        tag, size, start = data[at], data[at + 1], at + 2
        if tag & 0x87 != LENGTH:
            raise ValueError("a field of another kind")
        if size > 0x7F:
            size, start = long_length(data, at + 1)
        after = start + size
        if after > end:
            raise ValueError("a field extends beyond the end")
        if tag == _RAW:
            tensors.append(buffer[start:after])
        elif tag == _ID:
            request_id = str(buffer[start:after], "utf-8")
        elif tag == _PARAMETERS:
            parameters.append(buffer[at:after])
        elif tag == _INPUT and size > LONG_INPUT and (floats := _floats_at(data, start, after)):
            tensors.append(buffer[floats:after])
            at = floats
        else:
            at = after
            continue
        kept.append(buffer[since:at])
        at = since = after
    if at != end or len(tensors) > MAX_RAW.count:
        raise ValueError("too many fields")
    kept.append(buffer[since:])
    return b"".join(kept), request_id, parameters, tensors


def _floats_at(data: MessageBytes, at: int, end: int) -> int:
    """Return where the packed floats begin that end the message of an input; 0 if it ends otherwise.

    Raise `IndexError` or `ValueError` for some damaged messages.
    """
    while at < end:
        tag, size, start = data[at], data[at + 1], at + 2
        if size > 0x7F:
            size, start = long_length(data, at + 1)
        if tag & 0x87 != LENGTH:
            break
        if tag == _CONTENTS:
            if size < 3 or start + size != end:
                break
            tag, size, floats = data[start], data[start + 1], start + 2
            if size > 0x7F:
                size, floats = long_length(data, start + 1)
            return floats if tag in _FLOATS and size and floats + size == end else 0
        at = start + size
    return 0


def _layout_of(request: InferenceRequest, cut_count: int) -> _Layout | None:
    """Return the layout, None if it cannot be cached: data that is not cut, or parameters of single inputs."""
    in_regions = {} if request.options is None else request.options.inputs
    if request.input_parameters is not None or len(request.inputs) - len(in_regions) != cut_count:
        return None
    inputs = []
    for at, tensor in enumerate(request.inputs):
        where = IN_REGION if at in in_regions else IN_CONTENTS if isinstance(tensor.data, np.ndarray) else IS_RAW
        inputs.append((tensor.name, tensor.datatype, tensor.shape, where))
    return _Layout(
        request.model_name,
        request.model_version,
        inputs,
        tuple(request.outputs),
        request.options,
        request.output_parameters,
        cut_count,
        all(where == IS_RAW for *_, where in inputs),
    )


# --- responses ---


def encode_infer(response: InferenceResponse) -> bytes:
    """Return a serialized ModelInferResponse: all outputs are raw (spec 0.1), copied once from the arrays.

    In a `typed` response all outputs are `contents`, unless a datatype has no field there.
    """
    return small_answer(response) or b"".join(infer_pieces(response))


def scatter_infer(response: InferenceResponse) -> bytes | Scattered:
    """Return what `encode_infer` does, but with large arrays sent in place."""
    if (small := small_answer(response)) is not None:
        return small
    return Scattered(infer_pieces(response)) if may_scatter(response) else encode_infer(response)


def packing_size(response: InferenceResponse | StreamError) -> int:
    """Estimates what `encode_infer` packs element by element, in bytes of text."""
    if isinstance(response, StreamError):
        return 0
    size = 0
    for output in response.outputs:
        if (response.typed or output.datatype == "BYTES") and output.name not in response.placed:
            size += output.array.size * BYTES_WORK
    return size


def encode_stream_infer(answer: InferenceResponse | StreamError) -> bytes:
    """Return a serialized ModelStreamInferResponse."""
    if isinstance(answer, StreamError):
        request = answer.request
        message = pb.ModelStreamInferResponse(error_message=answer.error.message)
        message.infer_response.id = request.id
        message.infer_response.model_name = request.model_name
        message.infer_response.model_version = request.model_version
        return serialize(message)
    pieces = infer_pieces(answer)
    return b"".join([length_prefix(_INFER_RESPONSE, sum(map(byte_length, pieces))), *pieces])


def infer_pieces(response: InferenceResponse) -> list[Any]:
    outputs = response.outputs
    if response.typed and all(output.datatype in _CONTENTS_FIELD for output in outputs):
        return [_typed_infer(response)]
    pieces: list[Any] = [
        _response_head(
            response.model_name,
            response.model_version,
            tuple([(output.name, output.datatype, output.array.shape, output.parameters) for output in outputs]),
        )
    ]
    # Protobuf allows fields in any order: so the head is the same from call to call, and cached.
    if response.id:
        request_id = response.id.encode()
        pieces += length_prefix(ID, len(request_id)), request_id
    if response.parameters:
        pieces.append(_response_parameters(response.parameters))
    placed = response.placed
    for output in outputs:
        buffer = b"" if placed and output.name in placed else raw_buffer(output.array)
        pieces += length_prefix(_RAW_OUTPUTS, byte_length(buffer)), buffer
    return pieces


def _typed_infer(response: InferenceResponse) -> bytes:
    message = pb.ModelInferResponse(
        model_name=response.model_name, model_version=response.model_version, id=response.id
    )
    encode_parameters(response.parameters, message.parameters)
    for output in response.outputs:
        array, field = output.array, _CONTENTS_FIELD[output.datatype]
        tensor = message.outputs.add(name=output.name, datatype=output.datatype, shape=array.shape)
        encode_parameters(dict(output.parameters), tensor.parameters)
        if output.name not in response.placed:
            tensor.contents.SetInParent()
            elements = bytes_elements(array) if output.datatype == "BYTES" else array.ravel().tolist()
            getattr(tensor.contents, field).extend(elements)
    return serialize(message)


@lru_cache(maxsize=256)
def _response_head(model_name: str, model_version: str, outputs: Layout) -> bytes:
    head = pb.ModelInferResponse(model_name=model_name, model_version=model_version)
    _add_outputs(head, outputs)
    return serialize(head)


def _add_outputs(message: pb.ModelInferResponse, outputs: Layout) -> None:
    for name, datatype, shape, parameters in outputs:
        tensor = message.outputs.add(name=name, datatype=datatype, shape=shape)
        encode_parameters(dict(parameters), tensor.parameters)


def _response_parameters(values: Mapping[str, ParameterValue]) -> bytes:
    if len(values) == 1:
        [(key, value)] = values.items()
        if isinstance(value, bool):
            return _response_flag(key, value)  # Every response of a stream has one.
    extra = pb.ModelInferResponse()
    encode_parameters(values, extra.parameters)
    return serialize(extra)


@lru_cache(maxsize=16)
def _response_flag(key: str, value: bool) -> bytes:
    extra = pb.ModelInferResponse()
    extra.parameters[key].bool_param = value
    return serialize(extra)


def encode_parameters(values: Mapping[str, ParameterValue], into: Any) -> None:
    """Write parameters into a message's map field."""
    for key, value in values.items():
        if isinstance(value, bool):
            into[key].bool_param = value
        elif isinstance(value, int):
            into[key].int64_param = value
        elif isinstance(value, float):
            into[key].double_param = value
        else:
            into[key].string_param = value


def small_answer(response: InferenceResponse, *, final: bool | None = None) -> bytes | None:
    """Return a small response's ModelInferResponse or, with `final`, its ModelStreamInferResponse with that flag.

    Return None for one with parameters of its own, with BYTES or typed outputs, without tensors, or of more than
    `SMALL_BYTES`.
    """
    if (framing := _framing_of(response, final)) is None:
        return None
    size, head, before = framing
    raw = [output.array.tobytes() for output in response.outputs]
    if response.id:
        request_id = response.id.encode()
        request_id = length_prefix(ID, len(request_id)) + request_id
        head = _head(final, size + len(request_id)) + request_id
    if len(raw) == 1:
        return head + before[0] + raw[0]
    return head + b"".join([piece for pair in zip(before, raw, strict=True) for piece in pair])


def _framing_of(response: InferenceResponse, final: bool | None) -> tuple[int, bytes, tuple[bytes, ...]] | None:
    """Return the response's `_framing`, None if it is not a small response."""
    if response.parameters or response.placed or response.typed:
        return None
    layout = []
    for output in response.outputs:
        array = output.array
        dtype = array.dtype
        if array.nbytes > SMALL_BYTES or dtype.kind in "OSUT" or not dtype.isnative:
            return None
        layout.append((output.name, output.datatype, array.shape, output.parameters))
    framing = _framing(response.model_name, response.model_version, final, tuple(layout))
    return framing if 0 < framing[0] <= SMALL_BYTES else None


@lru_cache(maxsize=256)
def _framing(
    model_name: str, model_version: str, final: bool | None, layout: Layout
) -> tuple[int, bytes, tuple[bytes, ...]]:
    """Return the size of the ModelInferResponse, its prefix, and the bytes before the data of each output.

    The size is 0 if there are no outputs.
    """
    response = pb.ModelInferResponse(model_name=model_name, model_version=model_version)
    if final is not None:
        response.parameters[FINAL].bool_param = final
    _add_outputs(response, layout)
    sizes = [element_count(shape) * DATATYPES[datatype].itemsize for _, datatype, shape, _ in layout]
    if not sizes:
        return 0, b"", ()
    before = [length_prefix(_RAW_OUTPUTS, size) for size in sizes]
    before[0] = serialize(response) + before[0]
    size = sum(map(len, before)) + sum(sizes)
    return size, _head(final, size), tuple(before)


def _head(final: bool | None, size: int) -> bytes:
    """Return the prefix of a ModelInferResponse of `size` bytes: that of the stream message around it, if any."""
    return b"" if final is None else length_prefix(_INFER_RESPONSE, size)


def name_request(error: ServingError, request_id: str) -> ServingError:
    """Prefix the text of an invalid or rejected request's error with the request's id (spec 1.5)."""
    if isinstance(error, InvalidRequest | QueueFull):
        error.message = f"[request id: {request_id or '<id_unknown>'}] {error.message}"
    return error
