"""The access log: one log record per call, while it is enabled."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.operation import Operation
from triglot.telemetry.log_fields import call_fields

LOGGER = "triglot.access"
MAX_NAME = 128
PROBES = (Operation.HEALTH, Operation.METRICS)
"""Operations that monitoring systems call every few seconds."""
log = logging.getLogger(LOGGER)


@dataclass(frozen=True, slots=True)
class AccessLine:
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
        """The protocol, entrypoint and method of the call."""
        return f"{self.protocol or '-'} {self.entrypoint} {self.method}"

    def fields(self) -> dict[str, Any]:
        """Return the fields of the line as a JSON object, besides those of the call itself."""
        span = self.call.span
        return {
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


class AccessLog:
    """Settings of the access log. `on`: enabled; `probes`: includes successful health checks and metrics reads."""

    __slots__ = ("on", "probes")

    def __init__(self) -> None:
        self.on = self.probes = False

    def line(self, line: AccessLine) -> None:
        """Log a call that ended."""
        if self.probes or line.call.operation not in PROBES or line.code is not Code.OK:
            log.info(line)


def _printable(name: str) -> str:
    """Return a client's text, shortened and escaped so that it cannot break the line."""
    cut = name[:MAX_NAME]
    return cut if cut.isprintable() and " " not in cut else ascii(cut)
