"""Whether a path stays in its repository."""

from __future__ import annotations

from pathlib import Path, PurePosixPath

from triglot.core.errors import ModelLoadError


def inside(folder: Path, name: str, key: str) -> Path:
    """`folder / name`. Raises `ModelLoadError`, which names the `key`, for a name that leads out of the folder."""
    relative = PurePosixPath(name)
    if relative.is_absolute() or ".." in relative.parts or "\0" in name:
        raise ModelLoadError(f"{key}: expected a path inside {folder}, got {name!r}")
    return folder / relative


def check_links(path: Path, root: Path) -> None:
    """Raises `ModelLoadError` when a symbolic link on the way to `path` leads out of `root`."""
    resolved = path.resolve()
    if not resolved.is_relative_to(root.resolve()):
        raise ModelLoadError(
            f"{path}: a symbolic link leads out of {root}, to {resolved}; --allow-symlinks allows that"
        )
