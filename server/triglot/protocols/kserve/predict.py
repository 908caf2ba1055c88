"""`POST …/predict`: plain JSON, a form with files, or the bytes of one file ⇄ requests and responses.

Strategy: the signature says what each value is, so that a body needs neither datatypes nor shapes. An object has
the inputs by name, as nested lists; a list has rows, which are objects by name or the items of the only input.
Bytes are `{"b64": …}` in JSON, parts of a form, or the body itself.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from email.parser import BytesHeaderParser
from email.policy import HTTP
from typing import Any

import numpy as np

from triglot.core.errors import InvalidArgument, ServingError
from triglot.core.fast_json import dumps, dumps_array
from triglot.core.http import HttpRequest, HttpResponse, StreamForm
from triglot.core.operation import Operation
from triglot.core.tensor import Array, Buffer, bytes_elements, native, object_array
from triglot.core.types import (
    InferenceRequest,
    InferenceResponse,
    InputTensor,
    OutputTensor,
    TensorSpec,
    is_unicode,
)
from triglot.dataplane.dataplane import DataPlane
from triglot.model.signature import INSTANCES, Signature
from triglot.model.warm_up_inputs import example_inputs
from triglot.protocols.json.dialect import DEFAULT_LIMITS, STANDARD, JsonLimits, type_name
from triglot.protocols.json.text import parse, without_nulls
from triglot.protocols.kserve import openapi as api
from triglot.protocols.kserve.extension import MODEL, MODEL_PATHS
from triglot.protocols.kserve.generate import Streaming, printing_size, signature_of, stream_form
from triglot.protocols.kserve.generate_json import declared, encode_error, shape_for
from triglot.protocols.kserve.json_elements import NO_JSON
from triglot.protocols.kserve.parameters import set_parameters
from triglot.protocols.rows import Method, Route

JSON, FORM, ENCODED = "application/json", "multipart/form-data", "application/x-www-form-urlencoded"
LINES = "application/x-ndjson"
PARAMETERS, SIGNATURE, B64 = "parameters", "signature_name", "b64"
COMPRESS_FROM_BYTES = 1024
"""Smaller responses fit into one packet anyway."""


@dataclass(frozen=True, slots=True)
class PredictRequest:
    """A request. `streams`: the model is decoupled; `lines`: its responses are lines of JSON, not events."""

    request: InferenceRequest
    streams: bool
    lines: bool


class Predict:
    """The route, with and without a version."""

    names: Sequence[str] = ()

    def __init__(self, dataplane: DataPlane, limits: JsonLimits = DEFAULT_LIMITS) -> None:
        self._dataplane = dataplane
        self._limits = limits

    def methods(self) -> Sequence[Method]:
        """Return no rows: the calls are REST only."""
        return ()

    def routes(self) -> Sequence[Route]:
        """Return the rows."""
        return [
            Route(
                "POST",
                path + "/predict",
                Operation.INFER,
                self.decode,
                encode=lambda response, _: HttpResponse(encode(response)),
                answer_size=printing_size,
                body_limit=self._body_limit,
                compress_from=COMPRESS_FROM_BYTES,
                name="predict",
                inference=Streaming(self._dataplane, lambda decoded: decoded.request),
                stream_form=_form_of,
                documented=(api.PREDICT,),
                of_model=api.predict_of if path == MODEL else None,
            )
            for path in MODEL_PATHS
        ]

    def _body_limit(self, headers: Mapping[str, str]) -> int | None:
        return self._limits.size if _kind(headers) == JSON else None

    def decode(self, http: HttpRequest) -> PredictRequest:
        """Decode a body. Raise `InvalidArgument`, `PayloadTooLarge`, and for an unknown or unavailable model."""
        name, version = http.path["model"], http.path.get("version", "")
        servable = self._dataplane.servable(http.permission, name, version)
        if servable.signature.any_tensors and not servable.signature.inputs:
            raise InvalidArgument(f"model '{name}' declares no inputs, so plain JSON has no datatypes; use /infer")
        request = InferenceRequest(name, version)
        body, signature = bytes(http.body), declared(servable.signature)
        if _kind(http.headers) == FORM:
            request.inputs = _of_form(form_parts(body, http.headers["content-type"]), signature, self._limits)
        elif (spec := _only_bytes(signature)) is not None and _is_file(http.headers, body):
            request.inputs = [_of_bytes(spec, [body])]
        else:
            value = _parsed(body, self._limits)
            if isinstance(value, dict) and PARAMETERS not in signature.input_rules:
                parameters = value.pop(PARAMETERS, None)
                if parameters is not None:
                    set_parameters(request, _parameters(parameters))
            request.inputs = inputs_of(value, declared(signature_of(servable, request.signature_name)))
        return PredictRequest(request, servable.decoupled, LINES in http.headers.get("accept", ""))


def _kind(headers: Mapping[str, str]) -> str:
    return headers.get("content-type", "").partition(";")[0].strip().lower()


def _is_file(headers: Mapping[str, str], body: bytes) -> bool:
    """Whether a body is something else than JSON. curl's `-d` and `--data-binary` call everything a form."""
    kind = _kind(headers)
    return kind != JSON and (kind not in ("", ENCODED) or body.lstrip()[:1] not in (b"{", b"[", b'"'))


def _only_bytes(signature: Signature) -> TensorSpec | None:
    """Return the one input that a request must have, if it is BYTES."""
    needed = [
        spec for spec in signature.inputs if len(signature.inputs) == 1 or spec.name not in signature.may_lack
    ]
    return needed[0] if len(needed) == 1 and needed[0].datatype == "BYTES" else None


def _parameters(value: Any) -> dict[str, Any]:
    if isinstance(value, dict):
        parameters = without_nulls(value)
        if all(isinstance(each, bool | int | float | str) for each in parameters.values()):
            return parameters
    raise InvalidArgument(f"'{PARAMETERS}': expected an object of strings, numbers and booleans")


# --- JSON ---


def _parsed(body: bytes, limits: JsonLimits) -> Any:
    limits.check_size(len(body))
    try:
        return parse(body, limits)
    except RecursionError:
        raise STANDARD.too_deep() from None


def inputs_of(value: Any, signature: Signature) -> list[InputTensor]:
    """Return the inputs of a JSON value. Raise `InvalidArgument`."""
    try:
        return _fitting(_by_name(value, signature), signature)
    except RecursionError:
        raise STANDARD.too_deep() from None
    except InvalidArgument:
        # Rows with nulls, or of keys that only the model knows.
        if not signature.any_inputs or not isinstance(value, list):
            raise
        try:
            rows = object_array([dumps(row) for row in value], (len(value),))
        except TypeError as error:
            raise InvalidArgument(f"row: {error}") from None
        return [InputTensor(INSTANCES, "BYTES", rows.shape, rows)]


def _by_name(value: Any, signature: Signature) -> Mapping[str, Any]:
    """Return the value of each input."""
    if isinstance(value, dict) and value.keys() != {B64}:
        return without_nulls(value)
    if isinstance(value, list) and value and all(isinstance(row, dict) and row.keys() != {B64} for row in value):
        names = value[0].keys()
        for at, row in enumerate(value):
            if row.keys() != names:
                raise InvalidArgument(f"row {at}: expected the members {list(names)}, got {list(row)}")
        return {name: [row[name] for row in value] for name in names}
    spec = signature.unnamed or (signature.inputs[0] if len(signature.inputs) == 1 else None)
    if spec is None:
        names = [spec.name for spec in signature.inputs]
        raise InvalidArgument(f"expected an object, or a list of objects, with {names}, got {type_name(value)}")
    return {spec.name: value}


def _fitting(values: Mapping[str, Any], signature: Signature) -> list[InputTensor]:
    for name in values:
        if name not in signature.input_rules and not (signature.any_inputs and is_unicode(name)):
            raise InvalidArgument(f"unexpected input {name!a}, expected {list(signature.input_rules)}")
    tensors = example_inputs({name: _with_bytes(name, value) for name, value in values.items()}, signature)
    return [_with_batch(tensor, signature) for tensor in tensors]


def _with_bytes(name: str, value: Any) -> Any:
    """Return nested lists with the bytes that objects in them stand for. Raise `InvalidArgument`."""
    if isinstance(value, list):
        return (
            value if value and isinstance(value[0], int | float) else [_with_bytes(name, item) for item in value]
        )
    if not isinstance(value, dict):
        return value
    text = value.get(B64)
    if value.keys() != {B64} or not isinstance(text, str):
        raise InvalidArgument(
            f"input '{name}': expected values, lists, or {{\"{B64}\": TEXT}}, got another object"
        )
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidArgument(f"input '{name}': expected base64, got something else: {error}") from None


def _with_batch(tensor: InputTensor, signature: Signature) -> InputTensor:
    """Return one row as a batch of one."""
    rule = signature.input_rules.get(tensor.name)
    spec = signature.unnamed if rule is None else rule.spec
    declared = () if spec is None or spec.shape is None else tuple(spec.shape)
    if declared[:1] in ((-1,), (1,)) and len(tensor.shape) == len(declared) - 1:
        tensor.shape = (1, *tensor.shape)
    if isinstance(tensor.data, np.ndarray):
        tensor.data = tensor.data.reshape(-1)
    return tensor


# --- files ---


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a form."""

    name: str
    content: bytes


def form_parts(body: bytes, content_type: str) -> list[Part]:
    """Return the parts of a multipart form (RFC 7578). Raise `InvalidArgument`."""
    own = _parameters_of("content-type", b"Content-Type: " + content_type.encode(errors="surrogateescape"))
    boundary = own.get("boundary", "")
    _, *pieces = (b"\r\n" + body).split(b"\r\n--" + boundary.encode(errors="surrogateescape"))
    if not boundary or not pieces or not pieces[-1].startswith(b"--"):
        raise InvalidArgument("expected a form whose parts end with the boundary of its Content-Type")
    parts = []
    for piece in pieces[:-1]:
        head, _, content = piece.lstrip(b" \t").removeprefix(b"\r\n").partition(b"\r\n\r\n")
        own = _parameters_of("content-disposition", head)
        if "name" not in own:
            raise InvalidArgument("expected a name in each part of the form, got none")
        parts.append(Part(own["name"], content))
    return parts


def _parameters_of(header: str, head: bytes) -> Mapping[str, str]:
    """Return the parameters of a header, none if it is absent. Raise `InvalidArgument`."""
    try:
        found = BytesHeaderParser(policy=HTTP).parsebytes(head)[header]
        return {} if found is None else found.params
    except Exception as error:  # The library raises a dozen of them for headers that are not valid.
        raise InvalidArgument(f"a form's header {header} cannot be read: {type(error).__name__}") from error


def _of_form(parts: Sequence[Part], signature: Signature, limits: JsonLimits) -> list[InputTensor]:
    """Return the inputs of a form: files and texts as bytes, numbers as JSON; a name may repeat."""
    contents: dict[str, list[Part]] = {}
    for part in parts:
        if part.name not in signature.input_rules:
            raise InvalidArgument(f"unexpected field '{part.name}', expected {list(signature.input_rules)}")
        contents.setdefault(part.name, []).append(part)
    inputs: list[InputTensor] = []
    for name, own in contents.items():
        spec = signature.input_rules[name].spec
        if spec.datatype == "BYTES":
            inputs.append(_of_bytes(spec, [part.content for part in own]))
            continue
        values = [_parsed(part.content, limits) for part in own]
        inputs += _fitting({name: values[0] if len(values) == 1 else values}, signature)
    return inputs


def _of_bytes(spec: TensorSpec, elements: list[bytes]) -> InputTensor:
    count = len(elements)
    shape = (count,) if spec.shape is None else shape_for(count, tuple(spec.shape), spec.name)
    return InputTensor(spec.name, "BYTES", shape, object_array(elements, (count,)))


# --- answers ---


def encode(response: InferenceResponse) -> bytes:
    """Return an object of the outputs by name, as nested lists; NaN and infinities are null.

    Bytes that are not UTF-8 are `{"b64": …}`. Raise `InvalidArgument` for an output that has no JSON form.
    """
    pieces: list[Buffer] = []
    for output in response.outputs:
        pieces += b"," if pieces else b"{", dumps(output.name), b":", _text_of(output)
    return b"".join([*pieces, b"}"]) if pieces else b"{}"


def _text_of(output: OutputTensor) -> bytes:
    array: Array = output.array
    if output.datatype in NO_JSON:
        raise InvalidArgument(f"output '{output.name}': {output.datatype} has no JSON form; use infer")
    if output.datatype == "BYTES":
        values = np.empty(array.size, object)
        values[:] = [_json_of(element) for element in bytes_elements(array)]
        return dumps(values.reshape(array.shape).tolist())
    return dumps_array(native(array)) if array.ndim else dumps(array.item())


def _json_of(element: bytes) -> Any:
    try:
        return element.decode()
    except UnicodeDecodeError:
        return {B64: base64.b64encode(element).decode()}


def _form_of(decoded: PredictRequest) -> StreamForm | None:
    if not decoded.streams:
        return None
    if decoded.lines:
        return StreamForm(LINES, _line, _error_line, printing_size, waits=True)
    return stream_form(encode)


def _line(response: InferenceResponse) -> bytes:
    return encode(response) + b"\n"


def _error_line(error: ServingError) -> bytes:
    return encode_error(error.message) + b"\n"
