"""TraceSetting, and its REST routes: which requests are traced, and how (spec 1.3, 3.11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelNotFound
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation
from triglot.core.tensor import MessageBytes
from triglot.dataplane.control import TRACE_SETTINGS, Arguments
from triglot.dataplane.dataplane import DataPlane
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.json.dialect import type_name
from triglot.protocols.json.text import read_body
from triglot.protocols.kserve.extension import MODEL_PATHS
from triglot.protocols.kserve.openapi import SET_TRACE, TRACE
from triglot.protocols.rows import Kind, Method, Route
from triglot.protocols.wire import parse_control, serialize
from triglot.telemetry.trace_settings import LEVEL

PATHS = ("/v2/trace/setting", *[f"{path}/trace/setting" for path in MODEL_PATHS])
"""REST paths. A version's settings are its model's, as in Triton."""
Settings = Mapping[str, Sequence[str]]


@dataclass(frozen=True, slots=True)
class TraceChange:
    """New values by key, None to reset one. `model` is empty for the server's settings.

    `version`: a version that the model has to have, if not empty.
    """

    model: str = ""
    version: str = ""
    settings: Mapping[str, Sequence[str] | None] = field(default_factory=dict)


class TraceSetting:
    """The trace settings of the server and of single models, by gRPC and by REST."""

    names: Sequence[str] = ("trace",)

    def __init__(self, dataplane: DataPlane) -> None:
        self._dataplane = dataplane
        dataplane.control.register_action(TRACE_SETTINGS, self._change)

    async def change(self, change: TraceChange, call: Call) -> Settings:
        """Change settings; returns all settings as they are then (spec 3.11). The server's apply to all models.

        Raise `ModelNotFound`, and `InvalidArgument` and `Unimplemented` for settings that cannot be changed.
        """
        call.subject = change.model
        if change.model:
            call.permission.check_model(change.model)
            if not self._dataplane.knows(call.permission, change.model):
                raise ModelNotFound(f"Request for unknown model: '{change.model}' is not found")
        elif change.settings:
            call.permission.check_all_models()
        if change.version:
            # Raises if there is no such version.
            self._dataplane.model_ready(call.permission, change.model, change.version)
        if change.settings:
            arguments = {"model": change.model, "settings": change.settings}
            await self._dataplane.control.act(TRACE_SETTINGS, arguments)
        return self._dataplane.tracer.settings(change.model)

    async def _change(self, arguments: Arguments) -> None:
        self._dataplane.tracer.update(arguments["settings"], arguments["model"])

    def methods(self) -> list[Method]:
        return [Method("TraceSetting", Kind.UNARY, Operation.TRACE, _decode, self.change, _encode)]

    def routes(self) -> list[Route]:
        return [
            Route(verb, path, operation, decode, self.change, _encode_rest, documented=(documented,))
            for path in PATHS
            for verb, operation, decode, documented in (
                ("GET", Operation.TRACE_STATUS, _decode_get, TRACE),
                ("POST", Operation.TRACE, _decode_post, SET_TRACE),
            )
        ]


def _decode(data: MessageBytes) -> TraceChange:
    request = parse_control(pb.TraceSettingRequest, data)
    settings = {key: tuple(setting.value) or None for key, setting in request.settings.items()}
    return TraceChange(request.model_name, settings=settings)


def _encode(settings: Settings) -> bytes:
    value = pb.TraceSettingResponse.SettingValue
    return serialize(
        pb.TraceSettingResponse(settings={key: value(value=values) for key, values in settings.items()})
    )


def _decode_get(http: HttpRequest) -> TraceChange:
    return TraceChange(http.path.get("model", ""), http.path.get("version", ""))


def _decode_post(http: HttpRequest) -> TraceChange:
    return TraceChange(http.path.get("model", ""), http.path.get("version", ""), read_settings(http, _texts))


def read_settings(http: HttpRequest, read: Any) -> dict[str, Any]:
    """Return the settings in a body, each converted by `read(key, value)`, or None if it is null.

    Raise `InvalidArgument` for a body that is not a JSON object, including an empty one.
    """
    if not http.body:
        raise InvalidArgument("the request has no body, expected a JSON object of settings")
    fields = read_body(bytes(http.body), "", dict)
    return {key: None if value is None else read(key, value) for key, value in fields.items()}


def _texts(key: str, value: Any) -> tuple[str, ...] | None:
    if isinstance(value, list) and key == LEVEL:
        return tuple(map(partial(_text, key), value)) or None
    return (_text(key, value),)


def _text(key: str, value: Any) -> str:
    # Triton's clients send strings; a number is accepted as well.
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    if not isinstance(value, str):
        raise InvalidArgument(f"{key[:100]}: expected a string, got {type_name(value)}")
    return value


def _encode_rest(settings: Settings, _: Any) -> HttpResponse:
    return HttpResponse(dumps({key: values if key == LEVEL else values[0] for key, values in settings.items()}))
