"""A `triglot` process as a user starts it, what it says, and the few calls that tests of a process make.

Nothing here waits a fixed time: everything is waited for, with a deadline.
"""

from __future__ import annotations

import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Self

import grpc_transport

import environments
from forked import CLIENTS, Forked

SECONDS = 60
"""How long anything may take; only a test that fails waits so long."""
FREE_PORTS = ("--grpc-port", "0", "--rest-port", "0")
LISTENING = re.compile(r"gRPC on 127\.0\.0\.1:(\d+) and REST on 127\.0\.0\.1:(\d+) in \d+\.\d\d s")


def clean_environment(**extra: str) -> dict[str, str]:
    """This process's environment without what would lead the server or its clients astray, and `extra`.

    Which transport the tests go through stays, so that the processes they start are like them.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in (grpc_transport.VARIABLE, grpc_transport.HTTP_VARIABLE)
        or not (name.lower().endswith("_proxy") or name.startswith(("TRIGLOT_", "PYTHON")))
    }
    return kept | extra


def triglot_command(
    arguments: tuple[str | Path, ...], before: str = "", python: str | Path = sys.executable
) -> list[str]:
    """`triglot ARGUMENTS`; `before` is code that runs first, in the same process."""
    if before:
        program = ["-c", f"{before}\nimport sys\nfrom triglot.cli.main import main\nsys.exit(main())"]
    else:
        program = ["-m", "triglot"]
    return [str(python), *program, *map(str, arguments)]


def _start(
    arguments: tuple[str | Path, ...],
    environment: Mapping[str, str] | None,
    before: str = "",
    python: str | Path = sys.executable,
    folder: Path | None = None,
) -> subprocess.Popen[str] | Forked:
    """`triglot ARGUMENTS`: forked, unless it is to be another Python, or one that begins otherwise."""
    extra = environment or {}
    plain = not before and python == sys.executable and all(name.startswith("TRIGLOT_") for name in extra)
    if plain and "COVERAGE_PROCESS_CONFIG" not in os.environ:  # Coverage is measured from the start on.
        command = triglot_command(arguments)[1:]
        return Forked(command, clean_environment(**extra), folder or Path.cwd())
    return subprocess.Popen(
        triglot_command(arguments, before, python),
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=clean_environment(**extra),
    )


def python_in(
    environment: str, *arguments: str, folder: Path | None = None, **variables: str
) -> subprocess.Popen[str] | Forked:
    """`python ARGUMENTS` in one of the tests' environments: forked where its library takes seconds to import."""
    python, folder = str(environments.python(environment)), folder or Path.cwd()
    if imported := CLIENTS.get(environment):
        return Forked(arguments, clean_environment(**variables), folder, python, imported)
    return subprocess.Popen(
        [python, *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=clean_environment(**variables),
    )


class Lines:
    """The text of a pipe, read by a thread so that the writer never waits."""

    def __init__(self, pipe: IO[str]) -> None:
        self._pipe = pipe
        self._text = ""
        self._ended = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        for line in self._pipe:
            with self._changed:
                self._text += line
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def text(self) -> str:
        """What was written so far."""
        with self._changed:
            return self._text

    def wait_for(self, pattern: str | re.Pattern[str]) -> re.Match[str]:
        """The first match, now or later. Raises `AssertionError` when the text ends without one."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or re.search(pattern, self._text) is not None, SECONDS)
            match = re.search(pattern, self._text)
        assert match is not None, f"no {pattern!r} in:\n{self._text}"
        return match

    def close(self) -> str:
        """All that was written; the writer is gone."""
        self._thread.join(SECONDS)
        self._pipe.close()
        return self._text


class Triglot:
    """`triglot serve ARGUMENTS`, or another command than `serve`, running in this or another environment's python.

    Killed at the end of the `with` block when it still runs then.
    """

    def __init__(
        self,
        *arguments: str | Path,
        command: str = "serve",
        environment: Mapping[str, str] | None = None,
        before: str = "",
        python: str | Path = sys.executable,
        folder: Path | None = None,
    ) -> None:
        self._process = _start((command, *arguments), environment, before, python, folder)
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self.stdout = Lines(self._process.stdout)
        self.stderr = Lines(self._process.stderr)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.wait()
        self.stdout.close()
        self.stderr.close()

    def ports(self) -> tuple[int, int]:
        """The ports of gRPC and REST, as soon as the log says that they are open."""
        grpc_port, rest_port = self.stderr.wait_for(LISTENING).groups()
        return int(grpc_port), int(rest_port)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self) -> int:
        """The exit status, and both texts complete."""
        status = self._process.wait(SECONDS)
        self.stdout.close()
        self.stderr.close()
        return status

    def stop(self) -> None:
        """SIGTERM, and a clean end."""
        self.signal(signal.SIGTERM)
        assert self.wait() == 0, self.stderr.text()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def runs(self) -> bool:
        """Whether it has not ended yet."""
        return self._process.poll() is None


def run_triglot(
    *arguments: str | Path, environment: Mapping[str, str] | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """`triglot ARGUMENTS`, to its end."""
    return outcome(_start(arguments, environment, before))


def outcome(process: subprocess.Popen[str] | Forked, seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """What it wrote, and its exit status: that of SIGKILL when it ran for longer than this."""
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = Lines(process.stdout), Lines(process.stderr)
    try:
        status = process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        status = process.wait()
    return subprocess.CompletedProcess(process.args, status, stdout.close(), stderr.close())


@contextmanager
def taken_port() -> Iterator[int]:
    """A port of this machine that somebody else listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def unused_ports() -> tuple[int, int]:
    """Two ports that are free at the moment, none of those that the kernel gives to who asks for any (port 0)."""
    found: set[int] = set()
    while len(found) < 2:
        port = random.SystemRandom().randrange(10_000, 30_000)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    one, other = found
    return one, other


def is_listening(port: int) -> bool:
    """Whether a connection to the port is accepted."""
    try:
        with socket.create_connection(("127.0.0.1", port), SECONDS):
            return True
    except ConnectionError:  # Refused, or reset by one who is just about to close it.
        return False


IDENTITY = """
import triglot

class Identity(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def infer(self, inputs):
        return {"y": inputs["x"]}
"""


def write_whole(file: Path, text: str) -> Path:
    """The file, replaced in one step: who looks meanwhile finds all of its text, or none."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.part")
    beside.write_text(text)
    return beside.rename(file)


def write_model(folder: Path, text: str = IDENTITY) -> Path:
    """A model folder; the path of its file."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.py"
    file.write_text(text)
    return file
