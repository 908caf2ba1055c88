"""Model archives: .tar, .tar.gz and .zip."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from triglot.platform.archives import TarError, unpack, unpack_zip
from triglot.repository.storage.store import StoreError

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")


def without_suffix(name: str) -> str | None:
    """Return the name without its archive suffix; None if it has none."""
    for suffix in SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix)
    return None


def extract(archive: Path, name: str, folder: Path) -> None:
    """Unpacks an archive with this file name, and gives all files its time, as their own may not change with it.

    Raise `StoreError`, also for paths that lead out of the folder, and for one that is too large when it is
    unpacked; nothing is left then.
    """
    folder.mkdir(parents=True)
    try:
        if name.endswith(".zip"):
            unpack_zip(archive, folder)
        else:
            unpack(archive, folder, mode="r" if name.endswith(".tar") else "r:gz")
    except TarError as error:
        shutil.rmtree(folder, ignore_errors=True)
        raise StoreError(f"the archive cannot be unpacked: {error}") from None
    modified = archive.stat().st_mtime_ns
    for file in folder.rglob("*"):
        os.utime(file, ns=(modified, modified), follow_symlinks=False)
