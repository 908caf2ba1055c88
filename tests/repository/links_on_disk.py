"""Files and symbolic links for tests of paths."""

from __future__ import annotations

from pathlib import Path


def put(*files: Path, text: str = "") -> None:
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)


def link(path: Path, target: Path | str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)
