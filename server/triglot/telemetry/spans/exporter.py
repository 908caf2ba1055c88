"""Exports spans in batches on a thread of its own, so that calls never wait for a collector."""

from __future__ import annotations

import logging
import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from triglot.telemetry.spans.otlp import Envelope, ExportFailed
from triglot.telemetry.spans.rows import SPANS, Row, encode
from triglot.telemetry.spans.settings import GRPC, OTLP, SpanSettings

log = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = 0.1, 5.0
"""Seconds before the first retry of a request, and at most before any; they double with each retry."""
MAX_BYTES = 2**21
"""Most bytes of spans in one request: collectors accept messages of 4 MiB."""
CLOSE_SECONDS = 5.0
"""Seconds for exporting the queued spans when the server stops."""


class Sender(Protocol):
    """Sends spans to a collector. Used on the exporter's thread."""

    def send(self, spans: bytes, seconds: float) -> int:
        """Send encoded fields `spans` of ScopeSpans within `seconds`; return how many spans were rejected.

        Raise `ExportFailed` when the collector did not accept the request.
        """

    def close(self) -> None:
        """Close connections; nothing is sent afterwards."""


class NoSender:
    """Stands in for a sender that could not be made, for example because a certificate's file is missing."""

    def __init__(self, error: Exception) -> None:
        self._text = f"{type(error).__name__}: {error}"

    def send(self, _: bytes, __: float) -> int:
        """Raise `ExportFailed` with the error for which there is no sender."""
        raise ExportFailed(self._text, again=False)

    def close(self) -> None:
        """Do nothing: nothing is open."""


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
        self._is_abandoned = False
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
            self._is_abandoned = True
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
                if not error.again or time.monotonic() + wait >= until or self._is_abandoned:
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
    """Return the exporter for these settings; `version` is this server's."""
    envelope = Envelope({**settings.resource, **_SDK, "telemetry.sdk.version": version}, "triglot", version)

    def make() -> Sender:
        from triglot.telemetry.spans.senders import Console, GrpcSender, HttpSender  # noqa: PLC0415

        if settings.exporter != OTLP:
            return Console()
        return GrpcSender(settings, envelope) if settings.protocol == GRPC else HttpSender(settings, envelope)

    return Exporter(settings, make)


_SDK = {"telemetry.sdk.name": "triglot", "telemetry.sdk.language": "python"}
