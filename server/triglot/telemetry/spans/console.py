"""Prints spans as lines of JSON on standard output, for OTEL_TRACES_EXPORTER=console."""

from __future__ import annotations

import json
import sys
from typing import Any

from triglot.telemetry.spans.otlp import INTERNAL, SERVER, fields

KINDS = {INTERNAL: "INTERNAL", SERVER: "SERVER"}


class Console:
    """A `Sender` that prints each span as one line. Used on the exporter's thread."""

    def send(self, spans: bytes, _: float) -> int:
        """See `Sender`. One write for all lines, so that lines of other workers do not mix with them."""
        lines = [json.dumps(_readable(span)) for _, span in fields(spans) if isinstance(span, bytes)]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
        sys.stdout.flush()
        return 0

    def close(self) -> None:
        """Do nothing: nothing is open."""


def _readable(span: bytes) -> dict[str, Any]:
    """Return the fields of an encoded Span that this server sets, named as in OTLP's JSON encoding."""
    read: dict[str, Any] = {"attributes": {}, "links": []}
    for number, value in fields(span):
        if isinstance(value, int):
            if number == 6:
                read["kind"] = KINDS.get(value, str(value))
            elif number in (7, 8):
                read["startTimeUnixNano" if number == 7 else "endTimeUnixNano"] = value
        elif number in (1, 2, 4):
            read[{1: "traceId", 2: "spanId", 4: "parentSpanId"}[number]] = value.hex()
        elif number in (3, 5):
            read["traceState" if number == 3 else "name"] = value.decode()
        elif number == 9:
            key, kept = _attribute(value)
            read["attributes"][key] = kept
        elif number == 13:
            ids = [part.hex() for _, part in fields(value) if isinstance(part, bytes)]
            read["links"].append({"traceId": ids[0], "spanId": ids[1]})
        elif number == 15:
            read["status"] = "ERROR"
    return read


def _attribute(pair: bytes) -> tuple[str, str | int]:
    (_, key), (_, any_value) = fields(pair)
    assert isinstance(key, bytes)
    assert isinstance(any_value, bytes)
    ((_, value),) = fields(any_value)
    return key.decode(), value if isinstance(value, int) else value.decode()
