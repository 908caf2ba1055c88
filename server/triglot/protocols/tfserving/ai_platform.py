"""AI Platform's `projects.predict` and Vertex AI's routes: the same models, called with instances (tfs 7)."""

from __future__ import annotations

import binascii
import json
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import orjson

from triglot.core.call import Call
from triglot.core.errors import (
    Code,
    Internal,
    InvalidArgument,
    ModelNotFound,
    NotFound,
    PermissionDenied,
    ServingError,
    Unavailable,
)
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation
from triglot.core.permission import Permission
from triglot.core.types import InferenceRequest, InferenceResponse, InputTensor, ParameterValue
from triglot.dataplane.dataplane import DataPlane
from triglot.model.signature import Signature
from triglot.protocols.json.arrays import parse_large
from triglot.protocols.json.limits import DEFAULT_LIMITS, SIZE_OPTION, JsonLimits
from triglot.protocols.json.text import type_name
from triglot.protocols.openapi.operation import ApiOperation
from triglot.protocols.rows import Route
from triglot.protocols.tfserving import openapi as api
from triglot.protocols.tfserving.json_models import (
    INSTANCES,
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
BARE_PLATFORMS = ("sklearn", "xgboost")
"""AI Platform answers for these with bare values, whatever the form of their instances (tfs 7.3)."""
EVERY_MODEL = "*"
WRAPPER, WRAPPED_DATA = "httpBody", "data"
_STANDARD_BASE64 = str.maketrans("-_", "+/")
_IS_WRAPPED = re.compile(rb'\s*\{\s*"%b"' % WRAPPER.encode())
_CAUSES = {
    Code.INVALID_ARGUMENT: ("Invalid inputs", 1),
    Code.INTERNAL: ("Failed to run the provided model", 2),
}


class UnknownResource(NotFound):
    """No such model or version: an error of the service, not of a prediction."""


class RoutineFailed(Internal):
    """A custom prediction routine's error, whose text is sent to the client unchanged."""


@dataclass(frozen=True, slots=True)
class PredictCall:
    """A request decoded for a version: tensors of one of its signatures, or JSON for a model that takes JSON."""

    inputs: list[InputTensor]
    signature_name: str = ""
    parameters: dict[str, ParameterValue] = field(default_factory=dict)
    speaks_json: bool = False
    named: bool = False
    """Whether each prediction is an object by output name, even for a single output."""


@dataclass(frozen=True, slots=True)
class DecodedRequest:
    """A request decoded for a version; `find` and `decode` do it again for the version that runs it."""

    find: Callable[[], Servable]
    decode: Callable[[Servable], PredictCall]
    servable: Servable
    decoded: PredictCall


@dataclass(frozen=True, slots=True)
class Predicted:
    """A version's response, with the request as decoded for it."""

    request: PredictCall
    response: InferenceResponse


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

    def decode_project(self, http: HttpRequest) -> DecodedRequest:
        """Decode a call of a project's model. Raises `UnknownResource` and `InvalidArgument`."""
        name = http.path["model"]
        find = partial(self._find, http.permission, name, http.path.get("version", ""))
        named = name in self._named or EVERY_MODEL in self._named
        body = _unwrapped(bytes(http.body), self.limits)
        return _decoded_request(find, partial(_decode, body, self.limits, named=named))

    def decode_vertex(self, http: HttpRequest) -> DecodedRequest:
        """Decode a call of the server's only model. Raises `Unavailable` and `InvalidArgument`."""
        return _decoded_request(
            partial(self._find_only, http.permission),
            partial(_decode, bytes(http.body), self.limits, of_vertex=True),
        )

    def _find_only(self, permission: Permission) -> Servable:
        names = self._dataplane.model_names(permission)
        if len(names) != 1:
            raise Unavailable(f"the prediction route requires exactly one model, this server has {len(names)}")
        return self._dataplane.servable(permission, names[0])

    def _find(self, permission: Permission, name: str, version: str) -> Servable:
        """Returns a model's version, named by a label, or else by its number. Raises `UnknownResource`."""
        resource = f"models/{name}" + (f"/versions/{version}" if version else "")
        try:
            if version:
                try:
                    return self._dataplane.servable(permission, name, label=version)
                except InvalidArgument:
                    pass
            return self._dataplane.servable(permission, name, version)
        except (ModelNotFound, InvalidArgument, Unavailable):
            raise UnknownResource(f"The model resource '{resource}' was not found, or is not ready.") from None

    async def predict(self, received: DecodedRequest, call: Call) -> Predicted:
        """Run a request. Raises `ServingError`."""
        with received.find() as servable:
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
            try:
                return Predicted(request, await self._dataplane.infer_on(servable, inference, call))
            except Internal as error:
                if servable.model.speaks_json:
                    raise RoutineFailed(error.message) from error
                raise

    async def require_ready(self, _: HttpRequest, __: Call) -> None:
        """Raises `Unavailable` unless the server is ready."""
        if not self._dataplane.ready:
            raise Unavailable("the server is not ready")


def _decoded_request(find: Callable[[], Servable], decode: Callable[[Servable], PredictCall]) -> DecodedRequest:
    servable = find()
    return DecodedRequest(find, decode, servable, decode(servable))


def _decode(
    body: bytes, limits: JsonLimits, servable: Servable, *, of_vertex: bool = False, named: bool = False
) -> PredictCall:
    if servable.model.speaks_json:
        return _json_call(servable, read_object(body, limits), of_vertex=of_vertex)
    chosen: list[str] = []

    def signature_of(name: str) -> Signature:
        chosen.append(name or servable.default_signature)
        if chosen[-1] not in servable.signatures:
            raise InvalidArgument(f"No signature found for signature key {name}.")
        return servable.signatures[chosen[-1]]

    try:
        decoded = decode_predict(body, signature_of, limits)
        if not decoded.row:
            raise InvalidArgument(f"expected '{INSTANCES}', got 'inputs'")
    except InvalidArgument as error:
        if chosen and chosen[-1] in servable.signatures:
            _check_names(body, limits, servable.signatures[chosen[-1]])
        raise error from None
    return PredictCall(
        decoded.inputs,
        chosen[-1],
        _parameters(body, limits, of_vertex=of_vertex) if servable.model.takes_parameters else {},
        named=not of_vertex and servable.platform not in BARE_PLATFORMS and (named or decoded.named),
    )


def _unwrapped(body: bytes, limits: JsonLimits) -> bytes:
    """Returns the request in a body, which generated clients of the API send in an HttpBody.

    Its `data` are base64, or plain JSON; without `data` the HttpBody is the request. Raises `InvalidArgument`.
    """
    if not _IS_WRAPPED.match(body):
        return body
    values = read_object(body, limits)
    content = values.get(WRAPPER)
    if INSTANCES in values or not isinstance(content, dict):
        return body
    data = content.get(WRAPPED_DATA)
    if data is None:
        return json.dumps(content).encode()
    if not isinstance(data, str):
        raise InvalidArgument(f"{WRAPPER}.{WRAPPED_DATA}: expected a string, got {type_name(data)}")
    if data.lstrip().startswith("{"):
        return data.encode(errors="surrogatepass")
    try:
        text = data.translate(_STANDARD_BASE64).rstrip("=")
        return binascii.a2b_base64(text + "=" * (-len(text) % 4), strict_mode=True)
    except ValueError as error:
        raise InvalidArgument(f"{WRAPPER}.{WRAPPED_DATA}: expected base64 or a JSON object: {error}") from None


def _json_call(servable: Servable, values: dict[str, Any], *, of_vertex: bool) -> PredictCall:
    instances, keywords = split_keywords(values)
    if of_vertex:
        keywords = _object(keywords.get(PARAMETERS))
    return PredictCall(json_inputs(instances, keywords), speaks_json=True)


def _object(value: Any) -> dict[str, Any]:
    """Returns parameters as a dict. Raises `InvalidArgument` if they are not an object."""
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidArgument(f"expected '{PARAMETERS}' to be an object, got {value!r}")
    return value


def _parameters(body: bytes, limits: JsonLimits, *, of_vertex: bool) -> dict[str, ParameterValue]:
    """Returns the model's keyword arguments: from `parameters` for Vertex AI, else from beside `instances`."""
    try:
        values, _ = parse_large(body, limits)  # The body was already read and checked.
    except (ValueError, RuntimeError):
        values = read_object(body, limits)
    keywords = _object(values.get(PARAMETERS)) if of_vertex else values
    return {key: value for key, value in keywords.items() if isinstance(value, bool | int | float | str)}


def _check_names(body: bytes, limits: JsonLimits, signature: Signature) -> None:
    """Raises `InvalidArgument` with AI Platform's text if names are wrong (tfs 7.3)."""
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
    """Returns `projects.predict`, with and without a version."""
    return [
        _route(path, platform.decode_project, platform, encode_platform_error, api.PROJECT, "projects.predict")
        for path in (f"{PROJECT_MODEL}:predict", f"{PROJECT_MODEL}/versions/{{version:[^/:]+}}:predict")
    ]


def vertex_routes(platform: AIPlatform, predict_route: str, health_route: str) -> list[Route]:
    """Returns the routes that Vertex AI names in the container's environment; none for an empty path."""
    routes = []
    if predict_route:
        routes.append(_route(predict_route, platform.decode_vertex, platform, encode_detail, api.VERTEX))
    if health_route:
        routes.append(
            Route(
                "GET",
                health_route,
                Operation.HEALTH,
                lambda http: http,
                platform.require_ready,
                _encode_health,
                encode_error=encode_detail,
                documented=(api.VERTEX_HEALTH,),
            )
        )
    return routes


def _route(
    path: str,
    decode: Callable[[HttpRequest], DecodedRequest],
    platform: AIPlatform,
    encode_error: Callable[[ServingError], HttpResponse],
    documented: ApiOperation,
    name: str = "",
) -> Route:
    return Route(
        "POST",
        path,
        Operation.INFER,
        decode,
        platform.predict,
        _encode,
        answer_size=lambda predicted: text_size(predicted.response.outputs),
        body_limit=lambda _: platform.limits.size,
        limit_option=SIZE_OPTION,
        encode_error=encode_error,
        name=name,
        documented=(documented,),
    )


def _encode(predicted: Predicted, _: Any) -> HttpResponse:
    if predicted.request.speaks_json:
        return HttpResponse(encode_json(predicted.response))
    return HttpResponse(encode_predict(predicted.response.outputs, row=True, named=predicted.request.named))


def _encode_health(_: Any, __: Any) -> HttpResponse:
    return HttpResponse(b"{}")


def encode_platform_error(error: ServingError) -> HttpResponse:
    """Encode an error: a failed prediction's in AI Platform's form; an unknown or forbidden model's in Google's.

    See tfs 7.3.
    """
    if isinstance(error, UnknownResource | PermissionDenied):
        status = status_of(error)
        body = {"error": {"code": status, "message": error.message, "status": error.code.name}}
        return HttpResponse(orjson.dumps(body), status)
    text = error.message
    if error.code in _CAUSES and not isinstance(error, RoutineFailed):
        cause, number = _CAUSES[error.code]
        text = f"{cause}: {text} (Error code: {number})"
    return HttpResponse(orjson.dumps({"error": f"Prediction failed: {text}"}), status_of(error))


def encode_detail(error: ServingError) -> HttpResponse:
    """Encode an error as Vertex AI's own prediction containers do (tfs 7.7)."""
    return HttpResponse(orjson.dumps({"detail": error.message}), status_of(error))
