"""A bench that is ended leaves nothing behind."""

import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from bench.servers import ROOT

SECONDS = 60.0


def _serves(one: psutil.Process) -> bool:
    try:
        return "serve" in one.cmdline()
    except psutil.Error:
        return False  # It has ended meanwhile.


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """What is started in the background of a shell ignores Ctrl-C, and so does all that it starts."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_who_has_ended_has_ended_what_it_began(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "bench", "overload"]
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
            assert not [one for one in begun if one.is_running()]
        finally:
            for one in [everything, *begun]:
                if one.is_running():
                    one.kill()
