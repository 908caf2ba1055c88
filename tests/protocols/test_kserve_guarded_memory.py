"""Copies out of and into a file that others make smaller: never more than there is, and the process lives."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from triglot.protocols.kserve.guarded_memory import GuardedMemory

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux has these calls")
PAGE = os.sysconf("SC_PAGE_SIZE")
SIZE = 64 * PAGE


@pytest.fixture
def descriptor(tmp_path: Path) -> Iterator[int]:
    opened = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    os.ftruncate(opened, SIZE)
    yield opened
    os.close(opened)


def test_what_is_written_is_there_and_is_read(descriptor: int) -> None:
    memory = GuardedMemory(descriptor, SIZE)
    data = np.random.default_rng(1).integers(0, 256, SIZE - 7, np.uint8)
    assert memory.write(data.data, 7) == data.size
    assert os.pread(descriptor, SIZE, 7) == data.tobytes()
    into = np.zeros_like(data)
    assert memory.read(into.data, 7) == data.size
    assert (into == data).all()


@pytest.mark.parametrize("left", [0, 1, PAGE, SIZE // 2])
def test_a_file_that_has_shrunk_gives_what_it_has(descriptor: int, left: int) -> None:
    memory = GuardedMemory(descriptor, SIZE)
    os.ftruncate(descriptor, left)
    there = -(-left // PAGE) * PAGE  # Of its last page all can be touched.
    assert memory.read(np.empty(SIZE, np.uint8).data, 0) == there
    assert memory.write(np.ones(SIZE, np.uint8).data, 0) == there
    assert os.fstat(descriptor).st_size == left
    os.ftruncate(descriptor, SIZE)
    assert memory.read(np.empty(SIZE, np.uint8).data, 0) == SIZE


def test_a_file_that_shrinks_while_it_is_copied(descriptor: int) -> None:
    memory = GuardedMemory(descriptor, SIZE)
    ended = threading.Event()

    def shrink() -> None:
        while not ended.is_set():
            os.ftruncate(descriptor, 0)
            os.ftruncate(descriptor, SIZE)

    thread = threading.Thread(target=shrink)
    thread.start()
    try:
        into = np.empty(SIZE, np.uint8)
        counts = [memory.read(into.data, 0) for _ in range(500)] + [memory.write(into.data, 0) for _ in range(500)]
    finally:
        ended.set()
        thread.join()
    assert all(0 <= count <= SIZE for count in counts)
    assert min(counts) < SIZE


def test_a_descriptor_of_nothing_is_an_error() -> None:
    with pytest.raises(OSError, match="Bad file descriptor"):
        GuardedMemory(-1, PAGE)


def mappings() -> int:
    return sum("/file" in line and "rw-s" in line for line in Path("/proc/self/maps").read_text().splitlines())


def test_it_keeps_no_descriptor_and_goes(descriptor: int) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    memory = GuardedMemory(descriptor, SIZE)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert mappings() == 1
    del memory
    assert mappings() == 0
