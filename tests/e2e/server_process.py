"""A real server process, as a user starts it, and what it says."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from types import TracebackType
from typing import IO

START_SECONDS = 60
STOP_SECONDS = 30
READY = re.compile(r"gRPC on (\S+:\d+) and REST on (\S+:\d+) in ")


def clean_environment() -> dict[str, str]:
    """This process's environment without what would lead a client or the server astray."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.lower().endswith("_proxy") and not name.startswith(("TRIGLOT_", "PYTHON"))
    }


class _Lines:
    """The lines of a pipe, read by a thread so that the writer never waits."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._lines: list[str] = []
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._pipe:
            self._add(line)
        self._add(None)

    def _add(self, line: str | None) -> None:
        with self._changed:
            if line is None:
                self._ended = True
            else:
                self._lines.append(line)
            self._changed.notify_all()

    def close(self) -> None:
        """When the writer is gone."""
        self._thread.join(STOP_SECONDS)
        self._pipe.close()

    def text(self) -> str:
        """What was written so far."""
        with self._changed:
            return "".join(self._lines)

    def wait_for(self, pattern: re.Pattern[str]) -> re.Match[str]:
        """The first match in one line, now or later. Raises `AssertionError` when the text ends without one."""

        def look() -> bool:
            return self._ended or any(map(pattern.search, self._lines))

        with self._changed:
            self._changed.wait_for(look, START_SECONDS)
            for line in self._lines:
                if match := pattern.search(line):
                    return match
        raise AssertionError(f"no line with {pattern.pattern!r} in {START_SECONDS} s:\n{self.text()}")


class ServerProcess:
    """`triglot serve` on free ports; leaving the `with` block sends SIGTERM, and expects a clean end."""

    def __init__(self, *arguments: str) -> None:
        self._arguments = arguments
        self.grpc_address = ""
        self.rest_address = ""

    def __enter__(self) -> ServerProcess:
        command = [sys.executable, "-m", "triglot", "serve", *self._arguments]
        command += ["--grpc-port", "0", "--rest-port", "0", "--drain-delay", "0"]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=clean_environment()
        )
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdout = _Lines(self._process.stdout)
        self.stderr = _Lines(self._process.stderr)
        try:
            self.grpc_address, self.rest_address = self.stderr.wait_for(READY).groups()
        except BaseException:
            self._kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            status = self._process.wait(STOP_SECONDS)
        finally:
            self._kill()
        log = self.stderr.text()
        assert status == 0, f"the server ended with status {status}:\n{log}"
        assert "Traceback" not in log, log

    def _kill(self) -> None:
        self._process.kill()
        self._process.wait()
        self.stdout.close()
        self.stderr.close()
