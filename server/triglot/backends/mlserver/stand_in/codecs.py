"""MLServer's codecs: between tensors and the values that models work with."""

from __future__ import annotations

import base64
import binascii
import importlib
import json
from collections.abc import Callable, Coroutine, Mapping
from datetime import datetime
from functools import wraps
from types import NoneType, UnionType
from typing import Any, ClassVar, Final, Union, get_args, get_origin
from typing import get_type_hints as evaluated  # noqa: TID251 - Annotations say which codecs arguments have.

import numpy as np

from triglot.backends.mlserver.stand_in.absent import missing
from triglot.backends.mlserver.stand_in.errors import CodecError, CodecNotFound
from triglot.backends.mlserver.stand_in.types import (
    InferenceRequest,
    InferenceResponse,
    Parameters,
    RequestInput,
    ResponseOutput,
    TensorData,
)
from triglot.core.tensor import DATATYPES, datatype_name

DecodedParameterName: Final = "_decoded_payload"
"""Where a decoded value is kept, among the parameters of what it was decoded from."""
_INPUT_CODECS: Final[dict[str, type[InputCodec]]] = {}
_REQUEST_CODECS: Final[dict[str, type[RequestCodec]]] = {}


# --- base ---


class InputCodec:
    """Encodes and decodes one tensor."""

    ContentType: ClassVar[str] = ""
    TypeHint: ClassVar[Any] = NoneType

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        """Return whether the value is one of the codec's."""
        return False

    @classmethod
    def encode_output(cls, name: str, payload: Any, **_: Any) -> ResponseOutput:
        """Return a value as an output."""
        raise NotImplementedError

    @classmethod
    def decode_output(cls, response_output: ResponseOutput) -> Any:
        """Return an output's value."""
        return cls.decode_input(response_output)

    @classmethod
    def encode_input(cls, name: str, payload: Any, **options: Any) -> RequestInput:
        """Return a value as an input."""
        return RequestInput(**vars(cls.encode_output(name, payload, **options)))

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        """Return an input's value."""
        raise NotImplementedError


class RequestCodec:
    """Encodes and decodes all tensors of a request or a response."""

    ContentType: ClassVar[str] = ""
    TypeHint: ClassVar[Any] = NoneType

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        """Return whether the value is one of the codec's."""
        return False

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, **_: Any
    ) -> InferenceResponse:
        """Return a value as a response."""
        raise NotImplementedError

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        """Return a response's value."""
        raise NotImplementedError

    @classmethod
    def encode_request(cls, payload: Any, **_: Any) -> InferenceRequest:
        """Return a value as a request."""
        raise NotImplementedError

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        """Return a request's value."""
        raise NotImplementedError


def register_input_codec(codec: type[InputCodec]) -> type[InputCodec]:
    """Make a codec known by its content type and its type hint."""
    _INPUT_CODECS[codec.ContentType] = codec
    return codec


def register_request_codec(codec: type[RequestCodec]) -> type[RequestCodec]:
    """Make a codec known by its content type and its type hint."""
    _REQUEST_CODECS[codec.ContentType] = codec
    return codec


def find_request_codec_by_payload(payload: Any) -> type[RequestCodec] | None:
    """Return the first codec that encodes such values."""
    return next((codec for codec in _REQUEST_CODECS.values() if codec.can_encode(payload)), None)


# --- tensors ---


def _elements(tensor: RequestInput) -> list[Any]:
    elements = tensor.data.root if isinstance(tensor.data, TensorData) else tensor.data
    return elements if isinstance(elements, list) else [elements]


def _texts(name: str, elements: list[Any], content_type: str) -> ResponseOutput:
    return ResponseOutput(
        name=name,
        datatype="BYTES",
        shape=[len(elements), 1],
        data=elements,
        parameters=Parameters(content_type=content_type),
    )


def _are_all(payload: Any, kind: type) -> bool:
    return isinstance(payload, list) and all(isinstance(item, kind) for item in payload)


@register_input_codec
class NumpyCodec(InputCodec):
    """Arrays of numpy."""

    ContentType = "np"
    TypeHint = np.ndarray

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return isinstance(payload, np.ndarray)

    @classmethod
    def encode_output(cls, name: str, payload: Any, **_: Any) -> ResponseOutput:
        return ResponseOutput(
            name=name,
            datatype=datatype_name(payload.dtype),
            shape=[*payload.shape, 1] if payload.ndim < 2 else payload.shape,
            data=_plain(payload),
            parameters=Parameters(content_type=cls.ContentType),
        )

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        elements = _elements(request_input)
        if request_input.datatype != "BYTES":
            return np.array(elements, DATATYPES[request_input.datatype].dtype).reshape(request_input.shape)
        if _are_all(elements, bytes):  # Bytes of the length of the last dim, in buffers of several each.
            dtype = np.dtype((bytes, request_input.shape[-1]))
            return np.concatenate([np.frombuffer(buffer, dtype) for buffer in elements]).reshape(
                request_input.shape
            )
        return np.array(elements, str).reshape(request_input.shape)


def _plain(array: Any) -> list[Any]:
    """Return an array's elements as JSON has them: texts in UTF-8, and None for NaN."""
    if array.dtype.kind == "S":
        return [array.tobytes()]
    elements: list[Any] = array.ravel().tolist()
    if array.dtype.kind == "U":
        return [element.encode() for element in elements]
    if array.dtype.kind == "f" and np.isnan(array).any():
        return [None if np.isnan(element) else element for element in elements]
    return elements


@register_input_codec
class StringCodec(InputCodec):
    """Lists of texts."""

    ContentType = "str"
    TypeHint = list[str]

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return _are_all(payload, str)

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **_: Any) -> ResponseOutput:
        return _texts(name, [text.encode() for text in payload] if use_bytes else list(payload), cls.ContentType)

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        return [
            element.decode() if isinstance(element, bytes) else element for element in _elements(request_input)
        ]


@register_input_codec
class Base64Codec(InputCodec):
    """Lists of bytes, as base64. What is no base64 is taken as it is."""

    ContentType = "base64"
    TypeHint = list[bytes]

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return _are_all(payload, bytes)

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **_: Any) -> ResponseOutput:
        encoded = [base64.b64encode(data.encode() if isinstance(data, str) else data) for data in payload]
        return _texts(name, encoded if use_bytes else [data.decode() for data in encoded], cls.ContentType)

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        return list(map(_from_base64, _elements(request_input)))


def _from_base64(element: Any) -> bytes:
    data = element.encode() if isinstance(element, str) else bytes(element)
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error:
        return data


@register_input_codec
class DatetimeCodec(InputCodec):
    """Lists of times, as ISO 8601."""

    ContentType = "datetime"
    TypeHint = list[str | datetime]

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return _are_all(payload, datetime)

    @classmethod
    def encode_output(cls, name: str, payload: Any, use_bytes: bool = True, **_: Any) -> ResponseOutput:
        texts = [time if isinstance(time, str) else time.isoformat() for time in payload]
        return _texts(name, [text.encode() for text in texts] if use_bytes else texts, cls.ContentType)

    @classmethod
    def decode_input(cls, request_input: RequestInput) -> Any:
        return [datetime.fromisoformat(text) for text in StringCodec.decode_input(request_input)]


# --- requests and responses ---


class SingleInputRequestCodec(RequestCodec):
    """The value of the only tensor, by its codec."""

    InputCodec: ClassVar[Any] = None

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return bool(cls.InputCodec.can_encode(payload))

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, **options: Any
    ) -> InferenceResponse:
        return InferenceResponse(
            model_name=model_name,
            model_version=model_version,
            parameters=Parameters(content_type=cls.ContentType),
            outputs=[cls.InputCodec.encode_output("output-1", payload, **options)],
        )

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        return cls._only(response.outputs)

    @classmethod
    def encode_request(cls, payload: Any, **options: Any) -> InferenceRequest:
        return InferenceRequest(
            parameters=Parameters(content_type=cls.ContentType),
            inputs=[cls.InputCodec.encode_input("input-1", payload, **options)],
        )

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        return cls._only(request.inputs)

    @classmethod
    def _only(cls, tensors: list[Any]) -> Any:
        if len(tensors) != 1:
            raise CodecError(f"the codec {cls.ContentType} is for one tensor, got {len(tensors)}")
        (tensor,) = tensors
        return get_decoded(tensor) if has_decoded(tensor) else cls.InputCodec.decode_input(tensor)


@register_request_codec
class NumpyRequestCodec(SingleInputRequestCodec):
    """One array of numpy."""

    InputCodec = NumpyCodec
    ContentType = NumpyCodec.ContentType


@register_request_codec
class StringRequestCodec(SingleInputRequestCodec):
    """One list of texts."""

    InputCodec = StringCodec
    ContentType = StringCodec.ContentType
    TypeHint = list[str]


@register_request_codec
class PandasCodec(RequestCodec):
    """DataFrames: a tensor for each column."""

    ContentType = "pd"
    TypeHint = "DataFrame"
    JsonContentType: ClassVar[str] = "pd_json"

    @classmethod
    def can_encode(cls, payload: Any) -> bool:
        return type(payload).__name__ == "DataFrame"

    @classmethod
    def encode_outputs(cls, payload: Any, use_bytes: bool = True) -> list[ResponseOutput]:
        """Return an output for each column."""
        return [cls._encoded(name, payload[name], use_bytes) for name in payload]

    @classmethod
    def _encoded(cls, name: str, column: Any, use_bytes: bool) -> ResponseOutput:
        elements = column.tolist()
        kind = None
        datatype = "BYTES" if column.dtype.kind in "OSUT" else datatype_name(np.dtype(column.dtype))
        if datatype == "BYTES":
            texts = all(isinstance(element, str | bytes) for element in elements)
            kind = StringCodec.ContentType if texts else cls.JsonContentType
            if not texts:
                elements = [json.dumps(element, separators=(",", ":")) for element in elements]
            if use_bytes or not texts:
                elements = [element.encode() if isinstance(element, str) else element for element in elements]
        elif column.isnull().any():
            elements = [None if np.isnan(element) else element for element in elements]
        parameters = None if kind is None else Parameters(content_type=kind)
        return ResponseOutput(
            name=str(name), datatype=datatype, shape=[len(elements), 1], data=elements, parameters=parameters
        )

    @classmethod
    def encode_response(
        cls, model_name: str, payload: Any, model_version: str | None = None, use_bytes: bool = True, **_: Any
    ) -> InferenceResponse:
        return InferenceResponse(
            model_name=model_name,
            model_version=model_version,
            parameters=Parameters(content_type=cls.ContentType),
            outputs=cls.encode_outputs(payload, use_bytes),
        )

    @classmethod
    def encode_request(cls, payload: Any, use_bytes: bool = True, **_: Any) -> InferenceRequest:
        outputs = cls.encode_outputs(payload, use_bytes)
        inputs = [RequestInput(**vars(output)) for output in outputs]
        return InferenceRequest(parameters=Parameters(content_type=cls.ContentType), inputs=inputs)

    @classmethod
    def decode_response(cls, response: InferenceResponse) -> Any:
        return cls._frame(response.outputs)

    @classmethod
    def decode_request(cls, request: InferenceRequest) -> Any:
        return cls._frame(request.inputs)

    @classmethod
    def _frame(cls, tensors: list[Any]) -> Any:
        pandas = importlib.import_module("pandas")  # Few models need it.
        return pandas.DataFrame({tensor.name: pandas.Series(**cls._column(tensor)) for tensor in tensors})

    @classmethod
    def _column(cls, tensor: Any) -> dict[str, Any]:
        if tensor.parameters is not None and tensor.parameters.content_type == cls.JsonContentType:
            return {"data": list(map(json.loads, _elements(tensor)))}
        values = get_decoded(tensor) if has_decoded(tensor) else _elements(tensor)
        if isinstance(values, np.ndarray):
            values = values.reshape(tensor.shape[0])
        if tensor.datatype == "BYTES":
            return {"data": values}
        return {"data": values, "dtype": DATATYPES[tensor.datatype].dtype}


# --- by content type ---


def _content_type(of: Any, spec: Any = None) -> str | None:
    for described in (of, spec):
        parameters = None if described is None else described.parameters
        if parameters is not None and parameters.content_type:
            return str(parameters.content_type)
    return None


def _keep(of: Any, value: Any) -> None:
    if of.parameters is None:
        of.parameters = Parameters()
    setattr(of.parameters, DecodedParameterName, value)


def has_decoded(parametrised_obj: Any) -> bool:
    """Return whether a request or a tensor has been decoded."""
    return parametrised_obj.parameters is not None and hasattr(parametrised_obj.parameters, DecodedParameterName)


def get_decoded(parametrised_obj: Any) -> Any:
    """Return the decoded value, None if there is none."""
    return getattr(parametrised_obj.parameters, DecodedParameterName, None)


def get_decoded_or_raw(parametrised_obj: Any) -> Any:
    """Return the decoded value, or else the elements of a tensor, or what else was given."""
    if has_decoded(parametrised_obj):
        return get_decoded(parametrised_obj)
    return getattr(parametrised_obj, "data", parametrised_obj)


def decode_request_input(request_input: RequestInput, metadata_inputs: Mapping[str, Any] = {}) -> Any:
    """Return an input's value by its content type, and keep it; None without a content type that is known."""
    content_type = _content_type(request_input, metadata_inputs.get(request_input.name))
    codec = _INPUT_CODECS.get(content_type or "")
    if codec is None:
        return None
    value = codec.decode_input(request_input)
    _keep(request_input, value)
    return value


def decode_inference_request(
    inference_request: InferenceRequest, model_settings: Any = None, metadata_inputs: Mapping[str, Any] = {}
) -> Any:
    """Decode the inputs, and return the request's value by its content type, or else the request."""
    for tensor in inference_request.inputs:
        decode_request_input(tensor, metadata_inputs)
    codec = _REQUEST_CODECS.get(_content_type(inference_request, model_settings) or "")
    if codec is None:
        return inference_request
    value = codec.decode_request(inference_request)
    _keep(inference_request, value)
    return value


def encode_response_output(
    payload: Any, request_output: Any, metadata_outputs: Mapping[str, Any] = {}
) -> ResponseOutput | None:
    """Return a value as an output by the content type asked for, or else by its type; None without a codec."""
    content_type = _content_type(request_output, metadata_outputs.get(request_output.name))
    known = _INPUT_CODECS.values()
    by_type = next((codec for codec in known if codec.can_encode(payload)), None)
    codec = _INPUT_CODECS.get(content_type) if content_type else by_type
    return None if codec is None else codec.encode_output(request_output.name, payload)


def encode_inference_response(payload: Any, model_settings: Any) -> InferenceResponse | None:
    """Return a value as a response by its type; None without a codec."""
    codec = find_request_codec_by_payload(payload)
    version = None if model_settings.parameters is None else model_settings.parameters.version
    return None if codec is None else codec.encode_response(model_settings.name, payload, version)


# --- by type hints ---

Predict = Callable[[Any, InferenceRequest], Coroutine[Any, Any, InferenceResponse]]


def decode_args(predict: Callable[..., Coroutine[Any, Any, Any]]) -> Predict:
    """Return a `predict` of a request for one whose arguments are the inputs, by their names and type hints.

    What it returns, a value or a tuple of values, are the outputs `output-0`, `output-1`, … Raise `CodecNotFound`
    for a type hint that no codec has.
    """
    hints = {name: _without_none(hint) for name, hint in evaluated(predict).items()}
    returned = hints.pop("return", None)
    if not isinstance(returned, tuple):
        returned = get_args(returned) if get_origin(returned) is tuple else [] if returned is None else [returned]
    results = list(returned)
    arguments = {name: _codec_of(hint, name) for name, hint in hints.items()}
    encoders = [_codec_of(hint, f"output {at}") for at, hint in enumerate(results)]

    @wraps(predict)
    async def decoding(self: Any, request: InferenceRequest) -> InferenceResponse:
        answer = await predict(self, **_arguments(request, arguments))
        values = list(answer) if isinstance(answer, tuple) else [] if answer is None else [answer]
        outputs: list[ResponseOutput] = []
        for at, value in enumerate(values):
            if at >= len(encoders) or not encoders[at].can_encode(value):
                raise CodecError(f"output {at}: expected what the type hints say, got {type(value).__name__}")
            encoder: Any = encoders[at]
            if issubclass(encoder, InputCodec):
                outputs.append(encoder.encode_output(f"output-{at}", value))
            else:
                outputs += encoder.encode_response("", value).outputs
        return InferenceResponse(model_name=self.name, model_version=self.version, outputs=outputs)

    return decoding


def _without_none(hint: Any) -> Any:
    if get_origin(hint) in (Union, UnionType):
        others = [each for each in get_args(hint) if each is not NoneType]
        if len(others) == 1 < len(get_args(hint)):
            return others[0]
    return hint


def _plain_hint(hint: Any) -> tuple[Any, frozenset[Any]]:
    """Return what is equal for `List[str]` and `list[str]`, or for arrays of any dtype."""
    kind = get_origin(hint) or hint
    if getattr(kind, "__name__", "") == PandasCodec.TypeHint:
        return PandasCodec.TypeHint, frozenset()
    return kind, frozenset() if kind is np.ndarray else frozenset(get_args(hint))


def _codec_of(hint: Any, name: str) -> type[InputCodec] | type[RequestCodec]:
    for codecs in (_INPUT_CODECS, _REQUEST_CODECS):
        for codec in codecs.values():
            if _plain_hint(hint) == _plain_hint(codec.TypeHint):
                return codec
    raise CodecNotFound(f"{name}: no codec for the type hint {hint}")


def _arguments(request: InferenceRequest, codecs: Mapping[str, Any]) -> dict[str, Any]:
    values, others = {}, []
    for tensor in request.inputs:
        codec = codecs.get(tensor.name)
        if codec is not None and issubclass(codec, InputCodec):
            values[tensor.name] = codec.decode_input(tensor)
        else:
            others.append(tensor)
    if others:
        of_requests = [(name, codec) for name, codec in codecs.items() if issubclass(codec, RequestCodec)]
        if not of_requests:
            names = ", ".join(tensor.name for tensor in others)
            raise CodecError(f"expected the inputs {', '.join(codecs)}, got also {names}")
        name, codec = of_requests[0]
        values[name] = codec.decode_request(InferenceRequest(inputs=others))
    return values


def __getattr__(name: str) -> Any:
    missing("mlserver.codecs", name)
