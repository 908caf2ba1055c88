"""Finds the version for grps' model id, `name-version` (grps 5.2, 11.10)."""

from __future__ import annotations

from collections.abc import Iterator

from triglot.core.errors import InvalidArgument, ModelNotFound, PermissionDenied
from triglot.core.operation import Permission
from triglot.dataplane.dataplane import DataPlane
from triglot.scheduling.servable import Servable


def find_servable(dataplane: DataPlane, permission: Permission, model_id: str, default_model: str) -> Servable:
    """Returns the version for a request, to be leased by `with`.

    Without an id that is the default model, or the only one. A model that is not a grps project's is found by its
    bare name, too. Models that the permission does not cover count as unknown; an id that can mean no other model
    raises `PermissionDenied`. Raises `ModelNotFound`, and `Unavailable` for one that is not ready.
    """
    if model_id:
        # Most ids have this form, and are not ambiguous.
        model, _, version = model_id.rpartition("-")
        if model and version.isdecimal():
            try:
                return dataplane.servable(permission, model, version)
            except (ModelNotFound, InvalidArgument, PermissionDenied):
                pass
    name = model_id or default_model or _only_model(dataplane, permission)
    if not model_id and dataplane.knows(permission, name):
        return dataplane.servable(permission, name)
    for model, version in _candidates(name):
        if not dataplane.knows(permission, model):
            continue
        try:
            return _version(dataplane, permission, model, version)
        except (ModelNotFound, InvalidArgument):
            continue
    if not dataplane.knows(permission, name):
        if not any(map(permission.covers, (name, *[model for model, _ in _candidates(name)]))):
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


def _candidates(model_id: str) -> Iterator[tuple[str, str]]:
    """Yields each (name, version) that an id may mean: both may contain dashes."""
    name, dash, version = model_id.rpartition("-")
    while dash:
        if version:
            yield name, version
        name, dash, rest = name.rpartition("-")
        version = f"{rest}-{version}"


def _version(dataplane: DataPlane, permission: Permission, model: str, version: str) -> Servable:
    """Returns a version by its number, or by its label, which is the version's name in a project."""
    if version.isdecimal():
        return dataplane.servable(permission, model, version)
    return dataplane.servable(permission, model, label=version)
