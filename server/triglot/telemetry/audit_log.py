"""The audit log: one JSON line per administrative call and per refusal, in a file.

The file is opened for each write, so rotation needs no signal, and several processes may write to the same file:
each appends whole lines. Lines that arrive during a write are queued, and written together.
"""

from __future__ import annotations

import os
import time
from collections import deque
from pathlib import Path

from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.telemetry.file_writer import MAX_WAITING, TOO_SLOW, FileWriter
from triglot.telemetry.json_lines import json_line, utc_time
from triglot.telemetry.log_fields import MAX_TEXT


class AuditLog:
    """Writes audit lines; used on the event loop. `on`: whether it is enabled, from `open` to `close`."""

    __slots__ = ("_lines", "_writer", "on")

    def __init__(self) -> None:
        self.on = False
        self._lines: deque[str] = deque()
        self._writer: FileWriter

    @property
    def waiting(self) -> int:
        """Number of queued lines."""
        return len(self._lines)

    def open(self, path: Path) -> None:
        """Starts writing to this file. Raises `OSError` if it cannot be written."""
        _append(path, b"")
        self._writer = FileWriter("lines of the audit log", path)
        self.on = True

    def close(self) -> None:
        """Waits until everything is written, see `FileWriter.close`."""
        if self.on:
            self.on = False
            self._writer.close()

    def line(self, protocol: str, entrypoint: str, method: str, call: Call, code: Code, refusal: str) -> None:
        """Writes a call that ended; `refusal` is the error text if access control rejected it."""
        if len(self._lines) >= MAX_WAITING:
            self._writer.lose(TOO_SLOW)
            return
        fields = {
            "time": utc_time(time.time()),
            "client": call.client,
            "peer": call.peer,
            "operation": call.operation.value,
            "model": (call.model_name or call.subject)[:MAX_TEXT],
            "protocol": protocol,
            "transport": "gRPC" if entrypoint == "GRPC" else entrypoint,
            "method": method,
            "outcome": code.name,
            "request_id": call.log_ids[0][:MAX_TEXT],
        }
        if refusal:
            fields["error"] = refusal
        self._lines.append(json_line(fields) + "\n")
        if len(self._lines) == 1:  # Otherwise a write of all queued lines is already scheduled.
            self._writer.put(self._write)

    def _write(self) -> None:
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        _append(self._writer.path, "".join(lines).encode())


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
