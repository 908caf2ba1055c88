"""The access log: one log record per call, while it is enabled. An `Observer`."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.operation import Operation
from triglot.telemetry.calls import Endpoint, Observer
from triglot.telemetry.log_fields import Message, call_fields
from triglot.telemetry.loggers import ACCESS

MAX_NAME = 128
PROBES = (Operation.HEALTH, Operation.METRICS)
"""Operations that monitoring systems call every few seconds."""
log = logging.getLogger(ACCESS)


@dataclass(frozen=True, slots=True)
class AccessLine(Message):
    """The message of an access log record: the call, its outcome, and its duration in seconds."""

    protocol: str
    entrypoint: str
    method: str
    call: Call
    code: Code
    seconds: float
    bytes_in: int
    bytes_out: int

    def __str__(self) -> str:
        fields = call_fields([self.call])
        names = {
            "model": "model",
            "version": "version",
            "client": "client",
            "request_id": "id",
            "trace_id": "trace",
        }
        about = "".join(
            [f" {short}={_printable(str(fields[name]))}" for name, short in names.items() if name in fields]
        )
        return f"{self.summary}{about} code={self.code.name} ms={self.seconds * 1e3:.3f}"

    @property
    def summary(self) -> str:
        """The protocol, entrypoint and method of the call; see `Message`."""
        return f"{self.protocol or '-'} {self.entrypoint} {self.method}"

    def fields(self) -> dict[str, Any]:
        """See `Message`."""
        span = self.call.span
        return {
            **call_fields([self.call]),
            # The call's own span, not that of the model execution.
            **({} if span is None else {"span_id": span.response_traceparent.split("-")[2]}),
            "protocol": self.protocol,
            "entrypoint": self.entrypoint,
            "method": self.method,
            "code": self.code.name,
            "duration_ms": round(self.seconds * 1e3, 3),
            "peer": self.call.peer,
            "bytes_in": self.bytes_in,
            "bytes_out": self.bytes_out,
        }


class AccessLog(Observer):
    """Logs clients' calls that have ended; successful health checks and reads of metrics at level 2 only."""

    __slots__ = ("_level",)

    def __init__(self) -> None:
        self._level = 0

    def switch(self, level: int) -> None:
        """See `Observer`."""
        self._level = level

    def end(self, call: Call, endpoint: Endpoint, code: Code, end_time: float, refusal: str) -> None:
        """See `Observer`."""
        if self._level > (call.operation in PROBES and code is Code.OK) and not endpoint.internal:
            names = endpoint.protocol, endpoint.entrypoint, endpoint.method
            log.info(AccessLine(*names, call, code, end_time - call.arrived, call.bytes_in, call.bytes_out))


def _printable(name: str) -> str:
    """Return a client's text, shortened and escaped so that it cannot break the line."""
    cut = name[:MAX_NAME]
    return cut if cut.isprintable() and " " not in cut else ascii(cut)
