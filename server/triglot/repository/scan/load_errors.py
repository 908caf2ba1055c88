"""What a look found wrong: with the roots themselves, or with models at them. Pure functions."""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping
from pathlib import Path

from triglot.core.errors import ModelLoadError
from triglot.repository.config.settings import NAME
from triglot.repository.scan.scanner import Scan, Wanted
from triglot.repository.scan.source import ModelFiles, NamedPath, NothingFound, NotYet, Root

LoadErrors = Mapping[str, ModelLoadError]
"""What is wrong, by the model's name or the path."""


def places_of(roots: Iterable[Root]) -> set[str]:
    """What problems call the roots that are paths."""
    paths = (root.path if isinstance(root, NamedPath) else root for root in roots)
    return {os.path.normpath(path.absolute()) for path in paths if isinstance(path, Path)}


def wrong_roots(look: Scan, roots: Iterable[Root], *, may_be_empty: bool) -> list[ModelLoadError]:
    """What is wrong with roots that are paths; `may_be_empty`: a folder that holds no model is fine."""
    places = places_of(roots)
    return [look.problems[key] for key in _keys(look.problems, may_be_empty=may_be_empty) if key in places]


def wrong_models(look: Scan, roots: Iterable[Root], *, may_be_empty: bool) -> list[ModelLoadError]:
    """What is wrong with models; see `wrong_roots`."""
    places = places_of(roots)
    return [look.problems[key] for key in _keys(look.problems, may_be_empty=may_be_empty) if key not in places]


def broken_names(problems: LoadErrors, known: Container[str], roots: Iterable[Root]) -> list[str]:
    """The models that are there and cannot be understood; not those that are `known`."""
    places = places_of(roots)
    names = [Path(key).name for key in _keys(problems, may_be_empty=True) if key not in places]
    return [name for name in names if name not in known and NAME.fullmatch(name)]


def not_yet(look: Scan) -> list[str]:
    """What is said of paths where there is no model yet."""
    return [str(problem) for problem in look.problems.values() if isinstance(problem, NotYet)]


def _keys(problems: LoadErrors, *, may_be_empty: bool) -> list[str]:
    """What problems are called; that of a model in a list of models is called as the model."""
    return [
        key
        for key, problem in problems.items()
        if not (may_be_empty and isinstance(problem, NothingFound) and Path(key).is_absolute())
    ]


def by_name(problems: LoadErrors, wanted: Wanted, roots: Iterable[Root]) -> dict[str, ModelLoadError]:
    """What is wrong with each model; not what is wrong with a repository that it lies in."""
    roots = list(roots)
    places = places_of(roots)
    given = {place: root.name for root in roots if isinstance(root, NamedPath) for place in places_of([root])}
    named: dict[str, ModelLoadError] = {}
    for key, problem in problems.items():
        path = Path(key)
        names = [given.get(key, path.name)]
        if key in places and names[0] not in wanted:
            names = [
                name for name, versions in wanted.items() if any(_is_at(path, one) for one in versions.values())
            ]
        for name in names:
            named.setdefault(name, problem)
    return named


def _is_at(path: Path, files: ModelFiles) -> bool:
    """Whether a version was found at a path that is its model's, or its own."""
    return path in (files.file, files.folder) or (path.name == files.name and files.file.is_relative_to(path))


def why_not(name: str, look: Scan, roots: Iterable[Root]) -> str:
    """Why the model of this name cannot be loaded; "" when it can be (spec 3.9)."""
    places = sorted(places_of(roots))
    why = [str(problem) for key, problem in look.problems.items() if key not in places and Path(key).name == name]
    if not why and look.wanted.get(name):
        return ""
    nowhere = [str(look.problems.get(place, f"no model of this name in {place}")) for place in places]
    reasons = "; ".join(why or nowhere)
    return not_polled(name) + (f": {reasons}" if reasons else "")


def not_polled(name: str) -> str:
    """Triton's words for a model that cannot be loaded."""
    return f"failed to load '{name}', failed to poll from model repository"
