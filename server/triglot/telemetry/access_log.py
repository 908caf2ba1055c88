"""One line of the log for each call, while somebody wants them."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.operation import Operation
from triglot.telemetry.log_fields import call_fields

LOGGER = "triglot.access"
LONGEST_NAME = 128
PROBES = (Operation.HEALTH, Operation.METRICS)
"""What others ask every few seconds."""
log = logging.getLogger(LOGGER)


@dataclass(frozen=True, slots=True)
class AccessLine:
    """The message of a record: who was asked, what came of it, and how long it took."""

    protocol: str
    entrypoint: str
    method: str
    call: Call
    code: Code
    seconds: float
    bytes_in: int
    bytes_out: int

    def __str__(self) -> str:
        said = call_fields([self.call])
        names = {
            "model": "model",
            "version": "version",
            "client": "client",
            "request_id": "id",
            "trace_id": "trace",
        }
        about = "".join(
            [f" {short}={_printable(str(said[name]))}" for name, short in names.items() if name in said]
        )
        return f"{self.summary}{about} code={self.code.name} ms={self.seconds * 1e3:.3f}"

    @property
    def summary(self) -> str:
        """What was called."""
        return f"{self.protocol or '-'} {self.entrypoint} {self.method}"

    def fields(self) -> dict[str, Any]:
        """Of the line as an object, beside those of its call."""
        span = self.call.span
        return {
            # Its own span, not that of its time on the model.
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
    """`on`: whether there are such lines; `probes`: of health checks and reads of metrics that went well, too."""

    __slots__ = ("on", "probes")

    def __init__(self) -> None:
        self.on = self.probes = False

    def line(self, line: AccessLine) -> None:
        """A call has ended."""
        if self.probes or line.call.operation not in PROBES or line.code is not Code.OK:
            log.info(line)


def _printable(name: str) -> str:
    """A client's text, which is to stay in its place."""
    cut = name[:LONGEST_NAME]
    return cut if cut.isprintable() and " " not in cut else ascii(cut)
