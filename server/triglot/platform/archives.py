"""Unpacks tar archives, compressed or not."""

from __future__ import annotations

import lzma
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

if TYPE_CHECKING or sys.version_info >= (3, 11, 4):
    import tarfile
else:  # Older releases have no filters.
    from backports import tarfile

TarError, tar_filter = tarfile.TarError, tarfile.tar_filter
TarInfo: TypeAlias = tarfile.TarInfo

_PIECE = 1 << 20


def unpack(
    archive: Path,
    folder: Path,
    *,
    mode: Literal["r", "r:gz"] = "r",
    keep: Literal["data"] | Callable[[tarfile.TarInfo, str], tarfile.TarInfo | None] = "data",
) -> None:
    """Unpacks an archive into `folder`; `mode` and `keep` are `tarfile.open`'s mode and `extractall`'s filter.

    Raises `OSError` and `TarError`, also for a wrong checksum of the compressed data.
    """
    try:
        with tarfile.open(archive, mode) as packed:
            packed.extractall(folder, filter=keep)
            # The checksum follows the padding of the tar, which `tarfile` may not read.
            while packed.fileobj.read(_PIECE):
                pass
    except (EOFError, zlib.error, lzma.LZMAError) as error:
        raise tarfile.ReadError(f"{archive.name} is damaged: {error}") from error
