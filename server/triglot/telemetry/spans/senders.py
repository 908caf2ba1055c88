"""Senders of spans over OTLP/gRPC and OTLP/HTTP; imported by servers that export spans so."""

from __future__ import annotations

import codecs
import gzip
import ssl
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from triglot.telemetry.spans.otlp import Envelope, ExportFailed, rejected_spans
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
