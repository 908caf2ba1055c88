"""Calls that an endpoint counts, with given times and sizes."""

from __future__ import annotations

from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.telemetry.calls import Endpoint
from triglot.telemetry.spans.exporter import exporter_of
from triglot.telemetry.spans.recorder import SpanRecorder, of_ratio
from triglot.telemetry.spans.settings import SpanSettings


def record_call(
    endpoint: Endpoint, call: Call, code: Code, seconds: float, codec_seconds: float, bytes_in: int, bytes_out: int
) -> None:
    """Count a call that has ended. Times are in seconds, sizes in bytes."""
    call.codec_seconds, call.bytes_in, call.bytes_out = codec_seconds, bytes_in, bytes_out
    endpoint.record(call, code, seconds)


def unsent_spans() -> SpanRecorder:
    """Return a recorder whose spans are not sent anywhere."""
    return SpanRecorder(exporter_of(SpanSettings(), ""), of_ratio(1.0))
