"""LogSettings, and its REST routes: what the server logs (spec 1.3, 3.11)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument
from triglot.core.fast_json import dumps
from triglot.core.http import HttpRequest, HttpResponse
from triglot.core.operation import Operation
from triglot.core.tensor import MessageBytes
from triglot.dataplane.control import LOG_SETTINGS, Arguments, Control
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.json.dialect import type_name
from triglot.protocols.kserve.openapi import LOG, SET_LOG
from triglot.protocols.kserve.trace_settings import read_settings
from triglot.protocols.rows import Kind, Method, Route
from triglot.protocols.wire import parse_control, serialize
from triglot.telemetry.log_settings import LogSettings, Value

PATH = "/v2/logging"
FIELDS = {bool: "bool_param", int: "uint32_param", str: "string_param"}
Changes = Mapping[str, Value | None]


class LogSetting:
    """The server's log settings by gRPC and by REST."""

    names: Sequence[str] = ("logging",)

    def __init__(self, logs: LogSettings, control: Control) -> None:
        self._logs = logs
        self._control = control
        control.register_action(LOG_SETTINGS, self._change)

    async def change(self, changes: Changes, call: Call) -> dict[str, Value]:
        """Change settings, for all models; returns all settings as they are then (spec 3.11).

        Raise as `LogSettings.update`.
        """
        if changes:
            call.permission.check_all_models()
            await self._control.act(LOG_SETTINGS, changes)
        return self._logs.settings()

    async def _change(self, changes: Arguments) -> None:
        self._logs.update(changes)

    def methods(self) -> list[Method]:
        return [Method("LogSettings", Kind.UNARY, Operation.LOG, _decode, self.change, _encode)]

    def routes(self) -> list[Route]:
        return [
            Route("GET", PATH, Operation.LOG_STATUS, lambda _: {}, self.change, _encode_rest, documented=(LOG,)),
            Route("POST", PATH, Operation.LOG, _decode_rest, self.change, _encode_rest, documented=(SET_LOG,)),
        ]


def _decode(data: MessageBytes) -> Changes:
    settings = parse_control(pb.LogSettingsRequest, data).settings
    kinds = {key: setting.WhichOneof("parameter_choice") for key, setting in settings.items()}
    return {key: getattr(settings[key], kind) if kind else None for key, kind in kinds.items()}


def _encode(settings: Mapping[str, Value]) -> bytes:
    reply = pb.LogSettingsResponse()
    for key, value in settings.items():
        setattr(reply.settings[key], FIELDS[type(value)], value)
    return serialize(reply)


def _decode_rest(http: HttpRequest) -> Changes:
    return read_settings(http, _value)


def _value(key: str, value: Any) -> Value:
    if not isinstance(value, bool | int | str):
        raise InvalidArgument(f"{key[:100]}: expected a truth value, a number or a string, got {type_name(value)}")
    return value


def _encode_rest(settings: Mapping[str, Value], _: Any) -> HttpResponse:
    return HttpResponse(dumps(settings))
