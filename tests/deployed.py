"""Reads the files in deploy/."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from tests import environments

DEPLOY = environments.ROOT / "deploy"
KSERVE = DEPLOY / "kserve"
RUNTIME, MLSERVER = KSERVE / "runtime.yaml", KSERVE / "mlserver.yaml"
SAMPLES = sorted((KSERVE / "samples").glob("*.yaml"))
CHART = DEPLOY / "helm" / "triglot"


def documents(text: str) -> list[dict[str, Any]]:
    """Return the documents of a YAML text, without empty ones."""
    return [document for document in yaml.safe_load_all(text) if document]


def runtime(file: Path = RUNTIME) -> dict[str, Any]:
    """Return KServe's ClusterServingRuntime of a file."""
    (document,) = documents(file.read_text())
    return document


def command_line(name: str, port: int) -> list[str]:
    """Return the arguments of the runtime's container for the InferenceService `name`, with this port."""
    (container,) = runtime()["spec"]["containers"]
    assert container["command"] == ["triglot"]
    texts = [argument.replace("{{.Name}}", name) for argument in container["args"]]
    assert not any("{{" in text for text in texts)
    return [text.replace("=8080", f"={port}") for text in texts]
