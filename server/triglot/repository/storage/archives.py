"""Model archives: .tar, .tar.gz and .zip."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path, PurePosixPath

from triglot.platform.archives import TarError, unpack
from triglot.repository.storage.store import StoreError

SUFFIXES = (".tar.gz", ".tgz", ".tar", ".zip")


def without_suffix(name: str) -> str | None:
    """Returns the name without its archive suffix; None if it has none."""
    for suffix in SUFFIXES:
        if name.endswith(suffix) and name != suffix:
            return name.removesuffix(suffix)
    return None


def extract(archive: Path, name: str, folder: Path) -> None:
    """Unpacks an archive with this file name, and gives all files its time, as their own may not change with it.

    Raises `StoreError`, also for paths that lead out of the folder.
    """
    folder.mkdir(parents=True)
    try:
        if name.endswith(".zip"):
            with zipfile.ZipFile(archive) as packed:
                for entry in packed.infolist():
                    path = PurePosixPath(entry.filename)
                    if path.is_absolute() or ".." in path.parts:
                        raise StoreError(f"the archive has a file outside of itself, {entry.filename!r}")
                packed.extractall(folder)
        else:
            unpack(archive, folder, mode="r" if name.endswith(".tar") else "r:gz")
    except (TarError, zipfile.BadZipFile, NotImplementedError, RuntimeError) as error:
        raise StoreError(f"the archive cannot be unpacked: {error}") from None
    modified = archive.stat().st_mtime_ns
    for file in folder.rglob("*"):
        os.utime(file, ns=(modified, modified), follow_symlinks=False)
