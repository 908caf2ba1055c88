"""Reads and validates a grps project's conf/server.yml and conf/inference.yml (grps 5)."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from triglot.backends.grps.server_settings import ServerSettings, read_server
from triglot.backends.grps.yaml_map import YamlMap, read_yaml
from triglot.core.errors import ModelLoadError

SERVER_FILE = Path("conf", "server.yml")
INFERENCE_FILE = Path("conf", "inference.yml")

DEVICE = re.compile(r"(cuda|gpu)(:[0-9]+)?|cpu")
BUILT_IN = ("torch", "tensorflow")

INFERENCE_KEYS = ("models", "dag")
MODEL_TEXTS = (
    "name",
    "version",
    "device",
    "inp_device",
    "inferer_type",
    "inferer_name",
    "inferer_path",
    "converter_type",
    "converter_name",
    "converter_path",
)
MODEL_KEYS = (*MODEL_TEXTS, "inferer_args", "converter_args", "batching")
BATCHING_KEYS = ("type", "max_batch_size", "batch_timeout_us")
DAG_KEYS = ("type", "name", "nodes")
NODE_KEYS = ("name", "type", "model")

INFERENCE_TEXTS = frozenset(
    [f"models.*.{key}" for key in MODEL_TEXTS]
    + ["models.*.batching.type", "dag.type", "dag.name"]
    + [f"dag.nodes.*.{key}" for key in NODE_KEYS]
)


@dataclass(frozen=True, slots=True)
class Batching:
    """Dynamic batching: a batch waits at most `timeout_us` microseconds for more requests."""

    max_batch_size: int
    timeout_us: int


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model in inference.yml; `device` is passed to its inferer, `entry` is the whole map.

    `inferer_args` and `converter_args` are {} if the key is absent, and None if it is empty.
    """

    name: str
    version: str
    device: str
    inferer_type: str
    inferer_name: str | None
    inferer_path: str | None
    inferer_args: dict[str, Any] | None
    converter_type: str
    converter_name: str | None
    converter_path: str | None
    converter_args: dict[str, Any] | None
    batching: Batching | None
    entry: dict[str, Any]

    @property
    def id(self) -> str:
        """Its id in requests and nodes: name-version."""
        return f"{self.name}-{self.version}"


@dataclass(frozen=True, slots=True)
class DagEntry:
    """The DAG for requests that name no model: (node's name, model's id), in order."""

    name: str
    nodes: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class ProjectSettings:
    """A project: its two files as settings, as texts, and as the plain values for its own code.

    `warnings` are about keys that are probably misspelt.
    """

    folder: Path
    server: ServerSettings
    models: tuple[ModelEntry, ...]
    dag: DagEntry
    server_text: str
    inference_text: str
    server_conf: dict[str, Any]
    inference_conf: dict[str, Any]
    warnings: tuple[str, ...] = ()

    def model(self, model_id: str) -> ModelEntry:
        """Return the model with this id. Raise `KeyError`."""
        for entry in self.models:
            if entry.id == model_id:
                return entry
        raise KeyError(model_id)


def read_project(
    folder: Path, *, server_conf: Path | None = None, inference_conf: Path | None = None
) -> ProjectSettings:
    """Read the settings in a project's folder, or in other files if given.

    Raise `ModelLoadError` with the file, the key, the expected and the actual value.
    """
    if not folder.is_dir():
        raise ModelLoadError(f"{folder}: expected the folder of a grps project, found none")
    server_file, inference_file = server_conf or folder / SERVER_FILE, inference_conf or folder / INFERENCE_FILE
    warnings: list[str] = []
    server_text, server_values, server = read_server(folder, server_file, warnings)
    inference_text, inference = read_yaml(inference_file, INFERENCE_TEXTS)
    values = YamlMap(inference_file, inference, INFERENCE_KEYS)
    warnings += values.misspelt_keys()
    models = _models(values, warnings)
    return ProjectSettings(
        folder=folder.absolute(),
        server=server,
        models=models,
        dag=_dag(values, [model.id for model in models], warnings),
        server_text=server_text,
        inference_text=inference_text,
        server_conf=server_values,
        inference_conf=inference,
        warnings=tuple(warnings),
    )


def _models(values: YamlMap, warnings: list[str]) -> tuple[ModelEntry, ...]:
    models: dict[str, ModelEntry] = {}
    for entry in values.maps("models", MODEL_KEYS):
        model = _model(entry, warnings)
        if model.id in models:
            entry.fail("version", "a unique name and version", reason=f"{model.id} twice")
        models[model.id] = model
    return tuple(models.values())


def _model(entry: YamlMap, warnings: list[str]) -> ModelEntry:
    warnings += entry.misspelt_keys()
    inferer_type = entry.choice("inferer_type", [*BUILT_IN, "customized"])
    converter_type = entry.choice("converter_type", [*BUILT_IN, "tensorrt", "customized", "none"])
    return ModelEntry(
        name=entry.text("name"),
        version=entry.text("version"),
        device=_device(entry, inferer_type),
        inferer_type=inferer_type,
        inferer_name=_part(entry, "inferer_name", inferer_type == "customized"),
        inferer_path=_path(entry, "inferer_path", inferer_type in BUILT_IN),
        inferer_args=_arguments(entry, "inferer_args"),
        converter_type=converter_type,
        converter_name=_part(entry, "converter_name", converter_type == "customized"),
        converter_path=_path(entry, "converter_path", False),
        converter_args=_arguments(entry, "converter_args"),
        batching=_batching(entry, warnings),
        entry=entry.values,
    )


def _device(entry: YamlMap, inferer_type: str) -> str:
    """Return the device's name; checked for built-in inferers, free for customized ones."""
    device = entry.text("device", "a device, such as cpu").lower()
    if inferer_type in BUILT_IN and device != "original" and not DEVICE.fullmatch(device):
        entry.fail("device", "cpu, cuda, gpu, cuda:N, gpu:N or original")
    if inferer_type != "torch" or device != "original":
        return device
    inp_device = entry.text("inp_device", "the inputs' device, which device 'original' requires").lower()
    if not DEVICE.fullmatch(inp_device):
        entry.fail("inp_device", "cpu, cuda, gpu, cuda:N or gpu:N")
    return f"original_{inp_device}"


def _part(entry: YamlMap, key: str, required: bool) -> str | None:
    return entry.text(key) if required or entry.has(key) else None


def _path(entry: YamlMap, key: str, required: bool) -> str | None:
    """Return "" without the key and None for an empty value, as grps does."""
    return _part(entry, key, required) if required or key in entry.values else ""


def _arguments(entry: YamlMap, key: str) -> dict[str, Any] | None:
    value = entry.values.get(key, {})
    if value is not None and not isinstance(value, dict):
        entry.fail(key, "a map")
    return value


def _batching(entry: YamlMap, warnings: list[str]) -> Batching | None:
    if not entry.has("batching"):
        return None
    batching = entry.map("batching", BATCHING_KEYS)
    warnings += batching.misspelt_keys()
    dynamic = batching.choice("type", ["none", "dynamic"]) == "dynamic"
    numbers = Batching(batching.integer("max_batch_size"), batching.integer("batch_timeout_us"))
    return numbers if dynamic else None


def _dag(values: YamlMap, ids: Sequence[str], warnings: list[str]) -> DagEntry:
    dag = values.map("dag", DAG_KEYS)
    dag.choice("type", ["sequential"])
    nodes = dag.maps("nodes", NODE_KEYS)
    for node in nodes:
        node.choice("type", ["model"])
        node.choice("model", ids)
        warnings += node.misspelt_keys()
    warnings += dag.misspelt_keys()
    return DagEntry(dag.text("name"), tuple((node.text("name"), node.text("model")) for node in nodes))
