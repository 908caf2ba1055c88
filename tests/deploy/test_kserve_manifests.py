"""The runtime and the samples against KServe's API, as the classes of its own package have it.

These are generated from the same types as its CustomResourceDefinitions: fields, their types, which must be there.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.deployed import MLSERVER, RUNTIME, SAMPLES, documents, runtime

kserve = pytest.importorskip("kserve", reason="the kserve environment has it")
kubernetes = pytest.importorskip("kubernetes.client")

KINDS = {
    ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"): "V1alpha1ClusterServingRuntime",
    ("serving.kserve.io/v1beta1", "InferenceService"): "V1beta1InferenceService",
}
PLAIN: dict[str, Any] = {"str": str, "bool": bool, "int": int, "float": (int, float), "object": object}
QUANTITY = re.compile(r"[0-9.]+(m|k|[KMGT]i?)?")
PROTOCOLS = {"v1", "v2", "grpc-v1", "grpc-v2"}


def class_of(kind: str) -> Any:
    """Of KServe, where the package does not export all of them, or of Kubernetes."""
    module = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", kind).lower()
    with suppress(ModuleNotFoundError):
        return getattr(importlib.import_module(f"kserve.models.{module}"), kind)
    return getattr(kserve, kind, None) or getattr(kubernetes, kind)


def made(kind: str, value: Any, where: str) -> Any:
    """The value as the class of this name. Raise `AssertionError` or `ValueError` where it is none."""
    if inner := re.fullmatch(r"[lL]ist\[(.+)\]", kind):
        assert isinstance(value, list), f"{where}: expected a list, got {value!r}"
        return [made(inner[1], item, f"{where}[{at}]") for at, item in enumerate(value)]
    if inner := re.fullmatch(r"[dD]ict[(\[]str, (.+)[)\]]", kind):
        assert isinstance(value, dict), f"{where}: expected a mapping, got {value!r}"
        return {key: made(inner[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind.endswith("Quantity"):
        assert QUANTITY.fullmatch(str(value)), f"{where}: expected a quantity, got {value!r}"
        return value
    if kind in PLAIN:
        assert isinstance(value, PLAIN[kind]), f"{where}: expected {kind}, got {value!r}"
        assert kind == "bool" or not isinstance(value, bool), f"{where}: expected {kind}, got {value!r}"
        return value
    of_kind = class_of(kind)
    assert isinstance(value, dict), f"{where}: expected a mapping, got {value!r}"
    attributes = {key: attribute for attribute, key in of_kind.attribute_map.items()}
    unknown = value.keys() - attributes.keys()
    assert not unknown, f"{where}: unknown {sorted(unknown)}"
    fields = {
        attributes[key]: made(of_kind.openapi_types[attributes[key]], item, f"{where}.{key}")
        for key, item in value.items()
    }
    return of_kind(**fields)


def check(document: dict[str, Any]) -> Any:
    """The whole object."""
    return made(KINDS[document["apiVersion"], document["kind"]], document, document["metadata"]["name"])


def samples() -> Iterator[Any]:
    """Each InferenceService."""
    for file in SAMPLES:
        for at, document in enumerate(documents(file.read_text())):
            yield pytest.param(document, id=f"{file.stem}-{at}")


def test_the_runtime() -> None:
    spec = check(runtime()).spec
    assert set(spec.protocol_versions) == PROTOCOLS
    (container,) = spec.containers
    assert container.name == "kserve-container"
    # KServe and Knative take a port for one of gRPC by its name, and want one port.
    (port,) = container.ports
    assert "h2c" in port.name
    probes = [container.startup_probe, container.readiness_probe, container.liveness_probe]
    assert {probe.http_get.port for probe in probes} == {port.container_port}
    assert spec.annotations["prometheus.kserve.io/port"] == str(port.container_port)


def test_the_runtime_in_place_of_mlserver() -> None:
    document = runtime(MLSERVER)
    (container,) = check(document).spec.containers
    # KServe sets the variables of MLServer for a runtime of this name.
    assert document["metadata"]["name"] == "kserve-mlserver"
    ports = [variable.value for variable in container.env if variable.name.endswith("_HTTP_PORT")]
    probes = [container.startup_probe, container.readiness_probe, container.liveness_probe]
    assert {str(probe.http_get.port) for probe in probes} == set(ports)


@pytest.mark.parametrize("document", list(samples()))
def test_samples(document: dict[str, Any]) -> None:
    service = check(document)
    model = service.spec.predictor.model
    formats = {
        (model_format.name, model_format.version) for model_format in check(runtime()).spec.supported_model_formats
    }
    assert model.runtime == runtime()["metadata"]["name"]
    assert model.model_format.name in {name for name, _ in formats}
    assert model.model_format.version is None or (model.model_format.name, model.model_format.version) in formats
    assert model.protocol_version is None or model.protocol_version in PROTOCOLS


def test_each_format_has_a_sample() -> None:
    named = [
        document["spec"]["predictor"]["model"]["modelFormat"]["name"]
        for file in SAMPLES
        for document in documents(file.read_text())
    ]
    assert {model_format["name"] for model_format in runtime()["spec"]["supportedModelFormats"]} == set(named)


@pytest.mark.parametrize(
    ("path", "key", "value", "error"),
    [
        ("spec", "protocolVersion", ["v2"], r"unknown \['protocolVersion'\]"),
        ("spec", "multiModel", "false", "expected bool, got 'false'"),
        ("spec", "containers", None, "expected a list"),
        ("spec.containers.0", "name", None, "expected str, got None"),
        ("spec.containers.0.ports.0", "containerPort", "8080", "expected int, got '8080'"),
        ("spec.containers.0.readinessProbe", "httpget", {}, r"unknown \['httpget'\]"),
    ],
)
def test_what_is_no_runtime_is_found(path: str, key: str, value: Any, error: str) -> None:
    document = copy.deepcopy(runtime())
    inner: Any = document
    for part in path.split("."):
        inner = inner[int(part)] if part.isdecimal() else inner[part]
    inner[key] = value
    with pytest.raises(AssertionError, match=error):
        check(document)


def test_what_a_runtime_lacks_is_found() -> None:
    document = copy.deepcopy(runtime())
    del document["spec"]["containers"]
    with pytest.raises(ValueError, match="Invalid value for `containers`, must not be `None`"):
        check(document)


def test_files_exist() -> None:
    assert RUNTIME.exists()
    assert {Path(file).stem for file in SAMPLES} >= {"formats", "canary", "autoscaling", "tracing", "tls"}
