"""Path checks: whether a path stays in its repository, and what is below a folder.

A name never leads out of a repository; a symbolic link only if that is allowed. Links are resolved when they are
checked and again when the model is loaded: an attacker who can change them in between can change the model itself.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path, PurePosixPath

from triglot.core.errors import ModelLoadError

VIRTUAL_ENVIRONMENT = "pyvenv.cfg"
"""File that marks a folder as a virtual environment."""


def inside(folder: Path, name: str, key: str) -> Path:
    """Return `folder / name`. Raise `ModelLoadError` with the `key` for a name that leads out of the folder."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise ModelLoadError(f"{key}: expected a path inside {folder}, got {name!r}")
    return folder / relative


def is_below(path: Path, folders: Iterable[Path]) -> bool:
    """Whether a path is one of the folders or below one, after resolving symbolic links."""
    try:
        resolved = Path(os.path.realpath(path))
        return any(resolved.is_relative_to(os.path.realpath(folder)) for folder in folders)
    except ValueError:  # The path contains a null byte.
        return False


def check_links(path: Path, root: Path) -> None:
    """Raise `ModelLoadError` when a symbolic link in `path` leads out of `root`.

    `root` itself may be a link.
    """
    resolved = os.path.realpath(path)  # Unlike Path.resolve, it accepts links that lead to themselves.
    if not Path(resolved).is_relative_to(os.path.realpath(root)):
        raise ModelLoadError(
            f"{path}: a symbolic link leads out of {root}, to {resolved}; --allow-symlinks, or "
            "TRIGLOT_ALLOW_SYMLINKS=true, allows that"
        )


def check_links_below(folder: Path, root: Path) -> None:
    """Apply `check_links` to everything below a folder."""
    for entry in below(folder, hidden=True):
        if entry.is_symlink():
            check_links(Path(entry.path), root)


def below(folder: Path, levels: float = math.inf, *, hidden: bool = False) -> Iterator[os.DirEntry[str]]:
    """Yield the files and folders below a folder, `levels` deep.

    Linked folders are listed, but not their subfolders. Virtual environments and unreadable folders are skipped;
    unless `hidden`, so are the contents of hidden folders, and the caches and temporary files of Python and
    editors.
    """
    pending = [(os.fspath(folder), levels)]
    while pending:
        path, left = pending.pop()
        try:
            with os.scandir(path) as found:
                entries = [entry for entry in found if hidden or not _is_ignored(entry.name)]
        except OSError:
            continue
        if path != os.fspath(folder) and any(entry.name == VIRTUAL_ENVIRONMENT for entry in entries):
            continue
        for entry in entries:
            yield entry
            if left > 1 and (hidden or not entry.name.startswith(".")) and _is_folder(entry):
                pending.append((entry.path, 1 if entry.is_symlink() else left - 1))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        return False  # For example a link to itself.


def _is_ignored(name: str) -> bool:
    return name == "__pycache__" or name.endswith((".swp", ".swx", "~"))
