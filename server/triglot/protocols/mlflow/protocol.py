"""MLflow's scoring server: /invocations, /ping and /version, for every model that is served."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial

from triglot.core.call import Call
from triglot.core.errors import Code, InvalidArgument, ServingError, Unavailable
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation, Permission
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane.dataplane import DataPlane
from triglot.model.signature import INSTANCES
from triglot.protocols.api_operation import STRING, TEXT, ApiOperation, json_body, record, ref
from triglot.protocols.json.dialect import SIZE_OPTION, JsonLimits
from triglot.protocols.mlflow.forms import (
    INPUTS,
    RECORDS,
    SPLIT,
    Invocation,
    Target,
    encode_predictions,
    inputs_of,
    parse_csv,
    parse_json,
)
from triglot.protocols.protocol import Context, Protocol
from triglot.protocols.rows import Route
from triglot.scheduling.servable import Servable

VERSION = b"3.17.2"
"""The release of MLflow whose server answers in the same way."""
JSON_TYPE, CSV_TYPE = "application/json", "text/csv"
PLAIN_TYPE = "text/plain; charset=utf-8"
FORM_TYPE = "application/x-www-form-urlencoded"
"""What curl says where its user says nothing."""
PLATFORM = "mlflow"
LONG_BYTES = 64 * 1024
"""Bodies from this size are converted off the event loop."""
ELEMENT_TEXT = 16
"""Estimated length of an element's text."""
STATUS = {
    Code.INVALID_ARGUMENT: (400, "INVALID_PARAMETER_VALUE"),
    Code.FAILED_PRECONDITION: (400, "INVALID_STATE"),
    Code.OUT_OF_RANGE: (400, "INVALID_PARAMETER_VALUE"),
    Code.UNAUTHENTICATED: (401, "UNAUTHENTICATED"),
    Code.PERMISSION_DENIED: (403, "PERMISSION_DENIED"),
    Code.NOT_FOUND: (404, "RESOURCE_DOES_NOT_EXIST"),
    Code.RESOURCE_EXHAUSTED: (429, "REQUEST_LIMIT_EXCEEDED"),
    Code.CANCELLED: (499, "CANCELLED"),
    Code.UNIMPLEMENTED: (501, "NOT_IMPLEMENTED"),
    Code.UNAVAILABLE: (503, "TEMPORARILY_UNAVAILABLE"),
    Code.DEADLINE_EXCEEDED: (504, "DEADLINE_EXCEEDED"),
}
"""HTTP's status and MLflow's name for a code; all others are internal errors."""


class UnsupportedType(InvalidArgument):
    """The body has another content type than the known ones."""


@dataclass(frozen=True, slots=True)
class Request:
    """A decoded call of a model; without a name it is the only one. `size` is the body's."""

    model: str
    sent: Invocation
    size: int


class Invocations:
    """Parses requests, and runs them."""

    def __init__(self, dataplane: DataPlane, limits: JsonLimits, *, casts: bool) -> None:
        self._dataplane = dataplane
        self._limits = limits
        self._casts = casts

    def decode(self, http: HttpRequest) -> Request:
        """Decode a body by its content type, JSON if none is given. Raise `InvalidArgument`."""
        body = bytes(http.body)
        kind = _content_type(http.headers.get("content-type", ""))
        sent = parse_csv(body) if kind == CSV_TYPE else parse_json(body, self._limits)
        return Request(http.path.get("model", ""), sent, len(body))

    async def invoke(self, request: Request, call: Call) -> InferenceResponse:
        """Run the model. Raise `ServingError`."""
        with self._dataplane.routed(self._find(request.model, call.permission), call) as servable:
            signature = servable.signatures[servable.default_signature]
            target = Target(signature, servable.model.columns, self._casts)
            convert = partial(inputs_of, request.sent, target)
            long = request.size >= LONG_BYTES
            inputs, parameters = await self._dataplane.off_loop(convert) if long else convert()
            inference = InferenceRequest(servable.name, inputs=inputs, parameters=parameters)
            return await self._dataplane.infer_on(servable, inference, call)

    def _find(self, name: str, permission: Permission) -> Servable:
        names = [name] if name else self._dataplane.model_names(permission)
        if len(names) > 1:  # Beside others, the only one of MLflow's, as in MLServer.
            served = [version.servable for version in self._dataplane.versions(permission)]
            own = {each.name for each in served if each is not None and each.platform == PLATFORM}
            if len(own) == 1:
                names = list(own)
        if len(names) != 1:
            raise InvalidArgument(f"expected the path /invocations/MODEL, as {len(names)} models are served")
        return self._dataplane.servable(permission, names[0])

    async def ping(self, _: object, __: Call) -> None:
        """Raise `Unavailable` unless all models are ready."""
        if not self._dataplane.ready:
            raise Unavailable("not all models are ready")


def mlflow(context: Context) -> Protocol:
    """Return MLflow's rows."""
    limits = context.json_limits
    calls = Invocations(context.dataplane, limits, casts=context.config.mlflow_casts)
    routes = [
        *(
            Route(
                "POST",
                path,
                Operation.INFER,
                calls.decode,
                calls.invoke,
                lambda response, request: HttpResponse(encode_predictions(response, request.sent.form)),
                answer_size=_text_size,
                body_limit=lambda _: limits.size,
                limit_option=SIZE_OPTION,
                encode_error=encode_error,
                name="invocations",
                documented=(INVOKE,),
            )
            for path in ("/invocations", "/invocations/{model}")
        ),
        *(
            Route(
                "GET",
                path,
                Operation.HEALTH,
                lambda _: None,
                calls.ping,
                lambda *_: HttpResponse(b"\n", content_type=PLAIN_TYPE),
                documented=(PING,),
            )
            for path in ("/ping", "/health")
        ),
        Route(
            "GET",
            "/version",
            Operation.PUBLIC,
            lambda _: None,
            _nothing,
            lambda *_: HttpResponse(VERSION, content_type=PLAIN_TYPE),
            documented=(RELEASE,),
        ),
    ]
    return Protocol(routes=[replace(route, protocol="mlflow") for route in routes], schemas=SCHEMAS)


async def _nothing(*_: object) -> None:
    pass


def _content_type(header: str) -> str:
    """Return the content type. Raise `UnsupportedType`."""
    kind, *parameters = [part.strip().lower() for part in header.split(";")]
    if kind == FORM_TYPE:
        return JSON_TYPE
    if kind not in ("", JSON_TYPE, CSV_TYPE) or any(
        part.replace('"', "") not in ("", "charset=utf-8") for part in parameters
    ):
        raise UnsupportedType(f"expected the content type {JSON_TYPE} or {CSV_TYPE}, in UTF-8, got {header!r:.80}")
    return kind


def _text_size(response: InferenceResponse) -> int:
    return ELEMENT_TEXT * sum(output.array.size for output in response.outputs)


def encode_error(error: ServingError, _: Mapping[str, str]) -> HttpResponse:
    """Encode an error in MLflow's form."""
    status, name = STATUS.get(error.code, (500, "INTERNAL_ERROR"))
    if isinstance(error, UnsupportedType):
        status = 415
    return HttpResponse(dumps({"error_code": name, "message": error.message}), status)


# --- OpenAPI ---

SCHEMAS = {
    "Invocation": {
        "type": "object",
        "properties": {
            SPLIT: {"type": "object"},
            RECORDS: {"type": "array", "items": {"type": "object"}},
            INSTANCES: {"type": "array", "items": {}},
            INPUTS: {},
            "params": {"type": "object"},
        },
    },
    "Predictions": record({"predictions": {}}),
    "InvocationError": record({"error_code": STRING, "message": STRING}),
}
_ERROR = json_body(ref("InvocationError"))
INVOKE = ApiOperation(
    "Score data with the only model, or the named one",
    json_body(ref("Predictions")),
    json_body(ref("Invocation")),
    f"As MLflow's scoring server: exactly one of {SPLIT}, {RECORDS}, {INSTANCES}, {INPUTS}; or {CSV_TYPE}.",
    error=_ERROR,
)
PING = ApiOperation("Whether all models are ready", {TEXT: STRING})
RELEASE = ApiOperation("The release of MLflow whose server answers in the same way", {TEXT: STRING})
