"""The grps project of toy models, its configurations, and the arguments to serve it with one of them.

The project is served from its own folder; settings that differ from run to run (address, ports and folder of the
logs) are written into copies of its configuration files.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from tests.process import unused_ports

PROJECTS = Path(__file__).parent / "grps_projects"
TOYS = PROJECTS / "toys"
DAGS: dict[str, Sequence[str]] = {"dag2": ("app_a", "app_b"), "custom": ("custmodes",)}
"""Configurations whose DAG differs from that of inference.yml: its models, in order."""
CONFIGS = ("default", "dag2", "custom", "header", "limits")


def grps_arguments(project: Path, folder: Path, config: str = "default") -> list[str]:
    """Write the project's configuration, with free ports, into `folder`; returns arguments for `triglot grps`."""
    folder.mkdir(parents=True, exist_ok=True)
    server, inference = folder / "server.yml", folder / "inference.yml"
    server.write_text(_server_text(project, folder, config))
    inference.write_text(_inference_text(project, config))
    return [str(project), "--server_conf", str(server), "--inference_conf", str(inference)]


def _server_text(project: Path, folder: Path, config: str) -> str:
    file = project / "conf" / f"server.{config}.yml"
    text = (file if file.exists() else project / "conf" / "server.yml").read_text()
    grpc_port, http_port = unused_ports()
    for key, value in (("host", "127.0.0.1"), ("port", f"{http_port},{grpc_port}"), ("log_dir", folder / "logs")):
        text, count = re.subn(rf"^(  {key}:) .*", rf"\1 {value}", text, flags=re.MULTILINE)
        assert count == 1, f"{file}: expected one {key}, got {count}"
    return text


def _inference_text(project: Path, config: str) -> str:
    text = (project / "conf" / "inference.yml").read_text()
    if config not in DAGS:
        return text
    models, _, _ = text.partition("dag:\n")
    nodes = "".join(
        f"    - name: node-{number}\n      type: model\n      model: {name}-1.0.0\n"
        for number, name in enumerate(DAGS[config], 1)
    )
    return f"{models}dag:\n  type: sequential\n  name: {config}\n  nodes:\n{nodes}"
