"""From grps' id of a model, `name-version`, to the version that answers (grps 5.2, 11.10)."""

from __future__ import annotations

from collections.abc import Iterator

from triglot.core.errors import InvalidArgument, ModelNotFound
from triglot.dataplane.dataplane import DataPlane
from triglot.scheduling.servable import Servable


def find_servable(dataplane: DataPlane, model_id: str, default_model: str) -> Servable:
    """The version that a request goes to, to be leased by `with`.

    Without an id it is the default model, or the only one. A model that is no grps project's answers to its bare
    name, too. Raises `ModelNotFound`, and `Unavailable` for one that is not ready.
    """
    if model_id:
        # Most ids are these, and mean no other model.
        model, _, version = model_id.rpartition("-")
        if model and version.isdecimal():
            try:
                return dataplane.servable(model, version)
            except (ModelNotFound, InvalidArgument):
                pass
    name = model_id or default_model or _only_model(dataplane)
    if not model_id and dataplane.knows(name):
        return dataplane.servable(name)
    for model, version in _readings(name):
        if not dataplane.knows(model):
            continue
        try:
            return _version(dataplane, model, version)
        except (ModelNotFound, InvalidArgument):
            continue
    if not dataplane.knows(name):
        raise ModelNotFound(f"Model {name} not found.")
    servable = dataplane.servable(name)
    if servable.model.takes_messages:
        raise ModelNotFound(f"Model {name} not found. Models of a project are named NAME-VERSION.")
    return servable


def _only_model(dataplane: DataPlane) -> str:
    names = dataplane.model_names()
    if len(names) != 1:
        raise ModelNotFound(
            f"Model not found. Name one in the request or set default_model: this server has {len(names)} models."
        )
    return names[0]


def _readings(model_id: str) -> Iterator[tuple[str, str]]:
    """Every (name, version) that an id may mean: names and versions may have dashes themselves."""
    name, dash, version = model_id.rpartition("-")
    while dash:
        if version:
            yield name, version
        name, dash, rest = name.rpartition("-")
        version = f"{rest}-{version}"


def _version(dataplane: DataPlane, model: str, version: str) -> Servable:
    """By its number, or by its label, which is what a project calls it."""
    if version.isdecimal():
        return dataplane.servable(model, version)
    return dataplane.servable(model, label=version)
