"""Archives: what is whole is unpacked, what is damaged is refused."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from triglot.platform.archives import FREE_BYTES, ArchiveTooLarge, TarError, unpack, unpack_zip

TEXTS = {"a.txt": b"first " * 1000, "below/b.txt": b"second " * 2000}
MODES = ("w", "w:gz", "w:bz2", "w:xz")


def written(path: Path, mode: str) -> bytes:
    with tarfile.open(path, mode) as archive:  # type: ignore[call-overload]  # One of MODES.
        for name, text in TEXTS.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text))
    return path.read_bytes()


@pytest.mark.parametrize("mode", MODES)
def test_what_is_whole(mode: str, tmp_path: Path) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "folder"
    written(archive, mode)
    unpack(archive, folder)
    assert {name: (folder / name).read_bytes() for name in TEXTS} == TEXTS
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.txt")) == sorted(TEXTS)


@pytest.mark.parametrize("mode", MODES[1:])
@pytest.mark.parametrize("part", [0.1, 0.5, 0.9, -1, -8])
def test_what_is_cut_off(mode: str, part: float, tmp_path: Path) -> None:
    text = written(tmp_path / "archive", mode)
    (tmp_path / "archive").write_bytes(text[: int(part * len(text)) if part > 0 else int(part)])
    with pytest.raises((OSError, TarError)):
        unpack(tmp_path / "archive", tmp_path / "folder")


@pytest.mark.parametrize("mode", MODES[1:])
def test_any_byte_that_is_changed(mode: str, tmp_path: Path) -> None:
    """Either it says so, or the files are what they were."""
    archive, text = tmp_path / "archive", written(tmp_path / "archive", mode)
    for at in range(0, len(text), 3):
        folder = tmp_path / str(at)
        archive.write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        try:
            unpack(archive, folder)
        except (OSError, TarError):
            continue
        assert {name: (folder / name).read_bytes() for name in TEXTS} == TEXTS


def _sum(text: bytes) -> bytes:
    return text.replace(b"second", b"Second", 1)


def _end(text: bytes) -> bytes:
    return text[:-5] + bytes([text[-5] ^ 1]) + text[-4:]


@pytest.mark.parametrize("damage", [_sum, _end])
def test_a_file_that_can_be_read_and_has_another_sum(damage: Callable[[bytes], bytes], tmp_path: Path) -> None:
    """The compressed data is stored as it is, so that the only sign of the change is the sum behind it."""
    plain = written(tmp_path / "archive", "w")
    (tmp_path / "archive").write_bytes(damage(gzip.compress(plain, 0)))
    with pytest.raises(OSError, match="CRC check failed"):
        unpack(tmp_path / "archive", tmp_path / "folder", mode="r:gz")


ZEROS = 3 * FREE_BYTES
"""Bytes that compress to a thousandth."""
Unpack = Callable[[Path, Path], None]


def zeros_in_tar(path: Path) -> Unpack:
    with tarfile.open(path, "w:gz") as archive:
        member = tarfile.TarInfo("zeros")
        member.size = ZEROS
        with Path("/dev/zero").open("rb") as zeros:
            archive.addfile(member, zeros)
    return unpack


def zeros_behind_a_tar(path: Path) -> Unpack:
    with gzip.open(path, "wb") as archive:
        archive.write(bytes(10240))  # The end of a tar.
        for _ in range(ZEROS // 2**20):
            archive.write(bytes(2**20))
    return unpack


def zeros_in_zip(path: Path) -> Unpack:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("zeros", bytes(ZEROS))
    return unpack_zip


@pytest.mark.parametrize("written", [zeros_in_tar, zeros_behind_a_tar, zeros_in_zip])
def test_few_bytes_that_stand_for_many(
    written: Callable[[Path], Callable[[Path, Path], None]], tmp_path: Path
) -> None:
    archive, folder = tmp_path / "archive", tmp_path / "folder"
    folder.mkdir()
    unpacks = written(archive)
    text = r"archive, of \d+ bytes, unpacks to more than \d+; an archive without"
    with pytest.raises(ArchiveTooLarge, match=text):
        unpacks(archive, folder)
    assert not list(folder.iterdir())
