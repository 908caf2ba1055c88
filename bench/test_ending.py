"""A bench that is ended leaves nothing behind."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from bench.__main__ import running
from bench.servers import ROOT, started

SECONDS = 60.0


def _serves(process: psutil.Process) -> bool:
    try:
        return "serve" in process.cmdline()
    except psutil.Error:
        return False  # It has ended meanwhile.


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """What is started in the background of a shell ignores Ctrl-C, and so does all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class Starting:
    """A `subprocess.Popen` that is terminated between the start and the return."""

    def __init__(self, number: signal.Signals) -> None:
        self.number = number
        self.started: list[subprocess.Popen[bytes]] = []
        self._start = subprocess.Popen

    def __call__(self, *arguments: Any, **named: Any) -> subprocess.Popen[bytes]:
        process = self._start(*arguments, **named)
        self.started.append(process)
        signal.raise_signal(self.number)
        return process


def server(tmp_path: Path) -> AbstractContextManager[Any]:
    command = [sys.executable, "-c", "import time; time.sleep(600)"]  # Does nothing until it is ended.
    return started("m", command, lambda: True, core=None, log=tmp_path / "log", environment={})


def bench(tmp_path: Path) -> AbstractContextManager[Any]:
    return running("overload", ("--seconds", "600"))


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize(
    ("start", "number", "raised"),
    [
        (server, signal.SIGTERM, SystemExit),
        (server, signal.SIGINT, KeyboardInterrupt),
        (bench, signal.SIGTERM, SystemExit),
    ],
)
def test_who_is_ended_while_it_starts_something(
    start: Callable[[Path], AbstractContextManager[Any]],
    number: signal.Signals,
    raised: type[BaseException],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starting = Starting(number)
    monkeypatch.setattr(subprocess, "Popen", starting)  # It starts the real process; then the signal comes.
    with pytest.raises(raised), start(tmp_path):
        raise AssertionError
    (process,) = starting.started
    assert process.returncode is not None


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_has_ended_has_ended_what_it_began(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "bench", "lifecycle"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        everything = psutil.Process(process.pid)
        try:
            limit = time.monotonic() + SECONDS
            while not any(map(_serves, begun := everything.children(recursive=True))):
                assert process.poll() is None
                assert time.monotonic() < limit
                time.sleep(0.05)  # Nothing tells when a process of a process begins.
            if number == signal.SIGINT:
                for bench in everything.children():
                    bench.send_signal(number)  # A terminal tells all of them.
            process.send_signal(number)
            process.wait(SECONDS)
            assert not [begun_process for begun_process in begun if begun_process.is_running()]
        finally:
            for begun_process in [everything, *begun]:
                if begun_process.is_running():
                    begun_process.kill()
