"""From grps' id of a model, `name-version`, to the version that answers (grps 5.2, 11.10)."""

from __future__ import annotations

from collections.abc import Iterator

from triglot.core.errors import InvalidArgument, ModelNotFound, PermissionDenied
from triglot.core.permission import Permission
from triglot.dataplane.dataplane import DataPlane
from triglot.scheduling.servable import Servable


def find_servable(dataplane: DataPlane, permission: Permission, model_id: str, default_model: str) -> Servable:
    """The version that a request goes to, to be leased by `with`.

    Without an id it is the default model, or the only one. A model that is no grps project's answers to its bare
    name, too. What the permission does not cover is as if unknown; an id that can mean nothing else raises
    `PermissionDenied`. Raises `ModelNotFound`, and `Unavailable` for one that is not ready.
    """
    if model_id:
        # Most ids are these, and mean no other model.
        model, _, version = model_id.rpartition("-")
        if model and version.isdecimal():
            try:
                return dataplane.servable(permission, model, version)
            except (ModelNotFound, InvalidArgument, PermissionDenied):
                pass
    name = model_id or default_model or _only_model(dataplane, permission)
    if not model_id and dataplane.knows(permission, name):
        return dataplane.servable(permission, name)
    for model, version in _readings(name):
        if not dataplane.knows(permission, model):
            continue
        try:
            return _version(dataplane, permission, model, version)
        except (ModelNotFound, InvalidArgument):
            continue
    if not dataplane.knows(permission, name):
        if not any(map(permission.covers, (name, *[model for model, _ in _readings(name)]))):
            which = f"model '{model_id}'" if model_id else "the default model"
            raise PermissionDenied(f"{permission.who} may not use {which}")
        raise ModelNotFound(f"Model {name} not found.")
    servable = dataplane.servable(permission, name)
    if servable.model.takes_messages:
        raise ModelNotFound(f"Model {name} not found. Models of a project are named NAME-VERSION.")
    return servable


def _only_model(dataplane: DataPlane, permission: Permission) -> str:
    names = dataplane.model_names(permission)
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


def _version(dataplane: DataPlane, permission: Permission, model: str, version: str) -> Servable:
    """By its number, or by its label, which is what a project calls it."""
    if version.isdecimal():
        return dataplane.servable(permission, model, version)
    return dataplane.servable(permission, model, label=version)
