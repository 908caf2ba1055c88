"""Vertex AI: the routes of its containers, and the paths by which its clients call endpoints (tfs 7.7)."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Internal, NotFound, ServingError, Unavailable
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse, error_of
from triglot.core.operation import Operation, Permission
from triglot.dataplane.dataplane import DataPlane
from triglot.protocols.rows import Route
from triglot.protocols.tfserving import openapi as api
from triglot.protocols.tfserving.ai_platform import (
    CONTENT_TYPE,
    DATA,
    AIPlatform,
    DecodedRequest,
    PredictCall,
    Predicted,
    decode_instances,
    encode_googles,
    encode_platform_error,
    http_call,
    object_of,
    predict_route,
    unwrapped,
)
from triglot.protocols.tfserving.json_dialect import PARAMETERS, json_inputs, read_object, split_keywords
from triglot.protocols.tfserving.routes import status_of
from triglot.scheduling.servable import Servable

ENDPOINT = "projects/{project:[^/:]+}/locations/{location:[^/:]+}/endpoints/{endpoint:[^/:]+}"
APIS = ("/v1", "/v1beta1")
PREDICT, RAW, STREAM = "predict", "rawPredict", "streamRawPredict"
_TOKEN = re.compile(rb'"(?:[^"\\]|\\.)*+"?|-?\d++(?:\.\d++)?(?:[eE][+-]?\d++)?', re.DOTALL)
"""Strings, which may hold numbers, and numbers. Nothing that begins like one is left, to be read again."""
_MAX_NUMBER = 32
"""Longest number in characters that is looked at: a double has at most 17 digits."""


@dataclass(frozen=True, slots=True)
class EndpointRequest:
    """A call of an endpoint by a `method`; `path` has the variables of the path.

    `wrapped`: it came in an HttpBody, and so is the response.
    """

    request: DecodedRequest
    method: str
    path: Mapping[str, str]
    wrapped: bool = False


class Vertex:
    """Parses requests and runs them. `endpoints` has models by the ids of endpoints: NAME, or NAME/VERSION."""

    def __init__(self, dataplane: DataPlane, platform: AIPlatform, endpoints: Mapping[str, str]) -> None:
        self._dataplane = dataplane
        self._platform = platform
        self._endpoints = endpoints
        self.limits = platform.limits

    def decode_only(self, http: HttpRequest) -> DecodedRequest:
        """Decode a call of the server's only model. Raise `Unavailable` and `InvalidArgument`."""
        decode = partial(self._decode, bytes(http.body), http.headers)
        return DecodedRequest.of(partial(self._find_only, http.permission), decode)

    def _find_only(self, permission: Permission) -> Servable:
        names = self._dataplane.model_names(permission)
        if len(names) != 1:
            raise Unavailable(f"the prediction route requires exactly one model, this server has {len(names)}")
        return self._dataplane.servable(permission, names[0])

    def model_of(self, http: HttpRequest) -> str:
        """Return the name of the model that a path's endpoint stands for."""
        return self._target(http)[0]

    def _target(self, http: HttpRequest) -> tuple[str, str]:
        endpoint = http.path["endpoint"]
        name, _, version = self._endpoints.get(endpoint, endpoint).partition("/")
        return name, version

    def decode_wrapped(self, method: str, http: HttpRequest) -> EndpointRequest:
        """Decode what `decode_endpoint` does, or what has it in an HttpBody. Raise as `decode_endpoint`."""
        body, content_type = unwrapped(bytes(http.body), self.limits)
        headers = {**http.headers, "content-type": content_type} if content_type else http.headers
        received = self.decode_endpoint(method, replace(http, body=body, headers=headers))
        return replace(received, wrapped=content_type is not None)

    def decode_endpoint(self, method: str, http: HttpRequest) -> EndpointRequest:
        """Decode a call of an endpoint. Raise `UnknownResource` and `InvalidArgument`."""
        decode = partial(self._decode, bytes(http.body), http.headers, doubles=method == PREDICT)
        named = bool(self._target(http)[1])
        request = DecodedRequest.of(partial(self._find, http), decode, names_version=named)
        return EndpointRequest(request, method, http.path)

    def _find(self, http: HttpRequest) -> Servable:
        name, version = self._target(http)
        return self._platform.find(http.permission, name, version, f"endpoint '{_resource(http.path)}'")

    def decode_get(self, http: HttpRequest) -> dict[str, Any]:
        """Return the description of an endpoint and its one model. Raise `UnknownResource`."""
        servable = self._find(http)
        name, path = servable.name, http.path
        model = {
            "id": name,
            "model": _model(path, name),
            "displayName": name,
            "modelVersionId": str(servable.version),
        }
        return {
            "name": _resource(path),
            "displayName": name,
            "deployedModels": [model],
            "trafficSplit": {name: 100},
        }

    def _decode(
        self, body: bytes, headers: Mapping[str, str], servable: Servable, *, doubles: bool = False
    ) -> PredictCall:
        """Decode a body. `doubles`: the client knows no integers, and writes 1 as 1.0."""
        if servable.model.speaks_http:
            return http_call(body, headers)
        if servable.model.speaks_json:
            instances, members = split_keywords(read_object(body, self.limits))
            return PredictCall(json_inputs(instances, object_of(members.get(PARAMETERS))), speaks_json=True)
        if doubles and _takes_integers(servable):
            body = _TOKEN.sub(_as_integer, body)
        call = decode_instances(
            body, self.limits, servable, lambda members: object_of(members.get(PARAMETERS)), columns=not doubles
        )
        return replace(call, named=False)

    async def predict(self, received: EndpointRequest, call: Call) -> Predicted:
        """Run a call of an endpoint. Raise `ServingError`, also for a model's own HTTP response with an error."""
        predicted = await self._platform.predict(received.request, call)
        if predicted.request.speaks_http and (response := predicted.encode()).status >= 400:
            raise error_of(response.status, bytes(response.body))
        return predicted

    async def predict_only(self, received: DecodedRequest, call: Call) -> Predicted:
        """Run a call of the server's only model. Raise `ServingError`."""
        return await self._platform.predict(received, call)

    async def require_ready(self, _: HttpRequest, __: Call) -> None:
        """Raise `Unavailable` unless the server is ready."""
        if not self._dataplane.ready:
            raise Unavailable("the server is not ready")


def _resource(path: Mapping[str, str]) -> str:
    return f"projects/{path['project']}/locations/{path['location']}/endpoints/{path['endpoint']}"


def _model(path: Mapping[str, str], name: str) -> str:
    return f"projects/{path['project']}/locations/{path['location']}/models/{name}"


def _takes_integers(servable: Servable) -> bool:
    return any("INT" in spec.datatype for signature in servable.signatures.values() for spec in signature.inputs)


def _as_integer(match: re.Match[bytes]) -> bytes:
    """Return a whole number without its point and exponent, anything else as it is."""
    text = match[0]
    if text.isdigit() or text.startswith(b'"') or len(text) > _MAX_NUMBER:
        return text
    number = float(text)
    return b"%d" % number if number.is_integer() else text


def encode_endpoint(predicted: Predicted, received: EndpointRequest) -> HttpResponse:
    """Return the response over REST. Raise `Internal` for a model's own response that no members fit in."""
    response, path = predicted.encode(), received.path
    name, version = predicted.response.model_name, predicted.response.model_version
    if received.method == PREDICT:
        body = bytes(response.body).rstrip()
        if not (body.startswith(b"{") and b":" in body):
            raise Internal(f"{name} answered {body[:80]!r}, expected a JSON object with 'predictions'")
        deployed = {"deployedModelId": name, "model": _model(path, name)}
        members = dumps({**deployed, "modelDisplayName": name, "modelVersionId": version})
        return replace(response, body=body[:-1] + b", " + members[1:], content_type="application/json")
    if received.wrapped:
        data = base64.b64encode(bytes(response.body)).decode()
        message: Any = {CONTENT_TYPE: response.content_type, DATA: data}
        return HttpResponse(dumps([message] if received.method == STREAM else message))
    headers = {"X-Vertex-AI-Endpoint-Id": path["endpoint"], "X-Vertex-AI-Deployed-Model-Id": name}
    return replace(response, headers={**dict(response.headers), **headers})


def vertex_routes(vertex: Vertex) -> list[Route]:
    """Return the methods of endpoints that are served, and a row that refuses everything else of a project's."""
    predictions = [
        predict_route(
            f"{version}/{ENDPOINT}:{method}",
            partial(vertex.decode_endpoint if method == PREDICT else vertex.decode_wrapped, method),
            vertex.predict,
            encode_endpoint,
            vertex.limits,
            api.ENDPOINT if method == PREDICT else api.RAW_ENDPOINT,
            encode_error=_encode_googles,
            encode_refusal=encode_googles,
            model_of=vertex.model_of,
            name=f"endpoints.{method}",
        )
        for version in APIS
        for method in (PREDICT, RAW, STREAM)
    ]
    described = [
        Route(
            "GET",
            f"{version}/{ENDPOINT}",
            Operation.METADATA,
            vertex.decode_get,
            _as_it_is,
            lambda described, _: HttpResponse(dumps(described)),
            encode_error=_encode_googles,
            encode_refusal=encode_googles,
            model_of=vertex.model_of,
            name="endpoints.get",
            documented=(api.GET_ENDPOINT,),
        )
        for version in APIS
    ]
    others = {
        "/v1/projects/{project:[^/]+}/locations/{path:(?s:.*)}": _encode_googles,
        "/v1beta1/projects/{path:(?s:.*)}": _encode_googles,
        "/v1/projects/{path:(?s:.*)}": encode_platform_error,
    }
    return (
        predictions
        + described
        + [
            Route("*", path, Operation.PUBLIC, _refuse, None, _nothing, encode_error=encode, name="projects")
            for path, encode in others.items()
        ]
    )


def container_routes(vertex: Vertex, predict_path: str, health_path: str) -> list[Route]:
    """Return the routes that Vertex AI names in the container's environment; none for an empty path."""
    routes = []
    if predict_path:
        routes.append(
            predict_route(
                predict_path,
                vertex.decode_only,
                vertex.predict_only,
                lambda predicted, _: predicted.encode(),
                vertex.limits,
                api.VERTEX,
                encode_error=encode_detail,
            )
        )
    if health_path:
        routes.append(
            Route(
                "GET",
                health_path,
                Operation.HEALTH,
                lambda http: http,
                vertex.require_ready,
                lambda *_: HttpResponse(b"{}"),
                encode_error=encode_detail,
                documented=(api.VERTEX_HEALTH,),
            )
        )
    return routes


def _refuse(http: HttpRequest) -> None:
    raise NotFound(
        f"{http.verb} {http.target.partition('?')[0]} is not supported; of a project there are POST "
        "…/models/MODEL[/versions/VERSION]:predict and "
        "…/locations/LOCATION/endpoints/ENDPOINT:predict, :rawPredict and :streamRawPredict"
    )


async def _as_it_is(decoded: Any, _: Call) -> Any:
    return decoded


def _nothing(_: Any, __: Any) -> HttpResponse:
    return HttpResponse(b"")


def _encode_googles(error: ServingError, _: Mapping[str, str]) -> HttpResponse:
    return encode_googles(error)


def encode_detail(error: ServingError, _: Mapping[str, str]) -> HttpResponse:
    """Encode an error as Vertex AI's own prediction containers do (tfs 7.7)."""
    return HttpResponse(dumps({"detail": error.message}), status_of(error))
