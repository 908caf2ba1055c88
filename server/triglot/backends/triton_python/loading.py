"""Makes a model that the server can run from a module with a `TritonPythonModel`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from triglot.backends.model_modules import spec_of_own
from triglot.backends.triton_python.config import ModelConfig, complete, using_decoupled_model_transaction_policy
from triglot.backends.triton_python.context import ModelContext, working_for
from triglot.backends.triton_python.datatypes import datatype_of_config
from triglot.backends.triton_python.decoupled import DecoupledModel
from triglot.backends.triton_python.decoupled_sequences import DecoupledSequencesModel
from triglot.backends.triton_python.instance import Instance
from triglot.backends.triton_python.model import TritonModel
from triglot.backends.triton_python.names import TritonModules
from triglot.backends.triton_python.single import SingleResponseModel
from triglot.core.errors import ModelLoadError
from triglot.core.types import TensorSpec
from triglot.model.config import Device
from triglot.model.config import ModelConfig as Configured
from triglot.model.model import is_async
from triglot.model.reshaping import reshaped
from triglot.model.scheduling import DynamicBatching

log = logging.getLogger(__name__)

MODEL_CLASS = "TritonPythonModel"
NO_EFFECT = ("FORCE_CPU_ONLY_INPUT_TENSORS",)
"""Parameters of Triton without effect here: all tensors are in CPU memory."""


def modules_of(file: Path, config: Configured) -> TritonModules:
    """Return the modules next to `file`, and in the folder above a version's folder."""
    folder = file.parent
    folders = [folder, folder.parent] if folder.name.isdecimal() else [folder]
    return TritonModules(folders, _context(config.name_for(file), folder))


def _context(name: str, folder: Path) -> ModelContext:
    return ModelContext(name, int(folder.name) if folder.name.isdecimal() else 1, folder)


def spec_in_child(name: str, folders: Sequence[Path]) -> ModuleSpec:
    """See `child_modules.KINDS`."""
    return spec_of_own(TritonModules(folders, _context(folders[-1].name, folders[0]), name))


def model_of(file: Path, config: Configured, model_class: type[Any], modules: TritonModules) -> TritonModel:
    """Return the model with its configuration completed, before `initialize`.

    Raise `ModelLoadError` for a configuration without inputs and outputs, `ValueError` for invalid values from
    `auto_complete_config`, and the exceptions of that function.
    """
    context = modules.context
    if not callable(getattr(model_class, "execute", None)):
        raise ModelLoadError(f"{file}: {MODEL_CLASS} has no execute(self, requests)")
    for key in NO_EFFECT:
        if key in config.parameters:
            log.warning("%s: parameters: %s: not supported, ignored", config.source or file, key)
    with working_for(context, context.calls), modules.by_plain_names():
        completed = _completed(file, config, model_class, context)

    def instances_for(config: Configured) -> list[Instance]:
        groups = complete(config, context.name, file.name)["instance_group"]
        with_groups = {**completed, "instance_group": groups}
        return [
            Instance(model_class, file, argument, context)
            for argument in _arguments(file, config, with_groups, context)
        ]

    instances = instances_for(config)
    batching = completed.get("dynamic_batching")
    largest = completed["max_batch_size"]
    if using_decoupled_model_transaction_policy(completed):
        if "sequence_batching" in completed:
            model: TritonModel = DecoupledSequencesModel(instances, modules, context)
        else:
            rows = 0 if batching is None else largest
            model = DecoupledModel(instances, modules, context, rows, config.max_unread_bytes)
            # A waiting coroutine does not occupy its instance.
            model.holds_instances = not is_async(model_class.execute)
    else:
        model = SingleResponseModel(instances, modules, context)
        if batching is not None and config.dynamic_batching is None:
            model.dynamic_batching = DynamicBatching()
    model.instances_for = instances_for
    model.max_batch_size = largest
    model.equal_shapes = [
        tensor["name"]
        for tensor in completed["input"]
        if -1 in tensor["dims"] and not tensor.get("allow_ragged_batch")
    ]
    specs = [_specs(file, kind, completed) for kind in ("input", "output")]
    model.inputs, model.outputs, model.reshaping = reshaped(file, replace(config, max_batch_size=largest), *specs)
    model.model_config = config
    if config.sequence_batching is not None and config.sequence_batching.iterative:
        model.iterative = config.sequence_batching
    return model


def _completed(file: Path, config: Configured, model_class: type[Any], context: ModelContext) -> dict[str, Any]:
    completed = complete(config, context.name, file.name)
    auto_complete = getattr(model_class, "auto_complete_config", None)
    if auto_complete is not None:
        result = auto_complete(ModelConfig(completed))
        if not isinstance(result, ModelConfig):
            raise ModelLoadError(
                f"{file}: auto_complete_config: expected it to return the ModelConfig it received, "
                f"got {type(result).__name__}"
            )
        completed = result.as_dict()
    if not completed["input"] and not completed["output"]:
        raise ModelLoadError(
            f"{file}: expected inputs and outputs in {config.source or 'a config.pbtxt'}, or from "
            f"{MODEL_CLASS}.auto_complete_config, got none"
        )
    return completed


def _specs(file: Path, kind: str, config: Mapping[str, Any]) -> list[TensorSpec]:
    """Return the specs as the model's code sees them, after `reshape`."""
    specs = []
    for tensor in config[kind]:
        datatype = datatype_of_config(tensor["data_type"])
        if datatype is None:
            raise ModelLoadError(
                f"{file}: {kind} {tensor['name']!r}: data_type: expected one like TYPE_FP32, "
                f"got {tensor['data_type']!r}"
            )
        dims = tensor["reshape"].get("shape", ()) if "reshape" in tensor else tensor["dims"]
        shape = [-1, *dims] if config["max_batch_size"] else dims
        specs.append(TensorSpec(tensor["name"], datatype, shape, optional=bool(tensor.get("optional"))))
    return specs


# --- instances ---


def _arguments(
    file: Path, config: Configured, completed: Mapping[str, Any], context: ModelContext
) -> Sequence[Mapping[str, str]]:
    """Return the arguments of each instance's `initialize`; all values are texts."""
    repository = file.parent.parent if file.parent.name.isdecimal() else file.parent
    devices = _devices(config)
    # A process runs a single one of the instances.
    first = getattr(config, "instance", 0) if len(devices) == 1 else 0
    return [
        {
            "model_config": json.dumps(completed),
            "model_instance_kind": device.kind,
            "model_instance_name": f"{context.name}_0_{first + at}",
            "model_instance_device_id": str(device.id),
            "model_repository": str(repository.absolute()),
            "model_version": str(context.version),
            "model_name": context.name,
        }
        for at, device in enumerate(devices)
    ]


def _devices(config: Configured) -> list[Device]:
    """Return the device of each instance: the CPU, as for Triton's Python models, unless a group says GPU."""
    groups = [replace(group, kind="CPU") if group.kind == "AUTO" else group for group in config.instance_groups]
    gpus = [gpu for group in groups for gpu in group.gpus]
    # The model's own code finds out whether the GPUs exist.
    return replace(config, instance_groups=groups).devices(lambda: max(gpus, default=0) + 1) or [Device("CPU")]
