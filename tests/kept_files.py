"""Files that a library takes seconds to write for tests: kept in the environment that has the library."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path


def kept_files(prefix: Path, kind: str, source: str, write: Callable[[Path], object]) -> Path:
    """The folder with what `write` writes into it, once for each `source`: all that the files depend on.

    `prefix` is the environment's. The folder lasts as long as that; a test that changes files copies them.
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
