"""Finds the version for a ModelSpec, with TensorFlow Serving's errors (tfs 3.1)."""

from __future__ import annotations

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelNotFound, NotFound, Unavailable
from triglot.core.operation import Permission
from triglot.dataplane.dataplane import DataPlane
from triglot.pb.tfserving import signature_pb2
from triglot.protocols.tfserving.codec import ModelSpec
from triglot.protocols.tfserving.signature_def import signature_def
from triglot.repository.manager.registry import UnknownLabel
from triglot.scheduling.servable import Servable


def require_spec(spec: ModelSpec | None) -> ModelSpec:
    """Returns the ModelSpec. Raises `InvalidArgument` for a request without one."""
    if spec is None:
        raise InvalidArgument("Missing ModelSpec")
    return spec


def find_called(dataplane: DataPlane, spec: ModelSpec | None, call: Call) -> Servable:
    """Returns what `find_servable` does, and records model and version in the call."""
    call.model_name = require_spec(spec).name
    servable = find_servable(dataplane, call.permission, spec)
    call.model_version = servable.version
    return servable


def find_servable(dataplane: DataPlane, permission: Permission, spec: ModelSpec | None) -> Servable:
    """Returns the version for a call, to be leased by `with`.

    Raises `InvalidArgument` or `NotFound`, and `PermissionDenied` for a model that the client may not use.
    """
    spec = require_spec(spec)
    if not spec.name:
        raise InvalidArgument("ModelSpec has no name specified.")
    version = "" if spec.version is None else str(spec.version)
    try:
        if spec.label == "":
            permission.check_model(spec.name)
            raise UnknownLabel("an empty label")
        return dataplane.servable(permission, spec.name, version, spec.label or "")
    except UnknownLabel:
        raise InvalidArgument(f"Unrecognized servable version label: {spec.label}") from None
    except (ModelNotFound, Unavailable, InvalidArgument):
        # Clients get the same error for a version that is loading and one that never existed (tfs 0.7).
        number = dataplane.labelled(permission, spec.name, spec.label) if spec.label else spec.version
        which = f"Latest({spec.name})" if number is None else f"Specific({spec.name}, {number})"
        why = dataplane.load_error(permission, spec.name, "" if number is None else str(number))
        raise NotFound(f"Servable not found for request: {which}{why and f': {why}'}") from None


def define(servable: Servable, name: str) -> signature_pb2.SignatureDef:
    """Returns the SignatureDef of one of the version's signatures."""
    return signature_def(name, servable.signatures[name], servable.model.signature_defs)
