"""What lies in a version's folder: whether it is as it was, without reading it."""

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
"""The size and the time of a file."""
Contents = Mapping[str, Sign]
"""The sign of each file and folder, by its path."""

ABSENT: Sign = (-1, -1)
END_BYTES = 4096
MAX_ENTRIES = 10_000
"""A model's file may lie in a folder that holds everything else, too."""


def contents_of(files: ModelFiles) -> dict[str, Sign]:
    """What belongs to a version: all in its folder but what is of the model, and what the configuration names."""
    folder = files.folder or files.file.parent
    if not files.alone:
        found = folder_contents(folder)
        for name in (CONFIG_FILE, NAMES_FILE):
            found.pop(str(folder / name), None)
    elif files.file.suffix == ".py":
        found = {str(file): sign_of(file) for file in folder.glob("*.py")}  # It may import them.
    else:
        found = {}
    named = [files.file, *named_files(files.config)]
    if files.config.environment is not None:
        named.append(files.config.environment)
    return found | {str(file): sign_of(file) for file in named}


def folder_contents(folder: Path) -> dict[str, Sign]:
    """All that is `below` a folder, `MAX_ENTRIES` at most."""
    return {entry.path: sign_of(entry) for entry in islice(below(folder), MAX_ENTRIES)}


def stamp_of(contents: Contents) -> int:
    """A number that changes with the contents."""
    return hash(frozenset(contents.items()))


def sign_of(path: os.DirEntry[str] | Path) -> Sign:
    """The sign of what is there, at the end of links."""
    try:
        status = path.stat()
    except OSError:
        return ABSENT  # It went away just now, or is a link to nowhere.
    # A folder's own time changes with anything in it, __pycache__ too.
    return (0, 0) if stat.S_ISDIR(status.st_mode) else (status.st_size, status.st_mtime_ns)


def end_of(path: str, size: int) -> bytes | None:
    """The last bytes of a file's first `size` bytes; None for what is no file."""
    try:
        if not Path(path).is_file():  # Opening a pipe may take for ever.
            return None
        with Path(path).open("rb") as file:
            file.seek(max(0, size - END_BYTES))
            return file.read(min(size, END_BYTES))
    except OSError:
        return None
