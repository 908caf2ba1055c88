"""Caches files that a library takes seconds to write for tests, in the environment that has the library."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path


def kept_files(prefix: Path, kind: str, source: str, write: Callable[[Path], object]) -> Path:
    """Return the folder with the files that `write` writes, which is called once for each `source`.

    `source` is the cache key: everything that the files depend on. `prefix` is the environment's folder, with
    which the files are deleted. A test that changes files must copy them.
    """
    digest = hashlib.sha256(source.encode()).hexdigest()[:16]
    folder = prefix / "kept_files" / f"{kind}-{digest}"
    folder.parent.mkdir(exist_ok=True)
    with folder.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            written = folder.with_suffix(".new")
            shutil.rmtree(written, ignore_errors=True)
            written.mkdir()
            write(written)
            written.rename(folder)
    return folder
