"""TensorFlow Serving's REST routes: the calls of its services, with JSON requests and responses (tfs 4).

Strategy: all paths below /v1/ belong to these routes, and one expression per verb parses them, as in TensorFlow
Serving. A request becomes a `RestCall`: what to run, and how to print its result.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
import uuid
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import lru_cache, partial
from typing import Any, TypeVar
from urllib.parse import unquote

from triglot.core.call import Call
from triglot.core.coroutine_work import CoroutineWork
from triglot.core.errors import Code, InvalidArgument, PayloadTooLarge, ServingError
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.model_loading import when_loaded
from triglot.core.operation import Operation, Permission
from triglot.core.running import Defer, Running, Sink
from triglot.core.tensor import Scattered
from triglot.dataplane.dataplane import DataPlane
from triglot.model.signature import DEFAULT_SIGNATURE, ModelMetadata, Signature
from triglot.pb.tfserving import management_pb2, metadata_pb2, model_pb2
from triglot.protocols.api_operation import ApiOperation
from triglot.protocols.json.dialect import DEFAULT_LIMITS, SIZE_OPTION, JsonLimits
from triglot.protocols.rows import DamagedBody, InferenceHandler, InflatedTooLarge, Route
from triglot.protocols.tfserving.codec import ModelSpec, PredictRequest
from triglot.protocols.tfserving.inference import ExamplesRequest
from triglot.protocols.tfserving.json_dialect import encode_json, json_inputs, read_object, split_keywords
from triglot.protocols.tfserving.models import SIGNATURE_DEF, Models, encode_metadata, encode_status
from triglot.protocols.tfserving.openapi import PREDICT, call_operations, get_operations, predict_of
from triglot.protocols.tfserving.rest_examples import (
    advice,
    decode_examples,
    encode_classifications,
    encode_regressions,
)
from triglot.protocols.tfserving.rest_predict import (
    ELEMENT_TEXT,
    PredictBody,
    decode_predict,
    encode_error,
    scatter_predict,
    text_size,
)
from triglot.protocols.tfserving.service import (
    Classification,
    Prediction,
    Predictions,
    Regression,
    called_version,
    find_servable,
)
from triglot.scheduling.servable import Servable

ANY_PATH = "/{path:(?s:.*)}"
PREFIX = "/{v1:(?i:v1)}" + ANY_PATH
MAX_INFLATED = 100 * 1024 * 1024
_ORIGIN = re.compile(r"https?://.*", re.IGNORECASE)
_CORS = {
    "Access-Control-Allow-Origin": "*",
    "Access-Control-Allow-Methods": "POST, GET",
    "Access-Control-Allow-Headers": "Content-Type",
}
STATUS = {
    Code.CANCELLED: 499,
    Code.INVALID_ARGUMENT: 400,
    Code.DEADLINE_EXCEEDED: 504,
    Code.NOT_FOUND: 404,
    Code.ALREADY_EXISTS: 409,
    Code.PERMISSION_DENIED: 403,
    Code.RESOURCE_EXHAUSTED: 429,
    Code.FAILED_PRECONDITION: 400,
    Code.ABORTED: 409,
    Code.OUT_OF_RANGE: 400,
    Code.UNIMPLEMENTED: 501,
    Code.UNAVAILABLE: 503,
    Code.UNAUTHENTICATED: 401,
}
NOT_FOUND_PAGE = b"<HTML><HEAD>\n<TITLE>404 Not Found</TITLE>\n</HEAD><BODY>\n<H1>Not Found</H1>\n</BODY></HTML>\n"


# --- paths ---

CALLS = ("predict", "classify", "regress")
MAX_INT64 = 2**63 - 1
MAX_CACHED = 256
"""Longest path that is cached, in characters."""
_WHICH = r"(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?"
_POST = re.compile(rf"/v1/models/(?P<model>[^/:]+){_WHICH}:(?P<verb>classify|regress|predict)", re.IGNORECASE)
_GET = re.compile(rf"/v1/models(?:/(?P<model>[^/:]+))?{_WHICH}(?:/(?P<metadata>metadata))?", re.IGNORECASE)
_NAMED = re.compile(r"/v1/models/(?P<model>[^/:]+)", re.IGNORECASE)
_SERVER = re.compile(r"^https?://[^/]*", re.IGNORECASE)
T = TypeVar("T")


class VersionTooLarge(InvalidArgument):
    """The version in the path exceeds 64 bits; the response has no body (tfs 0.18)."""


def path_of(http: HttpRequest) -> str:
    """Return the path as sent; unlike in TensorFlow Serving, a query is allowed (tfs 0.20)."""
    path = http.target.partition("?")[0]
    return path if path.startswith("/") else _SERVER.sub("", path)


def _cached(read: Callable[[str], T]) -> Callable[[str], T]:
    """Cache a function of paths: clients send few different ones."""
    known = lru_cache(maxsize=512)(read)
    return lambda path: known(path) if len(path) <= MAX_CACHED else read(path)


@_cached
def model_of_path(path: str) -> str:
    """Return the model in a path, "" if it names none."""
    match = _NAMED.match(path)
    return unquote(match["model"]) if match else ""


@_cached
def parse_call(path: str) -> tuple[str, ModelSpec] | None:
    """Return which of `CALLS` a path names, and its model; None if it matches neither.

    Raise `VersionTooLarge`.
    """
    match = _POST.fullmatch(path)
    if match is None or match["verb"] not in CALLS:
        return None
    return match["verb"], spec_of_match(match)


def match_get(path: str) -> re.Match[str] | None:
    """Match a GET path: `model`, its version or label, and `metadata`; None if it does not match."""
    return _GET.fullmatch(path)


def spec_of_match(match: re.Match[str]) -> ModelSpec:
    """Return the ModelSpec of a matched path. Raise `VersionTooLarge`."""
    version = None if match["version"] is None else int(match["version"].lstrip("0")[:20] or "0")
    if version is not None and version > MAX_INT64:
        raise VersionTooLarge(f"Failed to parse version: {version}")
    label = None if match["label"] is None else unquote(match["label"])
    return ModelSpec(unquote(match["model"]), version, label)


# --- CloudEvents ---

STRUCTURED = "application/cloudevents+json"
RESPONSE_TYPE = "io.kserve.inference.response"
SOURCE_PREFIX = "io.kserve.inference."
_REQUIRED = ("specversion", "id", "source", "type")
_VERSIONS = ("1.0", "0.3")
_HEADERS = frozenset(f"ce-{name}" for name in _REQUIRED)


@dataclass(frozen=True, slots=True)
class Event:
    """A request's event: its `data`, the request itself, and whether it was structured."""

    data: bytes
    structured: bool

    def response(self, model: str, body: bytes | Scattered) -> HttpResponse:
        """Return the event that answers this one, with a model's response as its data."""
        attributes = {
            "specversion": "1.0",
            "id": str(uuid.uuid4()),
            "source": SOURCE_PREFIX + model,
            "type": RESPONSE_TYPE,
            "time": datetime.now(UTC).isoformat(),
        }
        if not self.structured:
            return HttpResponse(body, headers={f"ce-{name}": value for name, value in attributes.items()})
        head = json.dumps({**attributes, "datacontenttype": "application/json"}).encode()
        pieces = body.pieces if isinstance(body, Scattered) else [body]
        return HttpResponse(Scattered([head[:-1], b', "data": ', *pieces, b"}"]), content_type=STRUCTURED)


def event_of(http: HttpRequest, limits: JsonLimits) -> Event | None:
    """Return the event in a request, None if it is a plain one.

    Raise `InvalidArgument` for an event without a required attribute, of another specification or without data.
    """
    headers = http.headers
    if headers.keys() >= _HEADERS:
        _check({name: headers[f"ce-{name}"] for name in _REQUIRED})
        return Event(bytes(http.body), structured=False)
    if headers.get("content-type", "").partition(";")[0].strip().lower() != STRUCTURED:
        return None
    members = read_object(bytes(http.body), limits)
    _check(members)
    return Event(_data(members), structured=True)


def _check(attributes: Mapping[str, Any]) -> None:
    for name in _REQUIRED:
        value = attributes.get(name)
        if not isinstance(value, str) or not value:
            raise InvalidArgument(f"CloudEvent: expected the attribute '{name}' as a string, got {value!r:.60}")
    if attributes["specversion"] not in _VERSIONS:
        got = f"{attributes['specversion']!r:.60}"
        raise InvalidArgument(f"CloudEvent: specversion: expected one of {', '.join(_VERSIONS)}, got {got}")


def _data(members: Mapping[str, Any]) -> bytes:
    """Return the data of a structured event: JSON, or base64 of it."""
    if (data := members.get("data")) is not None:
        return json.dumps(data).encode()
    encoded = members.get("data_base64")
    if not isinstance(encoded, str):
        raise InvalidArgument("CloudEvent: expected 'data', or 'data_base64', got none")
    try:
        return base64.b64decode(encoded, validate=True)
    except binascii.Error as error:
        raise InvalidArgument(f"CloudEvent: data_base64: expected base64, got something else: {error}") from None


# --- requests ---


@dataclass(slots=True)
class RestCall:
    """A decoded request: `run` it, and `encode` the result."""

    run: Callable[[Call], Coroutine[Any, Any, Any]]
    encode: Callable[[Any], bytes | Scattered]
    event: Event | None = None


@dataclass(slots=True)
class PredictCall:
    """A Predict request, `decoded` from its `body` for this `servable`."""

    spec: ModelSpec
    body: bytes
    decoded: PredictBody
    servable: Servable
    event: Event | None = None
    request: PredictRequest | None = None
    """The same as gRPC has it, once it was started."""

    def encode(self, prediction: Prediction) -> bytes | Scattered:
        """Return the response's body."""
        return scatter_predict(prediction.response.outputs, self.decoded.row)

    def as_grpc(self) -> PredictRequest:
        """Return the request as gRPC has it."""
        name = self.decoded.signature_name
        return PredictRequest(replace(self.spec, signature_name=name) if name else self.spec, self.decoded.inputs)


class RestApi(InferenceHandler):
    """Parses requests, and runs those that models answer.

    `kserve_v1`: GET /v1/models returns KServe V1's list instead of an error, and `:predict` takes CloudEvents.
    """

    def __init__(
        self,
        dataplane: DataPlane,
        predictions: Predictions,
        models: Models,
        *,
        kserve_v1: bool,
        limits: JsonLimits = DEFAULT_LIMITS,
    ) -> None:
        self.limits = limits
        self._dataplane = dataplane
        self._predictions = predictions
        self._models = models
        self.kserve_v1 = kserve_v1

    def decode_get(self, http: HttpRequest) -> RestCall:
        """Decode a request for a model's status or metadata. Raise `InvalidArgument`."""
        match = match_get(path_of(http))
        if match is None:
            raise _malformed(http)
        if match["model"] is None:
            if self.kserve_v1 and not (match["version"] or match["label"] or match["metadata"]):
                return RestCall(self._list_models, dumps)
            raise InvalidArgument("Missing model name in request.")
        spec = _spec_message(spec_of_match(match))
        if match["metadata"] == "metadata":
            request = metadata_pb2.GetModelMetadataRequest(model_spec=spec, metadata_field=[SIGNATURE_DEF])
            return RestCall(partial(self._models.metadata, request), encode_metadata)
        status = management_pb2.GetModelStatusRequest(model_spec=spec)
        return RestCall(partial(self._models.status, status), encode_status)

    async def _list_models(self, call: Call) -> dict[str, list[str]]:
        return {"models": self._dataplane.model_names(call.permission)}

    def decode_post(self, http: HttpRequest) -> RestCall | PredictCall:
        """Decode a call of a model. Raise `InvalidArgument`, and as the body's codec."""
        found = parse_call(path_of(http))
        if found is None:
            raise _malformed(http)
        verb, spec = found
        if not http.permission.covers_all:
            http.permission.check_model(spec.name)
        if verb == PREDICT:
            event = event_of(http, self.limits) if self.kserve_v1 else None
            rest = self._predict(http.permission, spec, bytes(http.body) if event is None else event.data)
            rest.event = event
            return rest
        return (self._classify if verb == "classify" else self._regress)(spec, bytes(http.body))

    def _predict(self, permission: Permission, spec: ModelSpec, body: bytes) -> RestCall | PredictCall:
        find = partial(find_servable, self._dataplane, permission, spec)
        try:
            servable = find()
        except ServingError:
            servable = None  # Errors in the body come before errors about the model.
        if servable is not None and servable.model.speaks_json:
            request = PredictRequest(spec, json_inputs(*split_keywords(read_object(body, self.limits))))
            return RestCall(partial(self._predictions.predict, request), _encode_json)
        decoded = decode_predict(body, lambda name: _signature(servable or find(), name), self.limits)
        return PredictCall(spec, body, decoded, servable or find())

    # --- InferenceHandler, for requests from `decode_post` ---

    def start(self, rest: RestCall | PredictCall, call: Call, sink: Sink, defer: Defer | None = None) -> Running:
        if isinstance(rest, RestCall):
            return CoroutineWork(when_loaded(call, rest.run, call), sink)
        call.model_name = rest.spec.name
        servable = rest.servable
        if servable.drains:  # It was unloaded while the body was decoded.
            servable = find_servable(self._dataplane, call.permission, rest.spec)
        servable = called_version(self._dataplane, rest.spec, servable, call)
        if servable is not rest.servable:
            if _is_outdated(rest, servable):
                return CoroutineWork(when_loaded(call, self._predict_again, rest, servable, call), sink)
            rest.servable = servable
        call.model_version = rest.servable.version
        rest.request = rest.as_grpc()
        return self._predictions.start_on(rest.servable, rest.request, call, sink, defer)

    async def _predict_again(self, rest: PredictCall, servable: Servable, call: Call) -> Prediction:
        if servable.drains:
            servable = find_servable(self._dataplane, call.permission, rest.spec)
        call.model_version = servable.version
        with servable:
            if _is_outdated(rest, servable):
                decode = partial(decode_predict, rest.body, partial(_signature, servable), self.limits)
                rest.decoded = await self._dataplane.off_loop(decode)
            return await self._predictions.predict_on(servable, rest.as_grpc(), call)

    def answer(self, response: Any, rest: RestCall | PredictCall) -> Any:
        if isinstance(rest, PredictCall) and rest.request is not None:
            return self._predictions.answer(response, rest.request)
        return response

    def map_error(self, error: ServingError, rest: RestCall | PredictCall, call: Call) -> ServingError:
        if isinstance(rest, PredictCall) and rest.request is not None:
            return self._predictions.map_error(error, rest.request, call)
        error.message += advice(error.message)
        return error

    def _classify(self, spec: ModelSpec, body: bytes) -> RestCall:
        request = self._examples(spec, body)
        return RestCall(partial(self._predictions.classify, request), _encode_classification)

    def _regress(self, spec: ModelSpec, body: bytes) -> RestCall:
        request = self._examples(spec, body)
        return RestCall(partial(self._predictions.regress, request), _encode_regression)

    def _examples(self, spec: ModelSpec, body: bytes) -> ExamplesRequest:
        decoded = decode_examples(body, self.limits)
        return ExamplesRequest(replace(spec, signature_name=decoded.signature_name), decoded.examples)


def _signature(servable: Servable, name: str) -> Signature:
    name = name or DEFAULT_SIGNATURE
    if name not in servable.signatures:
        why = servable.why_unservable(name)
        raise InvalidArgument(f'Serving signature name: "{name}" not found in signature def{why}')
    return servable.signatures[name]


def _is_outdated(rest: PredictCall, servable: Servable) -> bool:
    """Whether the version that serves now has other inputs than the one that the body was decoded for."""
    name = rest.decoded.signature_name or DEFAULT_SIGNATURE
    current, than = servable.signatures.get(name), rest.servable.signatures[name]
    if current is None or current is than:
        return False
    return (current.any_tensors, *current.inputs) != (than.any_tensors, *than.inputs)


# --- rows ---


def tfserving_routes(api: RestApi, *, cors: bool) -> list[Route]:
    """Return the rows of all paths below /v1/."""
    infer, metadata, public = Operation.INFER, Operation.METADATA, Operation.PUBLIC
    headers = _CORS if cors else {}

    def route(
        verb: str,
        operation: Operation,
        decode: Callable[[HttpRequest], RestCall | PredictCall],
        path: str = PREFIX,
        name: str = "models",
        documented: tuple[ApiOperation, ...] = (),
        of_model: Callable[[ModelMetadata, str], ApiOperation | None] | None = None,
    ) -> Route:
        is_inference = operation is infer
        return Route(
            verb,
            path,
            operation,
            decode,
            None if is_inference else _run,
            _encode,
            model_of=_model,
            answer_size=_answer_size,
            body_limit=lambda _: api.limits.size,
            limit_option=SIZE_OPTION,
            coding=_coding,
            inflate_limit=MAX_INFLATED,
            encode_error=encode_failure,
            headers=headers,
            any_origin=cors,
            name=name,
            inference=api if is_inference else None,
            documented=documented,
            of_model=of_model,
        )

    return [
        route("GET", metadata, api.decode_get, documented=get_operations(kserve_v1=api.kserve_v1)),
        # A row per call, so that telemetry can name it; of a malformed request the call is unknown.
        *(
            route(
                "POST",
                infer,
                api.decode_post,
                f"{PREFIX}:{{verb:(?i:{name})}}",
                name,
                call_operations(name),
                predict_of if name == PREDICT else None,
            )
            for name in CALLS
        ),
        route("POST", infer, api.decode_post),
        Route("OPTIONS", PREFIX, public, _is_cross_origin, _allow, _encode_options, headers=headers),
        route("*", public, _refuse),
    ]


def not_found_route() -> Route:
    """Return a route for all unmatched paths that answers as TensorFlow Serving's HTTP library does."""
    return Route("*", ANY_PATH, Operation.PUBLIC, lambda _: True, _allow, _encode_not_found)


def _model(http: HttpRequest) -> str:
    return model_of_path(path_of(http))


async def _run(rest: RestCall, call: Call) -> Any:
    return await rest.run(call)


def _encode(answer: Any, rest: RestCall | PredictCall) -> HttpResponse:
    body = rest.encode(answer)
    return HttpResponse(body) if rest.event is None else rest.event.response(answer.response.model_name, body)


def _coding(header: str) -> str:
    """Return the coding: only gzip is recognised, anywhere in the header (tfs 4.1)."""
    return "gzip" if "gzip" in header.lower() else "identity"


async def _allow(answer: bool, _: Call) -> bool:
    return answer


def _is_cross_origin(http: HttpRequest) -> bool:
    return _ORIGIN.fullmatch(http.headers.get("origin", "")) is not None


def _encode_options(allowed: bool, _: Any) -> HttpResponse:
    return HttpResponse(b"", 200 if allowed else 400)


def _encode_not_found(_: Any, __: Any) -> HttpResponse:
    return HttpResponse(NOT_FOUND_PAGE, 404, "text/html", {"Connection": "close"})


def _refuse(http: HttpRequest) -> RestCall:
    raise _malformed(http)


def _malformed(http: HttpRequest) -> InvalidArgument:
    return InvalidArgument(f"Malformed request: {http.verb} {http.target}")


def _spec_message(spec: ModelSpec) -> model_pb2.ModelSpec:
    message = model_pb2.ModelSpec(name=spec.name)
    if spec.version is not None:
        message.version.value = spec.version
    elif spec.label:
        message.version_label = spec.label
    return message


def _encode_json(prediction: Prediction) -> bytes:
    return encode_json(prediction.response)


def _encode_classification(answer: Classification) -> bytes:
    return encode_classifications(answer.examples)


def _encode_regression(answer: Regression) -> bytes:
    return encode_regressions(answer.values)


def _answer_size(answer: Any) -> int:
    if isinstance(answer, Prediction):
        return text_size(answer.response.outputs)
    if isinstance(answer, Classification):
        return sum(map(len, answer.examples)) * ELEMENT_TEXT
    return 0


def encode_failure(error: ServingError, _: Mapping[str, str]) -> HttpResponse:
    """Encode an error with TensorFlow Serving's status and form (tfs 4.1)."""
    if isinstance(error, VersionTooLarge):
        return HttpResponse(b"", 400)
    if isinstance(error, DamagedBody | InflatedTooLarge):
        return HttpResponse(encode_error("JSON Parse error: The document is empty"), 400)
    return HttpResponse(encode_error(error.message), status_of(error))


def status_of(error: ServingError) -> int:
    """Return the HTTP status of an error (tfs 4.1)."""
    return 413 if isinstance(error, PayloadTooLarge) else STATUS.get(error.code, 500)
