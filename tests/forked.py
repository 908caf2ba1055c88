"""Processes of `triglot` that are forked from one that has imported it: the import is most of what a start costs.

Each of them is as `python -m triglot` would make it: its arguments, environment, working directory, standard
streams and signals are its own. Only what Python and its libraries do before the first line of code is not done
again: who sets variables that they look at then has to start a process of another kind.

    python forked.py FD     # forks one for each request that comes over this socket, until the socket is closed
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import IO, NoReturn

STREAMS = 3
LARGEST_REQUEST = 1 << 20
_IMPORTED = ("cli.main", "server", "transports.http2.server", "transports.http1.server")


class Forked:
    """`triglot ARGUMENTS`, as much like a `subprocess.Popen` with pipes for text as tests need."""

    def __init__(self, arguments: Sequence[str], environment: Mapping[str, str], folder: Path) -> None:
        self.returncode: int | None = None
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (stdout, their_stdout), (stderr, their_stderr) = os.pipe(), os.pipe()
        self.stdout: IO[str] = os.fdopen(stdout)
        self.stderr: IO[str] = os.fdopen(stderr)
        try:
            request = json.dumps([arguments, dict(environment), str(folder)]).encode()
            socket.send_fds(_server()[0], [request], [0, their_stdout, their_stderr, status.fileno()])
        finally:
            status.close()
            os.close(their_stdout)
            os.close(their_stderr)
        self.pid = int(self._told())

    def _told(self) -> str:
        text = self._status.recv(16).decode()
        assert text, "the process that forks others is gone"
        return text

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(["triglot"], timeout)
            self.returncode = int(self._told())
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """The exit status; None: it runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: signal.Signals) -> None:
        """Unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """As the system does it."""
        self.send_signal(signal.SIGKILL)


@cache
def _server() -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """What forks, and the socket to it; it is started when it is first needed, and ends with this process."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [sys.executable, __file__, str(theirs.fileno())]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)


def main() -> None:
    """Fork what is asked for."""
    gc.disable()
    for name in _IMPORTED:
        importlib.import_module(f"triglot.{name}")
    gc.enable()
    with socket.socket(fileno=int(sys.argv[1])) as requests:
        while True:
            request, files, *_ = socket.recv_fds(requests, LARGEST_REQUEST, STREAMS + 1)
            if not request:
                return
            if not os.fork():
                requests.close()
                _attend(request, files)
            for file in files:
                os.close(file)
            with suppress(ChildProcessError):  # There is none.
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _attend(request: bytes, files: Sequence[int]) -> NoReturn:
    """Fork one, and say how it is called and how it ended."""
    *streams, status = files
    pid = os.fork()
    if not pid:
        os.close(status)
        _run(request, streams)
    for stream in streams:
        os.close(stream)
    with socket.socket(fileno=status) as end:
        end.send(str(pid).encode())
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        end.send(str(code).encode())
    os._exit(0)


def _run(request: bytes, streams: Sequence[int]) -> None:
    """Be `python -m triglot ARGUMENTS`."""
    arguments, environment, folder = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path[0] = folder
    sys.argv[1:] = arguments
    runpy.run_module("triglot", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
