"""The audit log: one JSON line per administrative call and per refusal, in a file.

The file is opened for each write, so rotation needs no signal, and several processes may write to the same file:
each appends whole lines. Lines that arrive during a write are queued, and written together. Of refusals, which
anyone can cause, there are only so many lines a minute, and half of the queue is not for them: a flood of them
fills no disk, and hides no administrative call.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path

from triglot.core.call import Call
from triglot.core.errors import Code, Unavailable
from triglot.core.operation import ADMINISTRATION
from triglot.telemetry.calls import Counter as Metric
from triglot.telemetry.calls import Endpoint, Observer
from triglot.telemetry.file_writer import MAX_WAITING, TOO_SLOW, FileWriter
from triglot.telemetry.json_lines import json_line, utc_time
from triglot.telemetry.log_fields import MAX_TEXT

MAX_REFUSALS = 600
"""Lines of refusals a minute; the next line after others says how many were `omitted`."""
MAX_WAITING_REFUSALS = MAX_WAITING // 2
"""Queued lines from which on refusals are omitted."""
WINDOW_SECONDS = 60.0
MAX_ERROR = 1024
"""Longest text of a refusal, in characters: it may name what a client sent."""
WRITE_SECONDS = 5.0
"""Time for the disk to take the line that precedes an administrative call."""
BEGUN = "BEGUN"
"""The outcome in that line."""
LOST = ("limit", "queue", "disk")
"""Why lines were lost: too many refusals, a disk that is too slow, and one that cannot be written."""


class AuditLog(Observer):
    """Writes audit lines to a file. Raise `OSError` if it cannot be written.

    `lost`: number of lost lines by reason.
    """

    __slots__ = ("_clock", "_lines", "_omitted", "_open", "_path", "_refusals", "_until", "_writer", "lost")

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        _append(path, b"")
        self._path = path
        self._writer = FileWriter("lines of the audit log", path)
        self._open = True
        self.lost = Counter[str]()
        self._clock = clock
        self._lines: deque[str] = deque()
        self._refusals = self._omitted = 0
        self._until = 0.0

    @property
    def waiting(self) -> int:
        """Number of queued lines."""
        return len(self._lines)

    def counters(self) -> Iterator[Metric]:
        """See `Observer`."""
        values = [((reason,), self.lost[reason]) for reason in LOST]
        yield Metric("triglot_audit_lines_lost", "Lost lines of the audit log.", ("reason",), values)

    def close(self) -> None:
        """Wait until everything is written, see `FileWriter.close`."""
        self._open = False
        self._writer.close()

    def end(self, call: Call, endpoint: Endpoint, code: Code, end_time: float, refusal: str) -> None:
        """See `Observer`."""
        if self._open and (refusal or call.operation in ADMINISTRATION):
            self.line(endpoint.protocol, endpoint.entrypoint, endpoint.method, call, code, refusal)

    def line(self, protocol: str, entrypoint: str, method: str, call: Call, code: Code, refusal: str) -> None:
        """Write a call that ended; `refusal` is the error text if access control rejected it."""
        if refusal and self._is_over_limit():
            self._omitted += 1
            self.lost["limit"] += 1
            return
        if len(self._lines) >= MAX_WAITING:
            self.lost["queue"] += 1
            self._writer.lose(TOO_SLOW)
            return
        fields = _fields(protocol, entrypoint, method, call, code.name)
        if refusal:
            fields["error"] = refusal[:MAX_ERROR]
            if self._omitted:
                fields["omitted"], self._omitted = self._omitted, 0
        self._lines.append(json_line(fields) + "\n")
        if len(self._lines) == 1:  # Otherwise a write of all queued lines is already scheduled.
            self._writer.put(self._write)

    def _is_over_limit(self) -> bool:
        """Count a refusal; return whether it gets no line."""
        if (now := self._clock()) >= self._until:
            self._until, self._refusals = now + WINDOW_SECONDS, 0
        self._refusals += 1
        return self._refusals > MAX_REFUSALS or len(self._lines) >= MAX_WAITING_REFUSALS

    async def precede(self, call: Call, protocol: str, entrypoint: str, method: str) -> None:
        """Write an administrative call that is about to begin. Raise `Unavailable` if that fails."""
        loop = asyncio.get_running_loop()
        line = (json_line(_fields(protocol, entrypoint, method, call, BEGUN)) + "\n").encode()
        written = loop.create_future()

        def write() -> None:
            try:
                self._append_lines(line, 1)
            except BaseException as error:
                loop.call_soon_threadsafe(_resolve, written, error)
                raise
            loop.call_soon_threadsafe(_resolve, written, None)

        try:
            if not self._writer.put(write):
                raise OSError(TOO_SLOW)
            async with asyncio.timeout(WRITE_SECONDS):
                await written
        except (OSError, TimeoutError) as error:
            why = getattr(error, "strerror", None) or str(error) or TOO_SLOW
            raise Unavailable(f"the audit log cannot be written, which administrative calls need: {why}") from None

    def _write(self) -> None:
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        self._append_lines("".join(lines).encode(), len(lines))

    def _append_lines(self, text: bytes, count: int) -> None:
        try:
            _append(self._path, text)
        except BaseException:
            self.lost["disk"] += count
            raise


def _fields(protocol: str, entrypoint: str, method: str, call: Call, outcome: str) -> dict[str, str | int]:
    return {
        "time": utc_time(time.time()),
        "client": call.client,
        "peer": call.peer,
        "operation": call.operation.value,
        "model": (call.model_name or call.subject)[:MAX_TEXT],
        "protocol": protocol,
        "transport": "gRPC" if entrypoint == "GRPC" else entrypoint,
        "method": method,
        "outcome": outcome,
        "request_id": call.log_ids[0][:MAX_TEXT],
    }


def _resolve(written: asyncio.Future[None], error: BaseException | None) -> None:
    if written.done():
        return  # It took too long.
    if error is None:
        written.set_result(None)
    else:
        written.set_exception(error)


def _append(path: Path, text: bytes) -> None:
    # Opened for reading, too: opening a pipe for writing only would block until it has a reader.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            text = b"\n" + text  # A full disk truncated the last line.
        if text and os.write(file, text) != len(text):
            raise OSError("the disk is full")
    finally:
        os.close(file)
