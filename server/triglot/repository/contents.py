"""What lies in a version's folder: whether it is the same as before, without reading it."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path

from triglot.repository.model_config import CONFIG_FILE
from triglot.repository.paths import below
from triglot.repository.source import ModelFiles, named_files

Sign = tuple[int, int]
"""A file's size and time."""
Contents = Mapping[str, Sign]
"""The sign of each file and folder, by its path."""

END_BYTES = 4096


def contents_of(files: ModelFiles) -> dict[str, Sign]:
    """All of a version: what is in its folder, and what its configuration names. The configuration is not."""
    if files.alone:
        return {str(files.file): sign_of(files.file)}
    found = folder_contents(files.folder or files.file.parent)
    found.pop(str((files.folder or files.file.parent) / CONFIG_FILE), None)
    return found | {str(file): sign_of(file) for file in named_files(files.config)}


def folder_contents(folder: Path) -> dict[str, Sign]:
    """All that is `below` a folder."""
    return {entry.path: sign_of(entry.path) for entry in below(folder)}


def stamp_of(contents: Contents) -> int:
    """A number that changes with the contents."""
    return hash(frozenset(contents.items()))


def sign_of(path: str | Path) -> Sign:
    """The sign of what is, or is not, at a path."""
    try:
        status = os.stat(path)
    except OSError:
        return -1, -1  # It went away just now, or is a link to nowhere.
    # A folder's own time changes with anything in it, __pycache__ too.
    return (0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)


def end_of(path: str, size: int) -> bytes | None:
    """The last bytes of a file's first `size` bytes; None for what cannot be read."""
    try:
        if not os.path.isfile(path):  # To open a pipe may take for ever.
            return None
        with open(path, "rb") as file:
            file.seek(max(0, size - END_BYTES))
            return file.read(min(size, END_BYTES))
    except OSError:
        return None
