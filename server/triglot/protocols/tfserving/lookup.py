"""From a ModelSpec to the version that answers, in TensorFlow Serving's words (tfs 3.1)."""

from __future__ import annotations

from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelNotFound, NotFound, Unavailable
from triglot.core.permission import Permission
from triglot.dataplane.dataplane import DataPlane
from triglot.pb.tfserving import signature_pb2
from triglot.protocols.tfserving.codec import ModelSpec
from triglot.protocols.tfserving.signature_def import signature_def
from triglot.repository.manager.registry import UnknownLabel
from triglot.scheduling.servable import Servable


def require_spec(spec: ModelSpec | None) -> ModelSpec:
    """Raises `InvalidArgument` for a request without one."""
    if spec is None:
        raise InvalidArgument("Missing ModelSpec")
    return spec


def find_called(dataplane: DataPlane, spec: ModelSpec | None, call: Call) -> Servable:
    """As `find_servable`; the call learns which model and version it goes to."""
    call.model_name = require_spec(spec).name
    servable = find_servable(dataplane, call.permission, spec)
    call.model_version = servable.version
    return servable


def find_servable(dataplane: DataPlane, permission: Permission, spec: ModelSpec | None) -> Servable:
    """The version that a call goes to, to be leased by `with`.

    Raises `InvalidArgument` or `NotFound`, and `PermissionDenied` for others' models.
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
        # A version that is loading, or that never was, is the same to a client (tfs 0.7).
        number = dataplane.labelled(permission, spec.name, spec.label) if spec.label else spec.version
        which = f"Latest({spec.name})" if number is None else f"Specific({spec.name}, {number})"
        raise NotFound(f"Servable not found for request: {which}") from None


def define(servable: Servable, name: str) -> signature_pb2.SignatureDef:
    """The SignatureDef of one of the version's signatures."""
    return signature_def(name, servable.signatures[name], servable.model.signature_defs)
