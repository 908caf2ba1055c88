"""Unpacks archives, tar and zip, compressed or not, within limits, as few bytes can stand for any number."""

from __future__ import annotations

import lzma
import sys
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING or sys.version_info >= (3, 11, 4):
    import tarfile
else:  # Older releases have no filters.
    from backports import tarfile

TarError, tar_filter = tarfile.TarError, tarfile.tar_filter
TarInfo: TypeAlias = tarfile.TarInfo
Keep: TypeAlias = Callable[[TarInfo, str], TarInfo | None]

FREE_BYTES = 64 * 1024 * 1024
MAX_RATIO = 100
"""An archive may unpack to `FREE_BYTES`, and to so many times its own size in addition."""
MAX_ENTRIES = 1_000_000

_PIECE = 1 << 20


class ArchiveTooLarge(tarfile.TarError):
    """The archive would unpack to too many bytes or files."""


class _Room:
    """What an archive may still unpack to."""

    def __init__(self, archive: Path) -> None:
        self._name = archive.name
        self._packed = archive.stat().st_size
        self._most = FREE_BYTES + MAX_RATIO * self._packed
        self._bytes = self._entries = 0

    def take(self, size: int, entries: int = 1) -> None:
        """Count an entry of `size` bytes. Raise `ArchiveTooLarge`."""
        self._bytes += size
        self._entries += entries
        if self._entries > MAX_ENTRIES:
            raise ArchiveTooLarge(f"{self._name} has more than {MAX_ENTRIES} entries")
        if self._bytes > self._most:
            raise ArchiveTooLarge(
                f"{self._name}, of {self._packed} bytes, unpacks to more than {self._most}; an archive without "
                f"compression may have any size"
            )


def unpack(
    archive: Path,
    folder: Path,
    *,
    mode: Literal["r", "r:gz"] = "r",
    keep: Keep = tarfile.data_filter,
) -> None:
    """Unpack a tar archive into `folder`; `mode` and `keep` are `tarfile.open`'s mode and `extractall`'s filter.

    Raise `OSError` and `TarError`, also for a wrong checksum of the compressed data, and `ArchiveTooLarge`.
    """
    room = _Room(archive)

    def counting_filter(member: TarInfo, path: str) -> TarInfo | None:
        room.take(member.size)
        return keep(member, path)

    try:
        with tarfile.open(archive, mode) as packed:
            packed.extractall(folder, filter=counting_filter)
            # The checksum follows the padding of the tar, which `tarfile` may not read.
            while piece := packed.fileobj.read(_PIECE):
                room.take(len(piece), 0)
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise tarfile.ReadError(f"{archive.name} is damaged: {error}") from error


def check_zip(archive: Path, packed: zipfile.ZipFile) -> None:
    """Raise `ArchiveTooLarge` for a zip archive, opened as `packed`, with too much to read or to unpack."""
    room = _Room(archive)
    for entry in packed.infolist():
        room.take(entry.file_size)  # No more than this is read of an entry.


def unpack_zip(archive: Path, folder: Path) -> None:
    """Unpack a zip archive into `folder`.

    Raise `OSError` and `TarError`, also for paths that lead out of the folder, and `ArchiveTooLarge`.
    """
    try:
        with zipfile.ZipFile(archive) as packed:
            check_zip(archive, packed)
            for entry in packed.infolist():
                path = PurePosixPath(entry.filename)
                if path.is_absolute() or ".." in path.parts:
                    raise tarfile.ExtractError(f"it has a file outside of itself, {entry.filename!r}")
            packed.extractall(folder)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise tarfile.ReadError(f"{archive.name} is damaged, or cannot be read: {error}") from error
