"""Completes the configuration of a serving model with what the model itself declares (spec 1.4).

Values that the user configured are kept, as in Triton; only missing ones are filled in. Scheduling is included
only if requests really are scheduled so: clients decide by it how they send. The completed configuration, sent
back for the same model, loads unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from google.protobuf import json_format

from triglot.core.types import TensorSpec
from triglot.model.config import VersionPolicy
from triglot.model.configure import ANY_RANK
from triglot.model.ensemble import Ensemble
from triglot.model.scheduling import DynamicBatching, QueuePolicy, SequenceBatching
from triglot.pb.kserve import model_config_pb2 as pb
from triglot.repository.config.ensembles import ENSEMBLE
from triglot.repository.config.model_config import BACKEND_OF_NAME
from triglot.repository.config.scheduling import DEFAULT_IDLE
from triglot.repository.config.scheduling_messages import (
    dynamic_batching_message,
    ensemble_message,
    sequence_batching_message,
)
from triglot.repository.config.values import data_type_of
from triglot.repository.scan.layout import FILE_IN_FOLDER
from triglot.repository.scan.source import ModelFiles
from triglot.scheduling.servable import Servable

BACKEND_NAMES = {"onnx": "onnxruntime", "torch": "pytorch"}
"""Triton's names for our backends, where they differ."""
TRITON_PLATFORMS = (ENSEMBLE, "onnxruntime_onnx", "pytorch_libtorch", "tensorflow_savedmodel", "torch_aoti")


@dataclass(frozen=True, slots=True)
class Loaded:
    """A serving version and the files that it was loaded from.

    `policy` is the version policy of the model if its configuration has none.
    """

    servable: Servable
    files: ModelFiles
    policy: VersionPolicy


def completed(loaded: Loaded) -> pb.ModelConfig:
    """Return the complete configuration."""
    servable, files = loaded.servable, loaded.files
    message = pb.ModelConfig()
    if files.config.text:
        json_format.Parse(files.config.text, message)
    message.name = servable.name
    _complete_kind(message, servable, files)
    _complete_policy(message, loaded.policy)
    batched = message.max_batch_size = _max_batch_size(servable)
    signature = servable.signature
    _complete_tensors(message.input, signature.inputs, pb.ModelInput, batch=bool(batched))
    for tensor in message.input:
        tensor.optional |= tensor.name in signature.may_lack
    _complete_tensors(message.output, signature.outputs, pb.ModelOutput, batch=bool(batched))
    _complete_scheduling(message, servable)
    _complete_instances(message, servable)
    message.model_transaction_policy.decoupled = servable.decoupled
    message.response_cache.enable = servable.model.response_cache
    return message


def differs_only_in_instances(files: ModelFiles, loaded: Loaded) -> bool:
    """Whether a configuration is the complete one of a serving version, except for its instances.

    This is what clients send that read the configuration and change the instance count.
    """
    if not files.config.text or replace(files, config=loaded.files.config) != loaded.files:
        return False
    configured = json_format.Parse(files.config.text, pb.ModelConfig())
    complete = completed(loaded)
    for message in (configured, complete):
        for name in ("name", "version_policy", "instance_group"):
            message.ClearField(name)
    return configured == complete


def _complete_kind(message: pb.ModelConfig, servable: Servable, files: ModelFiles) -> None:
    """Completes the backend, the platform, and the model file's name."""
    ensemble = servable.platform == ENSEMBLE
    if ensemble and BACKEND_OF_NAME.get(message.backend) != ENSEMBLE:
        message.backend = ""  # An ensemble that is written in Python.
    if not message.platform and servable.platform in TRITON_PLATFORMS:
        message.platform = servable.platform
    if not message.backend and not ensemble:
        message.backend = BACKEND_NAMES.get(files.backend, files.backend)
    if not message.default_model_filename and not ensemble and files.make is None:
        file = files.file
        if files.folder not in (None, file.parent) and file.name in FILE_IN_FOLDER:
            file = file.parent
        message.default_model_filename = file.name


def _complete_policy(message: pb.ModelConfig, policy: VersionPolicy) -> None:
    configured = message.version_policy
    if configured.WhichOneof("policy_choice") is None:
        if policy.specific is not None:
            configured.specific.versions.extend(sorted(policy.specific))
        elif policy.latest is not None:
            configured.latest.num_versions = policy.latest
        else:
            configured.all.SetInParent()
    elif configured.HasField("latest"):
        configured.latest.num_versions = configured.latest.num_versions or 1


def _max_batch_size(servable: Servable) -> int:
    """Return the model's own limit, or its batcher's if all tensors of the model have a batch dim."""
    model, signature = servable.model, servable.signature
    if model.max_batch_size or not isinstance(model.dynamic_batching, DynamicBatching):
        return model.max_batch_size
    shapes = [spec.shape for spec in (*signature.inputs, *signature.outputs)]
    return model.dynamic_batching.max_batch_size if all(shape and shape[0] == -1 for shape in shapes) else 0


def _complete_tensors(
    messages: Any, specs: Sequence[TensorSpec], kind: Callable[..., Any], *, batch: bool
) -> None:
    """Completes the model's tensors, in its order, followed by other configured ones."""
    configured = {tensor.name: tensor for tensor in messages}
    tensors = []
    for spec in specs:
        tensor = configured.pop(spec.name, None) or kind(name=spec.name)
        tensor.data_type = data_type_of(spec.datatype)
        if not tensor.dims:
            # As in the metadata: empty dims would be a scalar's, and pytriton 0.7 refuses them.
            shape = ANY_RANK if spec.shape is None else spec.shape[1:] if batch else spec.shape
            tensor.dims.extend(shape)
        tensors.append(tensor)
    tensors += configured.values()
    del messages[:]
    messages.extend(tensors)


def _complete_scheduling(message: pb.ModelConfig, servable: Servable) -> None:
    model = servable.model
    dynamic, sequences = model.dynamic_batching, model.sequence_batching
    if isinstance(dynamic, DynamicBatching) and not servable.decoupled and _is_active(dynamic, message):
        if not message.HasField("dynamic_batching"):
            message.dynamic_batching.CopyFrom(dynamic_batching_message(dynamic))
        _prefer_largest(message.dynamic_batching.preferred_batch_size, message)
    else:
        message.ClearField("dynamic_batching")
    if isinstance(sequences, SequenceBatching):
        if not message.HasField("sequence_batching"):
            message.sequence_batching.CopyFrom(sequence_batching_message(sequences))
        _complete_sequences(message.sequence_batching, message)
    else:
        message.ClearField("sequence_batching")
    if isinstance(model, Ensemble) and not message.HasField("ensemble_scheduling"):
        message.ensemble_scheduling.CopyFrom(ensemble_message(model.steps, model.max_inflight_requests))


def _is_active(dynamic: DynamicBatching, message: pb.ModelConfig) -> bool:
    """Whether dynamic batching has an effect: without a batch limit it may still order requests."""
    orders = dynamic.preserve_ordering or dynamic.priority_levels or dynamic.policy != QueuePolicy()
    return bool(message.max_batch_size or orders)


def _complete_sequences(configured: pb.ModelSequenceBatching, message: pb.ModelConfig) -> None:
    if not configured.max_sequence_idle_microseconds:
        configured.max_sequence_idle_microseconds = DEFAULT_IDLE
    if configured.HasField("oldest"):
        _prefer_largest(configured.oldest.preferred_batch_size, message)
    elif not configured.HasField("direct"):
        configured.direct.SetInParent()


def _prefer_largest(sizes: Any, message: pb.ModelConfig) -> None:
    if not sizes and message.max_batch_size:
        sizes.append(message.max_batch_size)


def _complete_instances(message: pb.ModelConfig, servable: Servable) -> None:
    """Completes the instance groups; an ensemble has none, as its steps' models run it."""
    groups, model = message.instance_group, servable.model
    if servable.platform == ENSEMBLE:
        del groups[:]
        return
    if not groups:
        groups.add(name=servable.name, count=model.instances, kind=pb.ModelInstanceGroup.KIND_CPU)
    for at, group in enumerate(groups):
        group.name = group.name or f"{servable.name}_{at}"
        group.count = group.count or 1
        if group.kind == pb.ModelInstanceGroup.KIND_AUTO and not model.places_instances:
            group.kind = pb.ModelInstanceGroup.KIND_GPU if group.gpus else pb.ModelInstanceGroup.KIND_CPU
