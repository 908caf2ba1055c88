"""A server that runs as a process, and what it logs."""

from __future__ import annotations

import re
import signal
import subprocess
import threading
from typing import IO, Final

SECONDS: Final = 60.0
"""Limit of every wait: only a failing test waits as long."""
LISTENING: Final = re.compile(r"(?:gRPC|REST) on .* in \d+\.\d\d s")
"""The line that a server logs when its ports are open."""
_GRPC: Final = re.compile(r"gRPC on \S+:(\d+)")
_REST: Final = re.compile(r"REST on \S+:(\d+)")


class Lines:
    """The text of a pipe, read by a thread so that the writer never blocks."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._text = ""
        self._has_ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._pipe:
            with self._changed:
                self._text += line
                self._changed.notify_all()
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    def text(self) -> str:
        """Return the text written so far."""
        with self._changed:
            return self._text

    def wait_for(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        """Wait for the first match and return it.

        Raise `AssertionError` when the text ends without one, or none appears within a minute.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or re.search(pattern, self._text) is not None, SECONDS)
            match = re.search(pattern, self._text)
        assert match is not None, f"no {pattern!r} in:\n{self._text}"
        return match

    def close(self) -> str:
        """Read to the end and close the pipe; returns the whole text. The writer must have ended."""
        self._thread.join(SECONDS)
        self._pipe.close()
        return self._text


class Process:
    """A process of which standard output and standard error are pipes, to be killed at the end."""

    def __init__(self, started: subprocess.Popen[str]) -> None:
        assert started.stdout is not None
        assert started.stderr is not None
        self._process = started
        self.stdout = Lines(started.stdout)
        self.stderr = Lines(started.stderr)

    def ports(self) -> tuple[int, int]:
        """Wait until the log reports the open ports; returns those of gRPC and REST, 0 for one that is not open.

        Raise `AssertionError` if the process ends before.
        """
        line = self.stderr.wait_for(LISTENING)[0]
        grpc, rest = _GRPC.search(line), _REST.search(line)
        grpc_port = int(grpc[1]) if grpc else 0
        return grpc_port, int(rest[1]) if rest else grpc_port if "REST on the same port" in line else 0

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """Wait for the process to end and read all its output; returns the exit status."""
        status = self._process.wait(SECONDS)
        self.stdout.close()
        self.stderr.close()
        return status

    def stop(self) -> None:
        """Send SIGTERM and wait for exit status 0. Raise `AssertionError` for any other."""
        self.signal(signal.SIGTERM)
        assert self.wait() == 0, self.stderr.text()

    def kill(self) -> None:
        """End the process at once, if it still runs, and close its pipes."""
        self._process.kill()
        self._process.wait()
        self.stdout.close()
        self.stderr.close()

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None
