"""The two files of a grps project, as tests write them."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import yaml

from triglot.backends.grps.settings import ProjectSettings, read_project

SERVER = """
interface:
  framework: http+grpc
  host: 0.0.0.0
  port: 7080,7081
max_connections: 1000
max_concurrency: 32
log:
  log_dir: ./logs
  log_backup_count: 7
"""
INFERENCE = """
models:
  - name: your_model
    version: 1.0.0
    device: CPU
    inferer_type: customized
    inferer_name: your_inferer
    inferer_path:
    inferer_args:
    converter_type: customized
    converter_name: your_converter
    converter_path:
    converter_args:
dag:
  type: sequential
  name: your_dag
  nodes:
    - name: node-1
      type: model
      model: your_model-1.0.0
"""
MODEL = {
    "name": "m",
    "version": "1",
    "device": "cpu",
    "inferer_type": "customized",
    "inferer_name": "i",
    "converter_type": "none",
}
DAG = {"type": "sequential", "name": "d", "nodes": [{"name": "n", "type": "model", "model": "m-1"}]}
GPU = {
    "devices": [0],
    "mem_manager_type": "torch",
    "mem_limit_mib": 1024,
    "mem_gc_enable": True,
    "mem_gc_interval": 60,
}
ABSENT = object()


def project(folder: Path, server: str = SERVER, inference: str = INFERENCE) -> ProjectSettings:
    """The settings of a project with these files."""
    (folder / "conf").mkdir(exist_ok=True)
    (folder / "conf" / "server.yml").write_text(server)
    (folder / "conf" / "inference.yml").write_text(inference)
    return read_project(folder)


def changed(values: dict[str, Any], way: str, value: object) -> dict[str, Any]:
    """The values with another one at `way`, which is like "log.log_dir"."""
    values = copy.deepcopy(values)
    *folders, key = way.split(".")
    inner: Any = values
    for name in folders:
        inner = inner[int(name)] if isinstance(inner, list) else inner.setdefault(name, {})
    if value is ABSENT:
        del inner[key]
    else:
        inner[key] = value
    return values


def with_server(folder: Path, way: str, value: object) -> ProjectSettings:
    """The settings with another value in server.yml."""
    return project(folder, server=yaml.safe_dump(changed(yaml.safe_load(SERVER), way, value)))


def with_model(folder: Path, **values: object) -> ProjectSettings:
    """The settings with one model of these values; `ABSENT`: without the key."""
    model = {key: value for key, value in (MODEL | values).items() if value is not ABSENT}
    return project(folder, inference=yaml.safe_dump({"models": [model], "dag": DAG}, sort_keys=False))


def with_dag(folder: Path, way: str, value: object) -> ProjectSettings:
    """The settings with another value in the DAG."""
    return project(folder, inference=yaml.safe_dump(changed({"models": [MODEL], "dag": DAG}, f"dag.{way}", value)))
