"""The traffic of models, as a protocol of the server: TrafficService over gRPC, and its REST routes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from google.protobuf import json_format

from triglot import parts
from triglot.config.options import ConfigError
from triglot.core.errors import InvalidArgument
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation
from triglot.core.tensor import MessageBytes
from triglot.dataplane.request_path import RequestRecorder
from triglot.model.config import Recording
from triglot.pb.triglot import traffic_pb2 as pb
from triglot.protocols.api_operation import BOOLEAN, OBJECT, STRING, ApiOperation, array, json_body, record, ref
from triglot.protocols.json.text import read_body
from triglot.protocols.protocol import Context, Protocol
from triglot.protocols.rows import Kind, Method, Route, Service
from triglot.protocols.traffic.router import Traffic, TrafficChange
from triglot.protocols.wire import parse_control, serialize
from triglot.repository.config.traffic import traffic_settings
from triglot.telemetry.calls import Observer

PATH = "/v2/models/{model}/traffic"
SERVICE = "triglot.TrafficService"
PROTOCOL = "traffic"
KEYS = ("traffic", "sticky", "shadow", "reset")


def traffic(context: Context) -> Protocol:
    """Return the rows."""
    rules = Traffic(context.dataplane, context.telemetry, _samples(context))
    read, change = Operation.STATISTICS, Operation.MODEL_CONTROL
    service = Service(
        SERVICE,
        (
            Method("GetTraffic", Kind.UNARY, read, _decode_get, rules.read, _encode),
            Method("SetTraffic", Kind.UNARY, change, _decode_set, rules.change, _encode),
        ),
        PROTOCOL,
    )
    routes = [
        Route(
            verb,
            PATH,
            operation,
            decode,
            call,
            lambda document, _: HttpResponse(dumps(document)),
            protocol=PROTOCOL,
            documented=(documented,),
        )
        for verb, operation, decode, call, documented in (
            ("GET", read, _decode_rest_get, rules.read, READ),
            ("POST", change, _decode_rest_set, rules.change, CHANGE),
        )
    ]
    return Protocol([service], routes, SCHEMAS)


def _samples(context: Context) -> RequestRecorder | None:
    """Return what records calls that a shadow answers otherwise, if the configuration wants them recorded.

    Raise `ConfigError`.
    """
    config, control = context.config, context.dataplane.control
    if not config.shadow_samples:
        return None
    try:
        make: Callable[..., RequestRecorder] = parts.load("observer", "request records")
    except parts.MissingPart as error:
        raise ConfigError(f"shadow_samples: {error}") from error
    recorder = make(
        Recording(config.shadow_samples, 1.0),
        suffix="" if control.single_process else f"-w{control.number}",
        max_bytes=config.request_log_file_size,
        max_files=config.request_log_files,
    )
    context.telemetry.observers.append(_Closing(recorder))
    return recorder


class _Closing(Observer):
    """Closes a recorder with the other observers; it sees no calls."""

    __slots__ = ("_recorder",)

    def __init__(self, recorder: RequestRecorder) -> None:
        self._recorder = recorder

    def close(self) -> None:
        """See `Observer`."""
        self._recorder.close()


def _decode_get(data: MessageBytes) -> TrafficChange:
    return TrafficChange(parse_control(pb.GetTrafficRequest, data).model_name)


def _decode_set(data: MessageBytes) -> TrafficChange:
    request = parse_control(pb.SetTrafficRequest, data)
    fields: dict[str, Any] = {"traffic": dict(request.traffic)}
    if request.HasField("sticky"):
        fields["sticky"] = request.sticky
    if request.HasField("shadow"):
        shadow = request.shadow
        fields["shadow"] = None
        if shadow.percent:
            fields["shadow"] = {"version": shadow.version, "model": shadow.model, "percent": shadow.percent}
            if shadow.HasField("tolerance"):
                fields["shadow"]["tolerance"] = shadow.tolerance
    return _change(request.model_name, fields, reset=request.reset)


def _encode(document: dict[str, Any]) -> bytes:
    reply = pb.TrafficReply()
    json_format.ParseDict(document, reply.traffic)
    return serialize(reply)


def document_of(reply: pb.TrafficReply) -> dict[str, Any]:
    """Return what a reply over gRPC holds."""
    document: dict[str, Any] = json_format.MessageToDict(reply.traffic)
    return document


def _decode_rest_get(http: HttpRequest) -> TrafficChange:
    return TrafficChange(http.path["model"])


def _decode_rest_set(http: HttpRequest) -> TrafficChange:
    fields = read_body(bytes(http.body), "", dict)
    for key in fields:
        if key not in KEYS:
            raise InvalidArgument(f"unexpected key '{key:.100}', expected {', '.join(KEYS)}")
    reset = fields.pop("reset", False)
    if not isinstance(reset, bool):
        raise InvalidArgument(f"reset: expected true or false, got {reset!r:.100}")
    return _change(http.path["model"], fields, reset=reset)


def _change(name: str, fields: Mapping[str, Any], *, reset: bool) -> TrafficChange:
    """Return the change. Raise `InvalidArgument`."""
    try:
        settings = traffic_settings(fields)
    except ValueError as error:
        raise InvalidArgument(str(error)) from None
    shadow = settings.shadow
    if shadow is not None and shadow.address:
        raise InvalidArgument(
            "shadow: address: only the model's versions.toml may send its calls to another server"
        )
    return TrafficChange(
        name,
        settings.weights,
        settings.sticky if fields.get("sticky") is not None else None,
        shadow,
        ends_shadow="shadow" in fields and shadow is None,
        reset=reset,
    )


# --- OpenAPI ---

SCHEMAS = {
    "Traffic": record(
        {
            "model": STRING,
            "traffic": OBJECT,
            "sticky": STRING,
            "shadow": {"type": ["object", "null"]},
            "rollback": {"type": ["object", "null"]},
            "set_by": STRING,
            "versions": array(OBJECT),
        }
    ),
    "TrafficChange": record(
        {}, {"traffic": OBJECT, "sticky": STRING, "shadow": {"type": ["object", "null"]}, "reset": BOOLEAN}
    ),
}
READ = ApiOperation("How a model's calls are divided, and what its versions did", json_body(ref("Traffic")))
CHANGE = ApiOperation(
    "Change how a model's calls are divided",
    json_body(ref("Traffic")),
    json_body(ref("TrafficChange")),
    "`traffic` has percentages by version, and the other versions share the rest.",
)
