"""Starts `triglot` as a process, as a user does, and reads its output; with helpers for ports, files and models.

Nothing here sleeps for a fixed time: each wait is for an event, with a deadline.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from tests.transports import grpc_transport
from triglot.testing.process import Lines, Process

SECONDS = 60
"""Deadline of every wait; only a failing test waits as long."""
PLAIN_MODELS = Path(__file__).parent / "models_plain"
"""A repository of small models: sums, text, a stream, and an identity of each datatype."""
FREE_PORTS = ("--grpc-port", "0", "--rest-port", "0")
BUILD_VARIABLE = "COMPILED_BUILD"
"""Names the folder of the compiled build that is tested, if it is (Makefile)."""
LISTENING = re.compile(r"gRPC on 127\.0\.0\.1:(\d+) and REST on 127\.0\.0\.1:(\d+) in \d+\.\d\d s")


def compiled_build() -> dict[str, str]:
    """Return the variable by which a process of the tests finds the compiled build, if that is tested."""
    folder = os.environ.get(BUILD_VARIABLE)
    return {"PYTHONPATH": folder} if folder else {}


def clean_environment(**extra: str) -> dict[str, str]:
    """Return the environment of this process without proxies and options of triglot and Python, and with `extra`.

    Variables that would affect the server or its clients are removed. Those that select the transport and the
    build under test are kept, so that started processes use it, too.
    """
    kept = {
        name: value
        for name, value in os.environ.items()
        if name in (grpc_transport.VARIABLE, grpc_transport.HTTP_VARIABLE)
        or not (name.lower().endswith("_proxy") or name.startswith(("TRIGLOT_", "PYTHON")))
    }
    return kept | compiled_build() | extra


def triglot_command(
    arguments: tuple[str | Path, ...], before: str = "", python: str | Path = sys.executable
) -> list[str]:
    """Return the command line of `triglot ARGUMENTS`; `before` is code that runs first, in the same process."""
    if before:
        program = ["-c", f"{before}\nimport sys\nfrom triglot.cli.main import main\nsys.exit(main())"]
    else:
        program = ["-m", "triglot"]
    return [str(python), *program, *map(str, arguments)]


def start_python(
    arguments: Sequence[str],
    python: str | Path = sys.executable,
    environment: Mapping[str, str] | None = None,
    folder: Path | None = None,
) -> subprocess.Popen[str]:
    """Start `python ARGUMENTS`, with pipes of text."""
    return subprocess.Popen(
        [str(python), *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=clean_environment(**(environment or {})),
    )


class Triglot(Process):
    """A running process `triglot serve ARGUMENTS`, or another command, in this or another environment's `python`.

    `environment`: additional variables. `before`: code that runs first in the process. `folder`: its working
    directory. It is killed at the end of the `with` block if it still runs.
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
        words = triglot_command((command, *arguments), before)[1:]
        super().__init__(start_python(words, python, environment, folder))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()


def run_triglot(
    *arguments: str | Path, environment: Mapping[str, str] | None = None, before: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run `triglot ARGUMENTS` until it ends; returns its exit status and output."""
    return outcome(start_python(triglot_command(arguments, before)[1:], environment=environment))


def outcome(process: subprocess.Popen[str], seconds: float = SECONDS) -> subprocess.CompletedProcess[str]:
    """Wait for a process to end; returns its output and exit status. It is killed after `seconds`."""
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
    """Yield a port of this machine that is in use."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


def _port_numbers() -> Iterator[int]:
    """Yield ports below those that the kernel assigns for port 0, other ones in each of ten test processes."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 10
    first, count = 10_000 + 2_000 * worker, 2_000
    start = random.SystemRandom().randrange(count)
    for number in itertools.count(start):
        yield first + number % count


PORT_NUMBERS = _port_numbers()


def unused_ports() -> tuple[int, int]:
    """Return two ports that are free now, and that no process of this run tries again soon."""
    found: list[int] = []
    while len(found) < 2:
        port = next(PORT_NUMBERS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.append(port)
    return found[0], found[1]


def is_listening(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a connection to the port is accepted."""
    try:
        with socket.create_connection((host, port), SECONDS):
            return True
    except ConnectionError:  # Refused, or reset by a process that is closing the port.
        return False


IDENTITY = """
import triglot

class Identity(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def infer(self, inputs):
        return {"y": inputs["x"]}
"""


def write_atomically(file: Path, text: str) -> Path:
    """Replace a file atomically: readers see all of its text, or none. Return the file's path."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part_file = file.with_name(f".{file.name}.part")
    part_file.write_text(text)
    return part_file.rename(file)


def write_model(folder: Path, text: str = IDENTITY) -> Path:
    """Write a model folder; returns the path of its model.py."""
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "model.py"
    file.write_text(text)
    return file
