"""Descriptions of the server and its models in YAML (grps 3.7)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from triglot.core.operation import Permission
from triglot.core.types import TensorSpec
from triglot.dataplane.dataplane import DataPlane
from triglot.repository.manager.plan import State
from triglot.scheduling.servable import Servable


def model_text(servable: Servable) -> str:
    """Returns the description in the model's own configuration, or else what it declares."""
    description = servable.model.description
    if description is None:
        signature = servable.signature
        description = {
            "name": servable.name,
            "version": str(servable.version),
            "platform": servable.platform,
            "inputs": _tensors(signature.inputs),
            "outputs": _tensors(signature.outputs),
        }
    return _yaml(dict(description))


def _tensors(specs: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    return [
        {
            "name": spec.name,
            "datatype": spec.datatype,
            "shape": None if spec.shape is None else list(spec.shape),
        }
        for spec in specs
    ]


def server_text(server_name: str, dataplane: DataPlane, permission: Permission) -> str:
    """Returns the server's name, and the models that the client may use: loaded ones, and failed ones."""
    models = [
        {"name": version.files.name, "version": str(version.files.version), "state": version.state.value}
        for version in dataplane.versions(permission)
        if version.state is not State.UNAVAILABLE or version.error is not None
    ]
    return _yaml({"server": {"name": server_name}, "models": models})


def _yaml(values: dict[str, Any]) -> str:
    import yaml  # noqa: PLC0415 - only calls for metadata of grps need it.

    text: str = yaml.safe_dump(values, allow_unicode=True)
    return text
