"""Exports spans in batches on a thread of its own, so that calls never wait for a collector."""

from __future__ import annotations

import codecs
import gzip
import logging
import random
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from triglot.telemetry.spans.otlp import Envelope, rejected_spans
from triglot.telemetry.spans.rows import SPANS, Row, encode
from triglot.telemetry.spans.settings import GRPC, OTLP, SpanSettings

log = logging.getLogger(__name__)

RPC = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before the first retry of a request, and at most before any; they double with each retry."""
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
MAX_BYTES = 2**21
"""Most bytes of spans in one request: collectors accept messages of 4 MiB."""
CLOSE_SECONDS = 5.0
"""Seconds for exporting the queued spans when the server stops."""


class ExportFailed(Exception):
    """The collector did not accept the spans.

    `again`: the request may be retried. `pause`: seconds until then, as requested by the collector; 0 if it
    requested none.
    """

    def __init__(self, message: str, *, again: bool, pause: float = 0.0) -> None:
        super().__init__(message)
        self.again = again
        self.pause = pause


class Sender(Protocol):
    """Sends spans to a collector. Used on the exporter's thread."""

    def send(self, spans: bytes, seconds: float) -> int:
        """Send encoded fields `spans` of ScopeSpans within `seconds`; returns how many spans were rejected.

        Raises `ExportFailed` when the collector did not accept the request.
        """

    def close(self) -> None:
        """Close connections; nothing is sent afterwards."""


class NoSender:
    """Stands in for a sender that could not be made, for example because a certificate's file is missing."""

    def __init__(self, error: Exception) -> None:
        self._text = f"{type(error).__name__}: {error}"

    def send(self, _: bytes, __: float) -> int:
        """Raises `ExportFailed` with the error for which there is no sender."""
        raise ExportFailed(self._text, again=False)

    def close(self) -> None:
        """Does nothing: nothing is open."""


class SpanCounts:
    """Numbers of spans by the outcome of their export. Each is changed on one thread only."""

    __slots__ = ("export_failed", "exported", "queue_full", "rejected")

    def __init__(self) -> None:
        self.exported = 0
        self.export_failed = 0
        """Dropped after an error, or because the server stopped."""
        self.rejected = 0
        """Rejected by the collector."""
        self.queue_full = 0
        """Dropped because the queue was full."""


class Exporter:
    """A bounded queue of spans, and the thread that encodes and sends them.

    `put` is called on one thread, the event loop's. `make_sender` is called on the exporter's thread, which starts
    with the first row.
    """

    def __init__(self, settings: SpanSettings, make_sender: Callable[[], Sender]) -> None:
        self.counts = SpanCounts()
        self._settings = settings
        self._make_sender = make_sender
        self._queue: deque[Row] = deque()
        self._news = threading.Event()
        self._closing = threading.Event()
        self._given_up = False
        self._put = 0
        """Number of spans in all rows that were ever queued. Changed by `put` only."""
        self._taken = 0
        """Number of spans in all rows taken from the queue. Changed on the exporter's thread only."""
        self._thread: threading.Thread | None = None
        self._failing = False

    def put(self, row: Row) -> None:
        """Queue the spans of a row, or count them as dropped when the queue is full. Never blocks."""
        settings = self._settings
        waiting = self._put - self._taken
        if waiting >= settings.queue_size:
            self.counts.queue_full += row[SPANS]
            return
        if self._thread is None:
            # A daemon thread: a collector that hangs must not keep a stopped server alive.
            self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
            self._thread.start()
        self._put += row[SPANS]
        self._queue.append(row)
        if waiting >= settings.batch_size and not self._news.is_set():
            self._news.set()

    def close(self) -> None:
        """Export the queued spans and end the thread; blocks for at most `CLOSE_SECONDS`."""
        if self._thread is None:
            return
        self._closing.set()
        self._news.set()
        self._thread.join(CLOSE_SECONDS)
        if self._thread.is_alive():
            self._given_up = True
            log.warning("%d spans or more were not exported before the server stopped", self._put - self._taken)
        self._thread = None

    # --- on the exporter's thread ---

    def _run(self) -> None:
        try:
            sender = self._make_sender()
        except Exception as error:
            sender = NoSender(error)
        try:
            while not (self._closing.is_set() and not self._queue):
                self._news.wait(self._settings.delay)
                self._news.clear()
                self._send_all(sender)
        except Exception:
            log.exception("no more spans are exported")
        finally:
            self._lose_all()
            sender.close()

    def _send_all(self, sender: Sender) -> None:
        """Send all queued rows, batch by batch; the last batch may be small."""
        while self._queue:
            self._encode_and_send(sender, self._batch())

    def _batch(self) -> Sequence[Row]:
        """Take the rows of one batch from the queue: at most `batch_size` spans, but at least one row."""
        rows: list[Row] = []
        queue, count, most = self._queue, 0, self._settings.batch_size
        while queue and (not rows or count + queue[0][SPANS] <= most):
            rows.append(queue.popleft())
            count += rows[-1][SPANS]
        self._taken += count
        return rows

    def _encode_and_send(self, sender: Sender, rows: Sequence[Row]) -> None:
        spans = encode(rows, time.time_ns() - int(time.perf_counter() * 1e9))
        if len(spans) > MAX_BYTES and len(rows) > 1:
            self._encode_and_send(sender, rows[: len(rows) // 2])
            self._encode_and_send(sender, rows[len(rows) // 2 :])
        else:
            self._send(sender, spans, sum([row[SPANS] for row in rows]))

    def _send(self, sender: Sender, spans: bytes, count: int) -> None:
        until = time.monotonic() + self._settings.timeout
        pause = FIRST_PAUSE
        while True:
            try:
                rejected = min(count, sender.send(spans, max(0.001, until - time.monotonic())))
                self.counts.exported += count - rejected
                self.counts.rejected += rejected
                if rejected:
                    self._complain(f"the collector rejected {rejected} spans")
                else:
                    self._failing = False
                return
            except ExportFailed as error:
                wait = error.pause or pause * random.uniform(0.8, 1.2)
                if not error.again or time.monotonic() + wait >= until or self._given_up:
                    self.counts.export_failed += count
                    self._complain(str(error))
                    return
            if self._closing.wait(wait):
                until = min(until, time.monotonic() + CLOSE_SECONDS / 2)
                time.sleep(min(wait, FIRST_PAUSE))
            pause = min(2 * pause, LONGEST_PAUSE)

    def _lose_all(self) -> None:
        while self._queue:
            self.counts.export_failed += self._queue.popleft()[SPANS]

    def _complain(self, why: str) -> None:
        """Log a warning, once until an export succeeds again."""
        if not self._failing:
            log.warning("spans are lost: cannot export them to %s: %s", self._settings.destination, why)
        self._failing = True


def exporter_of(settings: SpanSettings, version: str) -> Exporter:
    """Returns the exporter for these settings; `version` is this server's."""
    envelope = Envelope({**settings.resource, **_SDK, "telemetry.sdk.version": version}, "triglot", version)

    def make() -> Sender:
        if settings.exporter != OTLP:
            from triglot.telemetry.spans.console import Console  # noqa: PLC0415

            return Console()
        return GrpcSender(settings, envelope) if settings.protocol == GRPC else HttpSender(settings, envelope)

    return Exporter(settings, make)


_SDK = {"telemetry.sdk.name": "triglot", "telemetry.sdk.language": "python"}


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
