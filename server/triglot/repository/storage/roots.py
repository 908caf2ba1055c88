"""The paths of roots, which may be those of URLs."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from triglot.repository.config.settings import ModelSettings
from triglot.repository.scan.source import ModelFiles, NamedPath, Root


def path_of(root: Root) -> Path | None:
    """Return the path of a root that may be a URL."""
    match root:
        case ModelSettings():
            return root.base_path
        case NamedPath():
            return root.path
        case ModelFiles():
            return None
    return root


def moved(root: Root, path: Path) -> Root:
    """Return the root with another path."""
    match root:
        case ModelSettings():
            return replace(root, base_path=path)
        case NamedPath():
            return replace(root, path=path)
    return path
