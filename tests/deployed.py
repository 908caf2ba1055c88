"""The files in deploy/, as their readers have them."""

from __future__ import annotations

from typing import Any

import yaml

import environments

DEPLOY = environments.ROOT / "deploy"
KSERVE = DEPLOY / "kserve"
RUNTIME = KSERVE / "runtime.yaml"
SAMPLES = sorted((KSERVE / "samples").glob("*.yaml"))
CHART = DEPLOY / "helm" / "triglot"


def documents(text: str) -> list[dict[str, Any]]:
    """The objects of a file of YAML; none for what is empty."""
    return [document for document in yaml.safe_load_all(text) if document]


def runtime() -> dict[str, Any]:
    """KServe's ClusterServingRuntime."""
    (document,) = documents(RUNTIME.read_text())
    return document


def command_line(name: str, port: int) -> list[str]:
    """The arguments of the runtime's container for the InferenceService of this name, but for the port."""
    (container,) = runtime()["spec"]["containers"]
    assert container["command"] == ["triglot"]
    texts = [argument.replace("{{.Name}}", name) for argument in container["args"]]
    assert not any("{{" in text for text in texts)
    return [text.replace("=8080", f"={port}") for text in texts]
