"""Senders of spans over OTLP/gRPC and OTLP/HTTP, or to standard output; imported by servers that export spans."""

from __future__ import annotations

import codecs
import gzip
import json
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from triglot.telemetry.spans.otlp import INTERNAL, SERVER, Envelope, ExportFailed, fields, rejected_spans
from triglot.telemetry.spans.settings import SpanSettings

RPC = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
RETRYABLE_STATUSES = (429, 502, 503, 504)
RETRYABLE_CODES = (
    "CANCELLED",
    "DEADLINE_EXCEEDED",
    "ABORTED",
    "OUT_OF_RANGE",
    "UNAVAILABLE",
    "DATA_LOSS",
    "RESOURCE_EXHAUSTED",
)
"""Status codes after which a request is retried (OTLP 1.7, "Failures")."""


class GrpcSender:
    """Sender for OTLP/gRPC."""

    def __init__(self, settings: SpanSettings, envelope: Envelope) -> None:
        import grpc  # noqa: PLC0415 - with the h2 transport, only tracing needs it.

        self._envelope = envelope
        self._failed = grpc.RpcError
        self._compression = grpc.Compression.Gzip if settings.gzip else grpc.Compression.NoCompression
        # gRPC requires metadata keys in lower case.
        self._metadata = [(name.lower(), value) for name, value in settings.headers.items()]
        parts = urlsplit(settings.endpoint)
        target = parts.netloc.rpartition("@")[2]
        if parts.port is None:
            target = f"{target}:{443 if parts.scheme == 'https' else 80}"
        # By default, channels to the same target share a connection, here with another exporter in this process.
        options = [
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.primary_user_agent", "OTel-OTLP-Exporter-triglot"),
        ]
        if parts.scheme == "https":
            credentials = grpc.ssl_channel_credentials(
                _bytes_of(settings.certificate),
                _bytes_of(settings.client_key),
                _bytes_of(settings.client_certificate),
            )
            self._channel = grpc.secure_channel(target, credentials, options)
        else:
            self._channel = grpc.insecure_channel(target, options)
        self._export = self._channel.unary_unary(RPC)

    def send(self, spans: bytes, seconds: float) -> int:
        """See `Sender`."""
        request = self._envelope.request(spans)
        try:
            response = self._export(
                request, timeout=seconds, metadata=self._metadata, compression=self._compression
            )
        except self._failed as error:
            code = error.code().name
            text = f"{code}: {error.details()}"
            raise ExportFailed(text, again=code in RETRYABLE_CODES) from None
        return rejected_spans(response)

    def close(self) -> None:
        """See `Sender`."""
        self._channel.close()


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Makes a redirect an error: only the 2xx for the POST itself says that spans were accepted (OTLP/HTTP)."""

    def redirect_request(self, *_: Any) -> None:
        """See the base class."""


class HttpSender:
    """Sender for OTLP/HTTP with protobuf bodies."""

    def __init__(self, settings: SpanSettings, envelope: Envelope) -> None:
        self._settings = settings
        self._envelope = envelope
        context = None
        if settings.endpoint.startswith("https:"):
            context = ssl.create_default_context(cafile=settings.certificate or None)
            if settings.client_certificate:
                context.load_cert_chain(settings.client_certificate, settings.client_key or None)
        self._opener = urllib.request.build_opener(urllib.request.HTTPSHandler(context=context), _NoRedirects())

    def send(self, spans: bytes, seconds: float) -> int:
        """See `Sender`."""
        body = self._envelope.request(spans)
        headers = {"Content-Type": "application/x-protobuf", **self._settings.headers}
        if self._settings.gzip:
            body, headers["Content-Encoding"] = gzip.compress(body, 6), "gzip"
        request = urllib.request.Request(self._settings.endpoint, body, headers)
        try:
            with self._opener.open(request, timeout=seconds) as response:
                return rejected_spans(response.read())
        except urllib.error.HTTPError as error:
            with error:
                again = error.code in RETRYABLE_STATUSES
                raise ExportFailed(
                    f"HTTP {error.code}", again=again, pause=_seconds(error.headers.get("Retry-After"))
                ) from None
        except OSError as error:  # Includes URLError and timeouts.
            raise ExportFailed(str(getattr(error, "reason", error)), again=True) from None

    def close(self) -> None:
        """See `Sender`."""
        self._opener.close()


def _seconds(text: str | None) -> float:
    return float(text) if text is not None and text.isdigit() else 0.0


def _bytes_of(file: str) -> bytes | None:
    return Path(file).read_bytes().removeprefix(codecs.BOM_UTF8) if file else None


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
