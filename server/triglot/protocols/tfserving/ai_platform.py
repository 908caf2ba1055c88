"""AI Platform's `projects.predict`: the same models, called with instances (tfs 7)."""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import (
    InvalidArgument,
    ModelNotFound,
    NotFound,
    PermissionDenied,
    ServingError,
    Unavailable,
)
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation, Permission
from triglot.core.tensor import object_array
from triglot.core.types import InferenceRequest, InferenceResponse, InputTensor, ParameterValue
from triglot.dataplane.dataplane import DataPlane
from triglot.model.signature import INSTANCES, Signature
from triglot.protocols.api_operation import ApiOperation
from triglot.protocols.json.arrays import parse_large
from triglot.protocols.json.dialect import DEFAULT_LIMITS, SIZE_OPTION, JsonLimits, type_name
from triglot.protocols.rows import Route
from triglot.protocols.tfserving import openapi as api
from triglot.protocols.tfserving.json_dialect import (
    PARAMETERS,
    encode_json,
    instances_of,
    json_inputs,
    read_object,
    split_keywords,
)
from triglot.protocols.tfserving.rest_predict import decode_predict, encode_predict, text_size
from triglot.protocols.tfserving.routes import status_of
from triglot.scheduling.servable import Servable

PROJECT_MODEL = "/v1/projects/{project:[^/:]+}/models/{model:[^/:]+}"
BARE_PLATFORMS = ("catboost", "lightgbm", "sklearn", "xgboost")
"""AI Platform answers for these with bare values, whatever the form of their instances (tfs 7.3)."""
EVERY_MODEL = "*"
HTTP = "http"
"""Signature of the models that take whole HTTP messages."""
GOOGLES_CLIENT = "x-goog-api-client"
"""Header of Google's client libraries, which read the text of an error only in Google's form (tfs 7.3)."""


_PLACE = re.compile(r"\s*\n\t ?\[\[.*", re.DOTALL)
_SEVERAL = re.compile(
    r"\d+ root error\(s\) found\.\n *\(0\) [A-Za-z_ ]+: (.*?)(?=\n *\(1\) |\n\d+ successful|\Z)", re.DOTALL
)


def without_node(text: str) -> str:
    """Return a TensorFlow graph's error without the operation's place, and of several the first; others unchanged.

    TensorFlow appends "\\n\\t [[{{node NAME}}]]", and a line for each function around it.
    """
    several = _SEVERAL.match(text)
    return _PLACE.sub("", several[1] if several else text)


class UnknownResource(NotFound):
    """No such model or version: an error of the service, not of a prediction."""


@dataclass(frozen=True, slots=True)
class PredictCall:
    """A request decoded for a version: tensors of one of its signatures, JSON, or a whole HTTP message."""

    inputs: list[InputTensor]
    signature_name: str = ""
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    speaks_json: bool = False
    speaks_http: bool = False
    row: bool = True
    named: bool = False
    """Whether each prediction is an object by output name, even for a single output."""


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A request decoded for a version; `find` and `decode` do it again for the version that runs it.

    `names_version`: the client chose it.
    """

    find: Callable[[], Servable]
    decode: Callable[[Servable], PredictCall]
    servable: Servable
    decoded: PredictCall
    names_version: bool

    @classmethod
    def of(
        cls,
        find: Callable[[], Servable],
        decode: Callable[[Servable], PredictCall],
        *,
        names_version: bool = False,
    ) -> DecodedRequest:
        """Return the request, decoded for the version that serves now. Raise as both functions."""
        servable = find()
        return cls(find, decode, servable, decode(servable), names_version)


@dataclass(frozen=True, slots=True)
class Predicted:
    """A version's response, with the request as decoded for it."""

    request: PredictCall
    response: InferenceResponse

    def encode(self) -> HttpResponse:
        """Return the response in the form that the request asks for."""
        outputs = self.response.outputs
        if self.request.speaks_http:
            body, headers, status = (output.array.item() for output in outputs)
            fields = json.loads(headers)
            return HttpResponse(body, int(status), fields.pop("content-type", ""), fields)
        if self.request.speaks_json:
            return HttpResponse(encode_json(self.response))
        return HttpResponse(encode_predict(outputs, self.request.row, named=self.request.named))


class AIPlatform:
    """Parses requests and runs them.

    A single output is bare values, as AI Platform documents; if the instances are objects by input name, so are
    the predictions, as in its first runtime. `named` lists models, "*" for all, whose predictions are always
    objects.
    """

    def __init__(
        self, dataplane: DataPlane, limits: JsonLimits = DEFAULT_LIMITS, *, named: Collection[str] = ()
    ) -> None:
        self._dataplane = dataplane
        self.limits = limits
        self._named = named

    def decode(self, http: HttpRequest) -> DecodedRequest:
        """Decode a call of a project's model. Raise `UnknownResource` and `InvalidArgument`."""
        name, version = http.path["model"], http.path.get("version", "")
        resource = f"model resource 'models/{name}{f'/versions/{version}' if version else ''}'"
        find = partial(self.find, http.permission, name, version, resource)
        try:
            body, _ = unwrapped(bytes(http.body), self.limits)
            return DecodedRequest.of(find, partial(self._decode, body), names_version=bool(version))
        except InvalidArgument as error:
            raise InvalidArgument(f"Invalid inputs: {error.message} (Error code: 1)") from None

    def _decode(self, body: bytes, servable: Servable) -> PredictCall:
        if servable.model.speaks_json:
            instances, keywords = split_keywords(read_object(body, self.limits))
            return PredictCall(json_inputs(instances, keywords), speaks_json=True)
        call = decode_instances(body, self.limits, servable, lambda members: members)
        named = call.named or servable.name in self._named or EVERY_MODEL in self._named
        return replace(call, named=named and servable.platform not in BARE_PLATFORMS)

    def find(self, permission: Permission, name: str, version: str, resource: str) -> Servable:
        """Return a model's version, named by a label, or else by its number.

        Raise `UnknownResource`, which names the `resource`.
        """
        try:
            if version:
                try:
                    return self._dataplane.servable(permission, name, label=version)
                except InvalidArgument:
                    pass
            return self._dataplane.servable(permission, name, version)
        except (ModelNotFound, InvalidArgument, Unavailable):
            raise UnknownResource(f"The {resource} was not found, or is not ready.") from None

    async def predict(self, received: DecodedRequest, call: Call) -> Predicted:
        """Run a request. Raise `ServingError`."""
        found = received.find()
        with found if received.names_version else self._dataplane.routed(found, call) as servable:
            request = received.decoded
            if servable is not received.servable:
                # Another version serves the calls since the body was decoded.
                request = await self._dataplane.off_loop(partial(received.decode, servable))
            inference = InferenceRequest(
                servable.name,
                inputs=request.inputs,
                parameters=request.parameters,
                signature_name=request.signature_name,
                lenient_shapes=True,
            )
            return Predicted(request, await self._dataplane.infer_on(servable, inference, call))


def http_call(body: bytes, headers: Mapping[str, str]) -> PredictCall:
    """Return the call of a model that takes whole HTTP messages."""
    texts = {"body": body, "headers": json.dumps(dict(headers)).encode()}
    inputs = [InputTensor(name, "BYTES", (1,), object_array([text], (1,))) for name, text in texts.items()]
    return PredictCall(inputs, HTTP, speaks_http=True)


def decode_instances(
    body: bytes,
    limits: JsonLimits,
    servable: Servable,
    keywords_of: Callable[[dict[str, Any]], dict[str, Any]],
    *,
    columns: bool = False,
) -> PredictCall:
    """Decode a body for a model of tensors; the result is `named` if the instances are objects by input name.

    `keywords_of` returns the model's keyword arguments among the body's members. `columns`: `inputs` may take the
    place of `instances`.

    Raise `InvalidArgument`; `PayloadTooLarge` for a body beyond `limits`.
    """
    chosen: list[str] = []

    def signature_of(name: str) -> Signature:
        chosen.append(name or servable.default_signature)
        if chosen[-1] not in servable.signatures:
            raise InvalidArgument(f"No signature found for signature key {name}.")
        return servable.signatures[chosen[-1]]

    try:
        decoded = decode_predict(body, signature_of, limits, columns=columns)
    except InvalidArgument as error:
        if chosen and chosen[-1] in servable.signatures:
            _check_names(body, limits, servable.signatures[chosen[-1]])
        raise error from None
    keywords = keywords_of(_members(body, limits)) if servable.model.takes_parameters else {}
    return PredictCall(
        decoded.inputs,
        chosen[-1],
        {key: value for key, value in keywords.items() if isinstance(value, bool | int | float | str)},
        row=decoded.row,
        named=decoded.named,
    )


def object_of(value: Any) -> dict[str, Any]:
    """Return a request's `parameters` as a dict. Raise `InvalidArgument` if they are not an object."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument(f"expected '{PARAMETERS}' to be an object, got {value!r}")
    return value


def _members(body: bytes, limits: JsonLimits) -> dict[str, Any]:
    """Return the members of a body that was already read and checked; large arrays are not converted."""
    try:
        values: dict[str, Any] = parse_large(body, limits)[0]
    except (ValueError, RuntimeError):
        values = read_object(body, limits)
    return values


def _check_names(body: bytes, limits: JsonLimits, signature: Signature) -> None:
    """Raise `InvalidArgument` with AI Platform's text if names are wrong (tfs 7.3)."""
    names = set(signature.input_rules)
    required = {spec.name for spec in signature.inputs if not spec.optional}
    try:
        instances = instances_of(read_object(body, limits))
    except InvalidArgument:
        return
    for instance in instances:
        if not isinstance(instance, dict) or set(instance) == {"b64"} or required <= set(instance) <= names:
            continue
        if len(names) == 1:
            raise InvalidArgument(f"Expected tensor name: {min(names)}, got tensor name: {list(instance)}.")
        for name in instance:
            if name not in names:
                raise InvalidArgument(f"Unexpected tensor name: {name}")
        raise InvalidArgument(f"Input {min(required - set(instance))} was missing in at least one input instance.")


def ai_platform_routes(platform: AIPlatform) -> list[Route]:
    """Return `projects.predict`, with and without a version."""
    return [
        predict_route(
            path,
            platform.decode,
            platform.predict,
            lambda predicted, _: predicted.encode(),
            platform.limits,
            api.PROJECT,
            encode_error=encode_platform_error,
            encode_refusal=encode_googles,
            name="projects.predict",
        )
        for path in (f"{PROJECT_MODEL}:predict", f"{PROJECT_MODEL}/versions/{{version:[^/:]+}}:predict")
    ]


def predict_route(
    path: str,
    decode: Callable[[HttpRequest], Any],
    predict: Any,
    encode: Callable[[Predicted, Any], HttpResponse],
    limits: JsonLimits,
    documented: ApiOperation,
    **options: Any,
) -> Route:
    """Return the row of a prediction; `options` are more fields of it."""
    return Route(
        "POST",
        path,
        Operation.INFER,
        decode,
        predict,
        encode,
        answer_size=lambda predicted: text_size(predicted.response.outputs),
        body_limit=lambda _: limits.size,
        limit_option=SIZE_OPTION,
        documented=(documented,),
        **options,
    )


def encode_platform_error(error: ServingError, headers: Mapping[str, str]) -> HttpResponse:
    """Encode an error of AI Platform's paths (tfs 7.3).

    A failed prediction's is its bare text, a graph's without the operation's place; an unknown or forbidden
    model's has Google's form, as has every error for Google's own clients.
    """
    if isinstance(error, UnknownResource | PermissionDenied) or GOOGLES_CLIENT in headers:
        return encode_googles(error)
    return HttpResponse(dumps({"error": without_node(error.message)}), status_of(error))


def encode_googles(error: ServingError) -> HttpResponse:
    """Encode an error in the form of Google's APIs (tfs 7.3)."""
    status = status_of(error)
    body = {"error": {"code": status, "message": without_node(error.message), "status": error.code.name}}
    return HttpResponse(dumps(body), status)


WRAPPER, DATA, CONTENT_TYPE = "httpBody", "data", "contentType"
_STANDARD_BASE64 = str.maketrans("-_", "+/")
_IS_WRAPPED = re.compile(rb'\s*\{\s*"%b"' % WRAPPER.encode())


def unwrapped(body: bytes, limits: JsonLimits) -> tuple[bytes, str | None]:
    """Return the request in a body, and its content type; of a body that is no HttpBody the body, and None.

    The `data` are base64, or the request's JSON, as a string or as it is; without `data` the HttpBody is the
    request.

    Raise `InvalidArgument`.
    """
    if not _IS_WRAPPED.match(body):
        return body, None
    values = read_object(body, limits)
    content = values.get(WRAPPER)
    if INSTANCES in values or not isinstance(content, dict):
        return body, None
    content_type = content.get(CONTENT_TYPE)
    return _data(content), content_type if isinstance(content_type, str) else ""


def _data(content: dict[str, object]) -> bytes:
    data = content.get(DATA)
    if data is None:
        return json.dumps(content).encode()
    if isinstance(data, dict):
        return json.dumps(data).encode()
    if not isinstance(data, str):
        raise InvalidArgument(f"{WRAPPER}.{DATA}: expected a string or an object, got {type_name(data)}")
    if data.lstrip().startswith("{"):
        return data.encode(errors="surrogatepass")
    try:
        text = data.translate(_STANDARD_BASE64).rstrip("=")
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except ValueError as error:
        raise InvalidArgument(f"{WRAPPER}.{DATA}: expected base64 or a JSON object: {error}") from None
