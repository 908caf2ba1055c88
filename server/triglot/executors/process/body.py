"""`LocalBody`, a process of the operating system that runs one instance."""

from __future__ import annotations

import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence

from triglot.executors.remote.place import Body, log_descriptor

_STATUS_SECONDS = 5.0
"""How long to wait for the exit status of a process that has closed its connection."""


class LocalBody(Body):
    """See `Body`. `command` returns the command to run, given the file descriptor of the process's connection.

    Raise `OSError`.
    """

    def __init__(self, command: Callable[[int], Sequence[str]], variables: Mapping[str, str]) -> None:
        self._connection, theirs = socket.socketpair()
        self.begun = time.monotonic()
        with theirs:
            try:
                self._popen = _spawned(command(theirs.fileno()), variables, theirs.fileno())
            except BaseException:
                self._connection.close()
                raise
        self.pid = self._popen.pid
        self.where = f"pid {self.pid}"

    def connect(self) -> socket.socket:
        """See `Body`."""
        return self._connection

    def exit_reason(self) -> str:
        """See `Body`."""
        status = self._popen.poll()
        return "" if status is None else _exit_text(status)

    def why_closed(self) -> str:
        """See `Body`."""
        return self.exit_reason() if self.wait(_STATUS_SECONDS) else "closed its connection"

    def wait(self, timeout: float | None) -> bool:
        """See `Body`."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """See `Body`: SIGTERM."""
        self._popen.terminate()

    def kill(self) -> None:
        """See `Body`: SIGKILL."""
        self._popen.kill()


def _spawned(command: Sequence[str], variables: Mapping[str, str], passed: int) -> subprocess.Popen[bytes]:
    log = log_descriptor()
    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(passed,),
        # Signals of the terminal are for the server, which ends the process.
        start_new_session=True,
    )


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was terminated by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
