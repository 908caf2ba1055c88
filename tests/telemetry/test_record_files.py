"""Files of records: how they are named, where they end, which are kept, and what a full disk does to them."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from triglot.protocols.tfserving.record_files import MAX_RECORDS, RecordFiles


def sizes(folder: Path) -> dict[str, int]:
    return {file.name: file.stat().st_size for file in sorted(folder.iterdir())}


def test_a_file_ends_before_it_is_too_large(tmp_path: Path) -> None:
    files = RecordFiles(str(tmp_path / "r"), 100, 0)
    for size in (60, 40, 1, 250, 100):
        files.append(bytes(size))
    assert list(sizes(tmp_path).items()) == [
        ("r-00001.tfrecord", 100),
        ("r-00002.tfrecord", 1),
        ("r-00003.tfrecord", 250),
        ("r-00004.tfrecord", 100),
    ]


def test_a_file_holds_no_more_records_than_a_warm_up_may(tmp_path: Path) -> None:
    files = RecordFiles(str(tmp_path / "r"), 2**20, 0)
    for _ in range(MAX_RECORDS + 1):
        files.append(b"x")
    assert sizes(tmp_path) == {"r-00001.tfrecord": MAX_RECORDS, "r-00002.tfrecord": 1}


def test_the_latest_are_kept(tmp_path: Path) -> None:
    others = ("r-00001.txt", "r-w2-00001.tfrecord", "s-00001.tfrecord", "r-1.tfrecord")
    for name in others:
        (tmp_path / name).touch()
    files = RecordFiles(str(tmp_path / "r"), 10, 2)
    for _ in range(5):
        files.append(bytes(10))
    assert set(sizes(tmp_path)) == {*others, "r-00004.tfrecord", "r-00005.tfrecord"}


def test_no_file_that_exists_is_written_to(tmp_path: Path) -> None:
    """Neither that of an earlier start, nor that of another process."""
    (tmp_path / "r-00007.tfrecord").write_bytes(b"old")
    first, other = (RecordFiles(str(tmp_path / "r"), 100, 0) for _ in range(2))
    for files in (first, other, first):
        files.append(b"new")
    assert sizes(tmp_path) == {"r-00007.tfrecord": 3, "r-00008.tfrecord": 6, "r-00009.tfrecord": 3}


def test_a_file_that_is_moved_away_is_not_written_to_any_more(tmp_path: Path) -> None:
    files = RecordFiles(str(tmp_path / "r"), 100, 0)
    files.append(b"one")
    (tmp_path / "r-00001.tfrecord").rename(tmp_path / "moved")
    files.append(b"two")
    assert sizes(tmp_path) == {"moved": 3, "r-00001.tfrecord": 3}


@contextmanager
def no_file_larger_than(size: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_record_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    files = RecordFiles(str(tmp_path / "r"), 100, 0)
    files.append(b"a" * 10)
    with no_file_larger_than(15):
        for _ in range(2):
            with pytest.raises(OSError, match="disk is full"):
                files.append(b"b" * 10)
    files.append(b"c" * 10)
    assert (tmp_path / "r-00001.tfrecord").read_bytes() == b"a" * 10 + b"c" * 10


def test_without_a_folder(tmp_path: Path) -> None:
    files = RecordFiles(str(tmp_path / "none" / "r"), 100, 0)
    with pytest.raises(FileNotFoundError):
        files.append(b"a")
    (tmp_path / "none").mkdir()
    files.append(b"a")
    assert sizes(tmp_path / "none") == {"r-00001.tfrecord": 1}
