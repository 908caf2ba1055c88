"""Python processes forked from a server process that has imported a library already.

For some programs, importing the library takes most of their time.

Each of them is like one started by `python ARGUMENTS`, with arguments, environment, working directory, standard
streams and signals of its own. Only the start of the interpreter and the import are not repeated: a program with
environment variables that are read then has to be started as a new process.

    python forked.py FD MODULE...   # the server: forks a process per request on this socket, until it is closed
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
from types import ModuleType
from typing import IO, NoReturn

STREAMS = 3
LARGEST_REQUEST = 1 << 20
TRIGLOT = tuple(
    f"triglot.{name}" for name in ("cli.main", "server", "transports.http2.server", "transports.http1.server")
)
LIBRARIES = {
    "kserve": ("kserve",),
    "ml": ("sklearn.datasets", "sklearn.linear_model", "joblib", *TRIGLOT),
    "tensorflow": ("tensorflow", "tensorflow_serving.apis.prediction_service_pb2_grpc", *TRIGLOT),
    "torch": ("torch._dynamo", *TRIGLOT),
    "tritonclient": ("tritonclient.grpc.aio", "tritonclient.http"),
}
"""By environment: its modules that take long to import, and start no threads."""


def modules_of(python: str | Path) -> tuple[str, ...]:
    """Returns the modules to import before processes of this interpreter are forked; none if these are few."""
    return TRIGLOT if str(python) == sys.executable else LIBRARIES.get(Path(python).parents[1].name, ())


class Forked:
    """A running process `python ARGUMENTS`, with the part of `subprocess.Popen`'s interface that tests need.

    The arguments are `-m MODULE`, `-c CODE` or a script, followed by the program's own. `imported`: modules that
    are already imported in the process. `stdout` and `stderr` are pipes of text.
    """

    def __init__(
        self,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        folder: Path,
        python: str = sys.executable,
        imported: tuple[str, ...] = TRIGLOT,
    ) -> None:
        self.args = [python, *arguments]
        self.returncode: int | None = None
        self._status, status = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        (stdout, their_stdout), (stderr, their_stderr) = os.pipe(), os.pipe()
        self.stdout: IO[str] = os.fdopen(stdout, errors="replace")
        self.stderr: IO[str] = os.fdopen(stderr, errors="replace")
        try:
            request = json.dumps([arguments, dict(environment), str(folder)]).encode()
            socket.send_fds(
                _server(python, imported)[0], [request], [0, their_stdout, their_stderr, status.fileno()]
            )
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
        """Wait for the end of the process; returns its exit status.

        Raises `subprocess.TimeoutExpired` after `timeout` seconds.
        """
        if self.returncode is None:
            if not select.select([self._status], [], [], timeout)[0]:
                assert timeout is not None
                raise subprocess.TimeoutExpired(self.args, timeout)
            self.returncode = int(self._told())
            self._status.close()
        return self.returncode

    def poll(self) -> int | None:
        """Returns the exit status, or None while the process runs."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: signal.Signals) -> None:
        """Send a signal, unless the process has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the process has ended."""
        self.send_signal(signal.SIGKILL)


@cache
def _server(python: str, imported: tuple[str, ...]) -> tuple[socket.socket, subprocess.Popen[bytes]]:
    """Returns the socket to the server process that forks, and that process.

    It is started on first use, and ends with this process.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        command = [python, __file__, str(theirs.fileno()), *imported]
        return ours, subprocess.Popen(command, pass_fds=[theirs.fileno()], env=environment)


def main() -> None:
    """Run the server process: fork one process per request."""
    gc.disable()
    for name in sys.argv[2:]:
        importlib.import_module(name)
    gc.freeze()  # Else each process would copy all these objects' memory at its first collection, and at its end.
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
            with suppress(ChildProcessError):  # There is no child process.
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass


def _attend(request: bytes, files: Sequence[int]) -> NoReturn:
    """Fork one process; send its id, and its exit status once it has ended."""
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


def _run(request: bytes, streams: Sequence[int]) -> NoReturn:
    """Run `python ARGUMENTS` in this process."""
    arguments, environment, folder = json.loads(request)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    match arguments:
        case ["-m", module, *rest]:
            sys.path[0] = folder
            sys.argv[1:] = rest
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case ["-c", code, *rest]:
            sys.path[0] = ""
            sys.argv[:] = ["-c", *rest]
            main_module = sys.modules["__main__"] = ModuleType("__main__")
            exec(compile(code, "<string>", "exec"), vars(main_module))
        case [script, *_]:
            sys.path[0] = str(Path(script).parent)
            sys.argv[:] = arguments
            runpy.run_path(script, run_name="__main__")
    sys.exit()


if __name__ == "__main__":
    main()
