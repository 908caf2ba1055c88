"""Copies out of and into a file that others make smaller: never more than there is, and the process lives."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from triglot.core.errors import InvalidArgument
from triglot.protocols.kserve import regions
from triglot.protocols.kserve.regions import GuardedMemory, Region

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has these calls")
PAGE = os.sysconf("SC_PAGE_SIZE")
SIZE = 64 * PAGE
STRIDE, PIECE = regions._STRIDE, regions._PIECE
LOSSES = 20


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(opened, SIZE)
    yield opened
    os.close(opened)


@pytest.mark.parametrize("size", [PAGE, SIZE, STRIDE, STRIDE + 8, 3 * STRIDE - 1, PIECE, 2 * PIECE + 3 * PAGE])
def test_written_bytes_are_read(size: int, descriptor: int) -> None:
    os.ftruncate(descriptor, size)
    memory = GuardedMemory(descriptor, size)
    data = np.random.default_rng(1).integers(0, 256, size - 7, np.uint8)
    assert memory.write(data.data, 7)
    assert os.pread(descriptor, data.size, 7) == data.tobytes()
    into = np.zeros_like(data)
    assert memory.read(into.data, 7)
    assert (into == data).all()


@pytest.mark.parametrize("left", [0, 1, PAGE, SIZE // 2, SIZE - PAGE])
@pytest.mark.parametrize("copy", ["read", "write"])
def test_a_file_that_has_shrunk(copy: str, left: int, descriptor: int) -> None:
    memory = GuardedMemory(descriptor, SIZE)
    data = np.ones(SIZE - 7, np.uint8).data
    os.ftruncate(descriptor, left)
    assert not getattr(memory, copy)(data, 7)
    assert memory.lost
    assert os.fstat(descriptor).st_size == left
    os.ftruncate(descriptor, SIZE)
    assert not memory.read(data, 7), "what was mapped is not the file's any more"
    assert GuardedMemory(descriptor, SIZE).read(data, 7)


def test_remaining_bytes_are_copied(descriptor: int) -> None:
    memory = GuardedMemory(descriptor, SIZE)
    os.ftruncate(descriptor, PAGE + 1)
    data = np.ones(2 * PAGE, np.uint8).data
    assert memory.write(data, 0), "of its last page all can be touched"
    assert memory.read(data, 0)
    assert os.fstat(descriptor).st_size == PAGE + 1


@pytest.mark.parametrize("copy", ["read", "write"])
def test_a_file_that_is_larger_than_memory(copy: str, descriptor: int) -> None:
    """Of what is gone only what is copied is there in another form."""
    size = 2**42
    os.ftruncate(descriptor, size)
    memory = GuardedMemory(descriptor, size)
    os.ftruncate(descriptor, PAGE)
    assert not getattr(memory, copy)(np.empty(3 * PAGE, np.uint8).data, size - 5 * PAGE + 3)
    assert os.fstat(descriptor).st_size == PAGE


@pytest.mark.parametrize("copy", ["read", "write"])
def test_a_file_that_shrinks_while_threads_copy(copy: str, descriptor: int) -> None:
    """Each of them comes upon that, in a mapping of its own or of another, and all live."""
    over = threading.Event()
    shared = [GuardedMemory(descriptor, SIZE)]

    def shrink() -> None:
        while not over.is_set():
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, SIZE)

    def losses() -> int:
        into, lost, until = np.ones(SIZE, np.uint8), 0, time.monotonic() + 30
        while lost < LOSSES and time.monotonic() < until:
            memory = shared[0]
            if memory.lost:
                memory = shared[0] = GuardedMemory(descriptor, SIZE)
            lost += not getattr(memory, copy)(into.data, 0)
        return lost

    with ThreadPoolExecutor() as threads:
        shrinking = threads.submit(shrink)
        copying = [threads.submit(losses) for _ in range(3)]
        counts = [task.result() for task in copying]
        over.set()
        shrinking.result()
    assert counts == [LOSSES] * 3


def test_a_descriptor_of_nothing_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        GuardedMemory(-1, PAGE)


def mappings(file: Path) -> int:
    return sum(str(file) in line and "rw-s" in line for line in Path("/proc/self/maps").read_text().splitlines())


def descriptors(file: int) -> int:
    """Of the same file: what earlier tests have left opens and closes others."""
    count = 0
    for path in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # It is closed.
            count += os.path.sameopenfile(int(path.name), file)
    return count


def test_it_keeps_no_descriptor_and_is_unmapped(descriptor: int, tmp_path: Path) -> None:
    memory = GuardedMemory(descriptor, SIZE)
    assert descriptors(descriptor) == 1
    assert mappings(tmp_path) == 1
    del memory
    assert mappings(tmp_path) == 0


def test_a_region_maps_what_it_takes_to_copy_large_tensors(descriptor: int, tmp_path: Path) -> None:
    """And maps it anew when a part was gone."""
    region = Region("r", "/r", PAGE, SIZE - PAGE, os.dup(descriptor))
    small, large = np.full(PAGE, 2, np.uint8), np.full(SIZE - PAGE, 3, np.uint8)
    region.write(small.data, PAGE)
    assert mappings(tmp_path) == 0
    region.write(large.data, 0)
    assert mappings(tmp_path) == 1
    assert os.pread(descriptor, SIZE, 0) == bytes(PAGE) + large.tobytes()
    os.ftruncate(descriptor, PAGE)
    for copy in (region.read, region.write):
        with pytest.raises(InvalidArgument, match=f"'r': expected {SIZE - PAGE} bytes, got fewer"):
            copy(large.data, 0)
    os.ftruncate(descriptor, SIZE)
    region.write(small.data, 0)
    for _ in range(2):
        region.read(large.data, 0)
        assert large.tobytes() == small.tobytes() + bytes(SIZE - 2 * PAGE)
    assert mappings(tmp_path) == 1
