"""A process that handles SIGBUS: copies survive it, and for everything else it is as it was."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.process import outcome, start_python

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files are mapped so on Linux")
BEGIN = """
import faulthandler, mmap, os, resource, signal
import numpy as np
from triglot.platform.bus_errors import bus_errors
from triglot.protocols.kserve.regions import GuardedMemory
from triglot.protocols.kserve.regions import Region

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
SIZE = 2**20
DATA = np.ones(SIZE, np.uint8)

def file():
    descriptor = os.memfd_create("file")
    os.ftruncate(descriptor, SIZE)
    return descriptor

def gone():
    # An array that is mapped from a file that has nothing any more.
    descriptor = file()
    array = np.frombuffer(mmap.mmap(descriptor, SIZE), np.uint8)
    os.ftruncate(descriptor, 0)
    return array

print("began", flush=True)
"""


def run(code: str, folder: Path) -> tuple[int, str, str]:
    """How the process ended, and what it printed; it does not run for ever."""
    done = outcome(start_python(["-c", BEGIN + code], folder=folder))
    assert done.stdout.startswith("began\n"), done.stderr
    return done.returncode, done.stdout.removeprefix("began\n"), done.stderr


@pytest.mark.parametrize(
    "end",
    [
        pytest.param("gone()[0]", id="another's memory"),
        pytest.param("os.kill(os.getpid(), signal.SIGBUS)", id="a signal that somebody sends"),
        pytest.param("GuardedMemory(file(), SIZE).write(gone().data, 0)", id="the other side of a copy"),
        pytest.param(
            "one = file(); memory = GuardedMemory(one, SIZE); os.ftruncate(one, 0); memory.write(gone().data, 0)",
            id="both sides of a copy",
        ),
        pytest.param(
            "one = file(); memory = GuardedMemory(one, SIZE); os.ftruncate(one, 0)\n"
            "from triglot.platform import bus_errors as ours\n"
            "ours.map_nothing = lambda *_: 1 / 0\nmemory.view(0, SIZE)[0]",
            id="what nothing can be put in the place of",
        ),
        pytest.param(
            "data = gone(); errors.forget(errors.guard(data.ctypes.data, SIZE)); data[0]",
            id="what was guarded once",
        ),
    ],
)
@pytest.mark.parametrize("before", [True, False], ids=["after another's handler", "after none"])
def test_a_process_that_is_to_end(before: bool, end: str, tmp_path: Path) -> None:
    """It does, with what was there before: Python's own says where it happened."""
    handler = "faulthandler.enable()\n" if before else ""
    code, _, output = run(f"{handler}errors = bus_errors()\nassert errors.in_place()\n{end}\n", tmp_path)
    assert code == -signal.SIGBUS
    assert ("Fatal Python error: Bus error" in output) == before


@pytest.mark.parametrize(
    "touch",
    [
        pytest.param("assert data[7] == 0", id="with the interpreter's lock"),
        pytest.param("assert data.view('f4').sum() == 0", id="without it"),
        pytest.param("assert bytes(data.data) == bytes(SIZE)", id="the interpreter itself"),
        pytest.param("import zlib; assert zlib.crc32(data) == zlib.crc32(bytes(SIZE))", id="a C library"),
        pytest.param(
            "from threading import Thread\n"
            "threads = [Thread(target=lambda at=at: data[at:].sum()) for at in range(0, SIZE, SIZE // 8)]\n"
            "for one in threads: one.start()\n"
            "for one in threads: one.join()",
            id="several threads",
        ),
        pytest.param(
            "libc = ctypes.CDLL(None)\n"
            "thread, length = ctypes.c_ulong(), ctypes.c_void_p(1)\n"
            "where = ctypes.c_void_p(data.ctypes.data)\n"
            "assert not libc.pthread_create(ctypes.byref(thread), None, libc.strlen, where)\n"
            "assert not libc.pthread_join(thread, ctypes.byref(length))\n"
            "assert length.value is None",
            id="a thread that is not Python's",
        ),
    ],
)
def test_guarded_access_does_not_end_the_process(touch: str, tmp_path: Path) -> None:
    """Wherever in it, and finds zeros, where no thread waits for it with the interpreter's lock."""
    code = """
import ctypes
data = gone()
guarded = bus_errors().guard(data.ctypes.data, SIZE)
assert not guarded.lost
"""
    after = """
assert guarded.lost and not data.any()
assert bus_errors().in_place()
"""
    assert run(f"{code}{touch}{after}", tmp_path) == (0, "", "")


def test_a_handler_that_comes_later(tmp_path: Path) -> None:
    """Where it cannot be known that memory is gone, none that may be is touched."""
    code = """
descriptor = file()
memory, region = GuardedMemory(descriptor, SIZE), Region("r", "/r", 0, SIZE, os.dup(descriptor))
region.write(DATA.data, 0)
assert memory.read(DATA.data, 0)
faulthandler.enable()
assert not bus_errors().in_place()
into = np.zeros_like(DATA)
assert not memory.read(into.data, 0) and not memory.write(into.data, 0)
region.read(into.data, 0)
assert (into == DATA).all()
region.write((into * 2).data, 0)
assert os.pread(descriptor, SIZE, 0) == (DATA * 2).tobytes()
os.ftruncate(descriptor, SIZE - 1)
try:
    region.read(into.data, 0)
except Exception as error:
    print(type(error).__name__)
faulthandler.disable()
assert bus_errors().in_place()
assert GuardedMemory(descriptor, SIZE).read(into.data, 0)
"""
    assert run(code, tmp_path) == (0, "InvalidArgument\n", "")


def test_the_end_of_a_process(tmp_path: Path) -> None:
    """What was there before is there again, before the interpreter goes."""
    code = """
import atexit
errors = []
atexit.register(lambda: print(errors[0].in_place()))
errors.append(bus_errors())
assert errors[0].in_place() and bus_errors() is errors[0]
"""
    assert run(code, tmp_path) == (0, "False\n", "")
