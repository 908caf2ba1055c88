"""Classifies the errors of a scan: errors of roots, and errors of models in them. Pure functions."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from triglot.core.errors import ModelLoadError
from triglot.repository.config.settings import NAME
from triglot.repository.scan.scanner import Scan, Wanted
from triglot.repository.scan.source import MLServerFolder, ModelFiles, NamedPath, NothingFound, NotYet, Root

LoadErrors = Mapping[str, ModelLoadError]
"""Errors by model name or path."""


def places_of(roots: Iterable[Root]) -> set[str]:
    """Return the keys that the problems of path roots have."""
    paths = (root.path if isinstance(root, NamedPath | MLServerFolder) else root for root in roots)
    return {os.path.normpath(path.absolute()) for path in paths if isinstance(path, Path)}


def wrong_roots(scan: Scan, roots: Iterable[Root], *, may_be_empty: bool) -> list[ModelLoadError]:
    """Return the errors of path roots; `may_be_empty`: a folder without models is no error."""
    places = places_of(roots)
    return [scan.problems[key] for key in _keys(scan.problems, may_be_empty=may_be_empty) if key in places]


def wrong_models(scan: Scan, roots: Iterable[Root], *, may_be_empty: bool) -> list[ModelLoadError]:
    """Return the errors of models; see `wrong_roots`."""
    places = places_of(roots)
    return [scan.problems[key] for key in _keys(scan.problems, may_be_empty=may_be_empty) if key not in places]


def broken_names(problems: LoadErrors, known: Container[str], roots: Iterable[Root]) -> list[str]:
    """Return the models that exist but are invalid, and are not `known`."""
    places = places_of(roots)
    names = [Path(key).name for key in _keys(problems, may_be_empty=True) if key not in places]
    return [name for name in names if name not in known and NAME.fullmatch(name)]


def not_yet(scan: Scan) -> list[str]:
    """Return the messages about paths where no model exists yet."""
    return [str(problem) for problem in scan.problems.values() if isinstance(problem, NotYet)]


def _keys(problems: LoadErrors, *, may_be_empty: bool) -> list[str]:
    """Return the keys of the problems; those of models in a list of models are names, others are paths."""
    return [
        key
        for key, problem in problems.items()
        if not (may_be_empty and isinstance(problem, NothingFound) and Path(key).is_absolute())
    ]


def by_name(problems: LoadErrors, wanted: Wanted, roots: Iterable[Root]) -> dict[str, ModelLoadError]:
    """Return the error of each model, without errors of the repositories that models are in."""
    roots = list(roots)
    places = places_of(roots)
    given = {place: root.name for root in roots if isinstance(root, NamedPath) for place in places_of([root])}
    named: dict[str, ModelLoadError] = {}
    for key, problem in problems.items():
        path = Path(key)
        names = [given.get(key, path.name)]
        if key in places and names[0] not in wanted:
            names = [
                name
                for name, versions in wanted.items()
                if any(_is_at(path, version) for version in versions.values())
            ]
        for name in names:
            named.setdefault(name, problem)
    return named


def _is_at(path: Path, files: ModelFiles) -> bool:
    """Whether `path` is that of a version or of its model."""
    return path in (files.file, files.folder) or (path.name == files.name and files.file.is_relative_to(path))


def why_not(name: str, scan: Scan, roots: Iterable[Root]) -> str:
    """Return the reason why the model of this name cannot be loaded; "" if it can (spec 3.9)."""
    places = sorted(places_of(roots))
    why = [str(problem) for key, problem in scan.problems.items() if key not in places and Path(key).name == name]
    if not why and scan.wanted.get(name):
        return ""
    not_found = [str(scan.problems.get(place, f"no model of this name in {place}")) for place in places]
    reasons = "; ".join(why or not_found)
    return not_polled(name) + (f": {reasons}" if reasons else "")


def not_polled(name: str) -> str:
    """Return Triton's error text for a model that cannot be loaded."""
    return f"failed to load '{name}', failed to poll from model repository"
