"""KServe V2 over REST: JSON and the binary tensor extension ⇄ requests and responses (spec 3.2, 3.3, 3.7).

The body of a raw request is the bytes of one tensor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Any, Final

import numpy as np

from triglot.core.errors import InvalidArgument
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.scattering import may_scatter
from triglot.core.tensor import (
    DATATYPES,
    MAX_ARRAY_BYTES,
    SCATTER_BYTES,
    Array,
    Buffer,
    Scattered,
    byte_length,
    element_count,
    is_addressable,
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
    is_unicode,
)
from triglot.model.signature import Signature, shape_text
from triglot.protocols.json.dialect import DEFAULT_LIMITS, JsonLimits, type_name
from triglot.protocols.json.text import read_body, without_nulls
from triglot.protocols.kserve.codec import (
    MAX_DIMS,
    MAX_INPUTS,
    MAX_OUTPUTS,
    MAX_PARAMETERS,
    packing_size,
    shape_of_text,
)
from triglot.protocols.kserve.json_elements import elements_of_json, json_of_elements, print_json
from triglot.protocols.kserve.parameters import (
    BINARY_SIZE,
    REGION,
    model_parameters_of,
    output_options_of,
    region_of,
    set_parameters,
)
from triglot.protocols.wire import Limit, limit_error

HEADER_NAME: Final = "Inference-Header-Content-Length"
BINARY: Final = "application/octet-stream"
HEADER_LENGTH: Final = HEADER_NAME.lower()
_INTEGERS: Final = {int}
_SCALARS: Final = (int, float, str)
"""Types of a parameter's value; Python's booleans are ints."""


@dataclass(slots=True)
class RestInfer:
    """A request, and which of its outputs are to be binary."""

    request: InferenceRequest
    binary_outputs: frozenset[str]
    binary_by_default: bool

    def wants_binary(self, output: str) -> bool:
        """Whether `output` is sent as raw bytes; for a requested output its own parameter decides (spec 3.3)."""
        return output in self.binary_outputs if self.request.outputs else self.binary_by_default


def decode_infer(http: HttpRequest, limits: JsonLimits = DEFAULT_LIMITS) -> RestInfer:
    """Return the request of an infer body. Binary tensors are views of the body.

    Raise `InvalidArgument`, and `PayloadTooLarge` for JSON beyond `limits`.
    """
    text_length = json_length(http)
    limits.check_size(text_length)
    text = http.body if text_length == len(http.body) else http.body[:text_length]
    return read_body(bytes(text), "data", lambda body: _Reader(http, text_length).read(body), limits)


def body_limit(limits: JsonLimits, headers: Mapping[str, str]) -> int | None:
    """Return the largest body in bytes: without binary tensors, that of JSON. None: the server's limit."""
    return None if HEADER_LENGTH in headers else limits.size


def json_length(http: HttpRequest) -> int:
    """Return how many bytes of the body are JSON; 0 only in a raw binary request.

    Raise `InvalidArgument` for an invalid header.
    """
    size = len(http.body)
    text = http.headers.get(HEADER_LENGTH)
    if text is None:
        return size
    length = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not 0 <= length <= size:
        raise InvalidArgument(f"inference header size should be in range (0, {size}), got: {text}")
    return length


class _Reader:
    """Reads one body; `_at` is the offset of the next binary tensor."""

    def __init__(self, http: HttpRequest, json_length: int) -> None:
        self._model = http.path["model"]
        self._version = http.path.get("version", "")
        self._body = http.body
        self._at = json_length
        self._regions: dict[int, RegionSlice] = {}
        self._output_options: dict[str, OutputOptions] = {}
        self._own_parameters: dict[str, dict[str, ParameterValue]] = {}
        self._parameters_of_outputs: dict[str, dict[str, ParameterValue]] = {}
        self._binary_outputs: list[str] = []

    def read(self, body: dict[str, Any]) -> RestInfer:
        request = InferenceRequest(self._model, self._version, _string(body, "id", "the request", default=""))
        default = self._parameters(request, body) if "parameters" in body else False
        tensors = _objects(body, "inputs", MAX_INPUTS, required=True)
        request.inputs = [self._input(at, tensor) for at, tensor in enumerate(tensors)]
        if self._at != len(self._body):
            raise InvalidArgument(
                f"unexpected additional input data for model '{self._model}': {len(self._body) - self._at} bytes "
                "follow the last binary tensor"
            )
        if self._own_parameters:
            request.input_parameters = self._own_parameters
        if "outputs" in body:
            outputs = _objects(body, "outputs", MAX_OUTPUTS)
            request.outputs = [self._requested_output(output) for output in outputs]
            if self._parameters_of_outputs:
                request.output_parameters = self._parameters_of_outputs
        if self._regions or self._output_options:
            request.options = TensorOptions(self._regions, self._output_options)
        return RestInfer(request, frozenset(self._binary_outputs), default)

    def _parameters(self, request: InferenceRequest, body: dict[str, Any]) -> bool:
        """Set the request's parameters; returns whether outputs are binary by default."""
        set_parameters(request, _parameters(body, "the request"))
        if "triton_enable_empty_final_response" in request.parameters:
            raise InvalidArgument("parameter 'triton_enable_empty_final_response' is not allowed over HTTP")
        return bool(request.parameters.pop("binary_data_output", False))

    def _input(self, at: int, tensor: dict[str, Any]) -> InputTensor:
        name = _string(tensor, "name", "an input")
        what = f"input '{name}'"
        datatype = _string(tensor, "datatype", what)
        shape = _shape(tensor, what)
        data = tensor.get("data")
        if datatype == "BYTES" and isinstance(data, str):  # MLServer's users send one text so, of any shape.
            data, shape = [data], (1,)
        elif datatype == "BYTES" and isinstance(data, list) and len(data) == 1 and isinstance(data[0], str):
            shape = shape_of_text(shape, data[0].encode(errors="replace"))
        parameters = _parameters(tensor, what) if "parameters" in tensor else {}
        if not parameters and data is not None:
            return InputTensor(name, datatype, shape, elements_of_json(data, datatype, shape, what))
        if own := model_parameters_of(parameters):
            self._own_parameters[name] = own
        given: list[str] = [key for key in (REGION, BINARY_SIZE) if key in parameters]
        # KServe's client sends null data with the size of an empty binary tensor.
        given += ["data"] if data is not None else []
        if len(given) != 1:
            raise InvalidArgument(
                "Input must set only one of the following fields: 'data', 'binary_data_size' in 'parameters', "
                f"'shared_memory_region' in 'parameters'; {what} sets {given or 'none'}"
            )
        tensor_data: Buffer | Array
        if (region := region_of(parameters, what)) is not None:
            self._regions[at] = region
            tensor_data = b""
        elif given == [BINARY_SIZE]:
            tensor_data = self._binary(name, parameters[BINARY_SIZE])
        else:
            tensor_data = elements_of_json(data, datatype, shape, what)
        return InputTensor(name, datatype, shape, tensor_data)

    def _binary(self, name: str, size: ParameterValue) -> memoryview:
        if not _is_unsigned(size):
            raise InvalidArgument(f"input '{name}': binary_data_size must be an unsigned integer, got {size!r}")
        end = self._at + int(size)
        if end > len(self._body):
            raise InvalidArgument(
                f"unexpected size for input '{name}', expecting {end - len(self._body)} additional bytes for "
                f"model '{self._model}'"
            )
        start, self._at = self._at, end
        return memoryview(self._body)[start:end]

    def _requested_output(self, output: dict[str, Any]) -> str:
        name = _string(output, "name", "an output")
        what = f"output '{name}'"
        parameters = _parameters(output, what)
        if parameters and (own := model_parameters_of(parameters)):
            self._parameters_of_outputs[name] = own
        wanted = parameters.get("binary_data", False)
        if not isinstance(wanted, bool):
            raise InvalidArgument(f"{what}: binary_data must be true or false, got {wanted!r}")
        if (options := output_options_of(parameters, what)) is not None:
            if wanted and options.region is not None:
                raise InvalidArgument(f"{what}: binary_data true and '{REGION}' are mutually exclusive, got both")
            self._output_options[name] = options
        if wanted:
            self._binary_outputs.append(name)
        return name


def _is_unsigned(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _string(owner: Mapping[str, Any], key: str, what: str, *, default: str | None = None) -> str:
    value = owner.get(key)
    if value is None and default is not None:
        return default
    if not isinstance(value, str):
        got = "nothing" if key not in owner else type_name(value)
        raise InvalidArgument(f"'{key}' of {what} must be a string, got {got}")
    if not value.isascii() and not is_unicode(value):
        raise InvalidArgument(f"'{key}' of {what} is not Unicode text: {value!a}")
    return value


def _objects(body: Mapping[str, Any], key: str, limit: Limit, *, required: bool = False) -> list[dict[str, Any]]:
    values = body.get(key)
    if values is None and not required:
        return []
    if not isinstance(values, list):
        got = "nothing" if values is None else type_name(values)
        hint = "; for plain JSON, use the path that ends with /predict" if required else ""
        raise InvalidArgument(f"'{key}' of the request must be an array of objects, got {got}{hint}")
    for at, value in enumerate(values):
        if not isinstance(value, dict):
            raise InvalidArgument(
                f"'{key}' of the request: element {at} must be an object, got {type_name(value)}"
            )
    if len(values) > limit.count:
        raise limit_error(limit)
    return values


def _shape(tensor: Mapping[str, Any], what: str) -> tuple[int, ...]:
    shape = tensor.get("shape")
    if not isinstance(shape, list) or not (set(map(type, shape)) <= _INTEGERS and min(shape, default=0) >= 0):
        raise InvalidArgument(f"'shape' of {what} must be an array of unsigned integers, got {shape!r:.200}")
    if len(shape) > MAX_DIMS.count:
        raise limit_error(MAX_DIMS)
    if not 0 < prod(shape) <= MAX_ARRAY_BYTES and not is_addressable(shape, np.dtype(np.uint8)):
        raise InvalidArgument(f"'shape' of {what} has too many elements: {shape!r:.200}")
    return tuple(shape)


def _parameters(owner: Mapping[str, Any], what: str) -> dict[str, ParameterValue]:
    parameters = owner.get("parameters")
    if parameters is None:
        return {}
    if not isinstance(parameters, dict):
        raise InvalidArgument(f"'parameters' of {what} must be an object, got {type_name(parameters)}")
    if len(parameters) > MAX_PARAMETERS.count:
        raise limit_error(MAX_PARAMETERS)
    parameters = without_nulls(parameters)
    for key, value in parameters.items():
        if not isinstance(value, _SCALARS):
            raise InvalidArgument(
                f"parameter '{key}' of {what} must be a string, number or boolean, got {type_name(value)}"
            )
    return parameters


def text_size(response: InferenceResponse, wanted: RestInfer) -> int:
    """Estimate how many bytes of the outputs have to be printed, or packed element by element."""
    size = packing_size(response)
    for output in response.outputs:
        if output.name not in response.placed and not wanted.wants_binary(output.name):
            size += output.array.nbytes
    return size


def encode_infer(response: InferenceResponse, wanted: RestInfer) -> HttpResponse:
    """Return the response: JSON, followed by the outputs requested as binary (spec 3.3).

    Large parts are not copied.

    Raise `InvalidArgument` for an output that has no JSON form.
    """
    scatters = may_scatter(response)
    pieces: list[Buffer] = [_response_head(response.model_name, response.model_version)]
    if response.id:
        pieces += b',"id":', print_json(response.id)
    if response.parameters:
        pieces += b',"parameters":', print_json(response.parameters)
    pieces.append(b',"outputs":[')
    tail: list[Any] = []
    for at, output in enumerate(response.outputs):
        pieces.append(b"," if at else b"")
        binary = output.name not in response.placed and wanted.wants_binary(output.name)
        parameters = output.parameters
        if binary:
            buffer = raw_buffer(output.array)
            parameters = (*parameters, (BINARY_SIZE, byte_length(buffer)))
            tail.append(buffer)
        pieces.append(_output_head(output.name, output.datatype, output.array.shape))
        if parameters:
            pieces += b',"parameters":', print_json(dict(parameters))
        if not binary and output.name not in response.placed:
            pieces += [b',"data":', *json_of_elements(output)]
        pieces.append(b"}")
    pieces.append(b"]}")
    length = sum(map(len, pieces))
    size = sum(map(byte_length, tail))
    if length + size < SCATTER_BYTES or (size and not scatters):
        body: bytes | Scattered = b"".join([*pieces, *tail])
    else:
        body = Scattered([*pieces, *tail])
    if not size:
        return HttpResponse(body)
    return HttpResponse(body, content_type=BINARY, headers={HEADER_NAME: str(length)})


@lru_cache(maxsize=256)
def _response_head(model_name: str, model_version: str) -> bytes:
    """Return the start of the JSON object, without its closing brace."""
    return print_json({"model_name": model_name, "model_version": model_version})[:-1]


@lru_cache(maxsize=1024)
def _output_head(name: str, datatype: str, shape: tuple[int, ...]) -> bytes:
    """Return the start of an output's JSON object, without its closing brace."""
    return print_json({"name": name, "datatype": datatype, "shape": shape})[:-1]


# --- raw requests ---


def is_raw(http: HttpRequest) -> bool:
    """Whether the request has no JSON part. Raise `InvalidArgument` as `json_length`."""
    return HEADER_LENGTH in http.headers and json_length(http) == 0


def decode_raw(http: HttpRequest, signature: Signature) -> RestInfer:
    """Return the request whose body is the model's only input, as a batch of one; all outputs are binary data.

    Raise `InvalidArgument` unless the signature has one input whose shape follows from the number of bytes.
    """
    model = http.path["model"]
    if len(signature.inputs) != 1:
        raise InvalidArgument(
            f"a raw binary request requires a model with 1 input, model '{model}' has {len(signature.inputs)}"
        )
    spec = signature.inputs[0]
    what = f"raw binary request for input '{spec.name}' of model '{model}'"
    if spec.shape is None:
        raise InvalidArgument(f"{what}: the input has no fixed rank, so its shape cannot be derived from the body")
    batch = (1,) if signature.max_batch_size else ()
    dims = tuple(spec.shape[len(batch) :])
    data: Buffer | Array
    if spec.datatype == "BYTES":
        if dims != (1,):
            raise InvalidArgument(f"{what}: BYTES requires an input of shape [1], got {shape_text(dims)}")
        data = object_array([bytes(http.body)], (1,))
    else:
        data = memoryview(http.body)
        dims = _concrete(dims, len(data) // DATATYPES[spec.datatype].itemsize, what)
    tensor = InputTensor(spec.name, spec.datatype, (*batch, *dims), data)
    request = InferenceRequest(model, http.path.get("version", ""), inputs=[tensor])
    return RestInfer(request, frozenset(), binary_by_default=True)


def _concrete(dims: Sequence[int], elements: int, what: str) -> tuple[int, ...]:
    """Return the dims with the size of the dynamic one derived; whether the data fits is checked later."""
    unknown = [at for at, dim in enumerate(dims) if dim < 0]
    if not unknown:
        return tuple(dims)
    if len(unknown) > 1:
        raise InvalidArgument(
            f"{what}: only one dim can be derived from the number of bytes, the shape is {shape_text(dims)}"
        )
    others = element_count([dim for dim in dims if dim >= 0])
    if not others or elements % others:
        raise InvalidArgument(f"{what}: {elements} elements do not match the shape {shape_text(dims)}")
    return tuple(elements // others if dim < 0 else dim for dim in dims)
