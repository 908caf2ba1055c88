"""Sizes and times of the files of a version, to detect changes without reading them."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from itertools import islice
from pathlib import Path

from triglot.repository.config.model_config import CONFIG_FILE
from triglot.repository.config.version_names import NAMES_FILE
from triglot.repository.scan.paths import below
from triglot.repository.scan.source import ModelFiles, named_files

Sign = tuple[int, int]
"""Size and modification time (nanoseconds) of a file."""
Contents = Mapping[str, Sign]
"""The sign of each file and folder, by path."""

ABSENT: Sign = (-1, -1)
END_BYTES = 4096
MAX_ENTRIES = 10_000
"""Limit on the entries of a folder; a model file may lie in a folder with unrelated files."""


def contents_of(files: ModelFiles) -> dict[str, Sign]:
    """Return the files of a version: those in its folder but the model's own, and those that its config names."""
    folder = files.folder or files.file.parent
    if not files.single_file:
        found = folder_contents(folder)
        for name in (CONFIG_FILE, NAMES_FILE):
            found.pop(str(folder / name), None)
    elif files.file.suffix == ".py":
        found = {str(file): sign_of(file) for file in folder.glob("*.py")}  # It may import any of them.
    else:
        found = {}
    named = [files.file, *named_files(files.config)]
    if files.config.environment is not None:
        named.append(files.config.environment)
    return found | {str(file): sign_of(file) for file in named}


def folder_contents(folder: Path) -> dict[str, Sign]:
    """Return everything `below` a folder, at most `MAX_ENTRIES` entries."""
    return {entry.path: sign_of(entry) for entry in islice(below(folder), MAX_ENTRIES)}


def stamp_of(contents: Contents) -> int:
    """Return a hash of the contents."""
    return hash(frozenset(contents.items()))


def sign_of(path: os.DirEntry[str] | Path) -> Sign:
    """Return the sign of a file or folder; follows links."""
    try:
        status = path.stat()
    except OSError:
        return ABSENT  # It was removed just now, or is a dangling link.
    # The time of a folder changes with any entry, such as __pycache__.
    return (0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)


def end_of(path: str, size: int) -> bytes | None:
    """Return the end of a file's first `size` bytes, at most `END_BYTES`; None if it is no file."""
    try:
        if not Path(path).is_file():  # Opening a pipe may block forever.
            return None
        with Path(path).open("rb") as file:
            file.seek(max(0, size - END_BYTES))
            return file.read(min(size, END_BYTES))
    except OSError:
        return None
