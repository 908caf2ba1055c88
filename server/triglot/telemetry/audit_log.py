"""One line of JSON for each administrative call and each refusal, in a file.

Strategy: the file is opened for each write, so that there is nothing to do when it is rotated, and several
processes may write to it: each appends whole lines. Lines that come while others are written wait, and are written
together.
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
from triglot.telemetry.log_fields import LONGEST_TEXT


class AuditLog:
    """`on`: whether there are such lines, from `open` to `close`."""

    __slots__ = ("_lines", "_writer", "on")

    def __init__(self) -> None:
        self.on = False
        self._lines: deque[str] = deque()
        self._writer: FileWriter

    @property
    def waiting(self) -> int:
        """Lines that nobody writes yet."""
        return len(self._lines)

    def open(self, path: Path) -> None:
        """Write to this file. Raises `OSError` for one that cannot be written."""
        _append(path, b"")
        self._writer = FileWriter("lines of the audit log", path)
        self.on = True

    def close(self) -> None:
        """Wait until everything is written; see `FileWriter`."""
        if self.on:
            self.on = False
            self._writer.close()

    def line(self, protocol: str, entrypoint: str, method: str, call: Call, code: Code, refusal: str) -> None:
        """A call has ended; `refusal`: the text of the error, if access control says no."""
        if len(self._lines) >= MAX_WAITING:
            self._writer.lose(TOO_SLOW)
            return
        fields = {
            "time": utc_time(time.time()),
            "client": call.client,
            "peer": call.peer,
            "operation": call.operation.value,
            "model": (call.model_name or call.subject)[:LONGEST_TEXT],
            "protocol": protocol,
            "door": "gRPC" if entrypoint == "GRPC" else entrypoint,
            "method": method,
            "outcome": code.name,
            "request_id": call.log_ids[0][:LONGEST_TEXT],
        }
        if refusal:
            fields["error"] = refusal
        self._lines.append(json_line(fields) + "\n")
        if len(self._lines) == 1:  # Else somebody is about to take all of them.
            self._writer.put(self._write)

    def _write(self) -> None:
        lines = []
        while self._lines:
            lines.append(self._lines.popleft())
        _append(self._writer.path, "".join(lines).encode())


def _append(path: Path, text: bytes) -> None:
    # For reading, too, what makes that of a pipe not wait for a reader.
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o640)
    try:
        size = os.fstat(file).st_size
        if size and os.pread(file, 1, size - 1) != b"\n":
            text = b"\n" + text  # A full disk has cut the last line.
        if text and os.write(file, text) != len(text):
            raise OSError("the disk is full")
    finally:
        os.close(file)
