"""The runtime and the samples against the schemas of KServe's CustomResourceDefinitions."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.kubernetes_schemas import check as check_kubernetes
from tests.deployed import SAMPLES, documents, runtime

jsonschema = pytest.importorskip("jsonschema", reason="the deploy environment has it")

CRDS = {
    ("serving.kserve.io/v1alpha1", "ClusterServingRuntime"): "clusterservingruntimes.serving.kserve.io/v1alpha1",
    ("serving.kserve.io/v1beta1", "InferenceService"): "inferenceservices.serving.kserve.io/v1beta1",
}
BITS = {"int32": 32, "int64": 64}


def closed(schema: Any) -> Any:
    """The schema, where objects have no fields but those that it names."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    return {"additionalProperties": False} | inner if schema.get("type") == "object" else inner


def fits(_: Any, name: str, value: Any, __: Any) -> Iterator[Any]:
    """The keyword `format`: a number in its range."""
    bound = 1 << BITS[name] - 1
    if isinstance(value, int) and not -bound <= value < bound:
        yield jsonschema.ValidationError(f"{value} is no {name}")


def differ(_: Any, keys: list[str], values: Any, schema: Any) -> Iterator[Any]:
    """The keyword `x-kubernetes-list-map-keys`: no two items have the same."""
    fields = schema["items"]["properties"]
    found = [[value.get(key, fields[key].get("default")) for key in keys] for value in values]
    for found_key in found:
        if found.count(found_key) > 1:
            yield jsonschema.ValidationError(f"{keys} {found_key} is there twice")


Validator = jsonschema.validators.extend(
    jsonschema.Draft202012Validator, {"format": fits, "x-kubernetes-list-map-keys": differ}
)
SCHEMAS = closed(yaml.safe_load(Path(__file__).with_name("kserve_crds.yaml").read_text()))
for each in SCHEMAS.values():
    each["properties"]["metadata"] = {}


def check(document: dict[str, Any]) -> None:
    """Raise `ValidationError` where the API server would."""
    Validator(SCHEMAS[CRDS[document["apiVersion"], document["kind"]]]).validate(document)
    # Definitions leave these to the API server, which has the same for all kinds.
    check_kubernetes({"apiVersion": "v1", "kind": "ConfigMap", "metadata": document["metadata"]})


def sample(name: str, at: int = 0) -> dict[str, Any]:
    (file,) = (file for file in SAMPLES if file.stem == name)
    return documents(file.read_text())[at]


MANIFESTS = [
    pytest.param(runtime(), id="runtime"),
    *(
        pytest.param(document, id=f"{file.stem}-{at}")
        for file in SAMPLES
        for at, document in enumerate(documents(file.read_text()))
    ),
]


@pytest.mark.parametrize("document", MANIFESTS)
def test_manifests(document: dict[str, Any]) -> None:
    check(document)


PORT = {"containerPort": 8080}
CONTAINER = "spec.containers.0"
METRIC = "spec.predictor.autoScaling.metrics.0"
CANARY = "spec.canary.0"


@pytest.mark.parametrize(
    ("document", "path", "value", "error"),
    [
        (runtime(), "spec.containers", None, "'containers' is a required property"),
        (runtime(), "spec.hostNetwork", True, r"'hostNetwork' was unexpected"),
        (runtime(), "spec.supportedModelFormats.0.version", 1, "1 is not of type 'string'"),
        (runtime(), f"{CONTAINER}.ports", [PORT, PORT | {"protocol": "TCP"}], "is there twice"),
        (runtime(), f"{CONTAINER}.ports.0.containerPort", 1 << 31, "is no int32"),
        (runtime(), f"{CONTAINER}.resources.limits.memory", "2 GiB", "does not match"),
        (runtime(), f"{CONTAINER}.livenessProbe.httpGet.port", None, "'port' is a required property"),
        (runtime(), "metadata.labels", {"a": 1}, "1 is not of type 'string'"),
        (sample("formats"), "spec.predictor", None, "'predictor' is a required property"),
        (sample("formats"), "spec.predictor.model.modelFormat.name", None, "'name' is a required property"),
        (sample("autoscaling"), f"{METRIC}.type", "external", "'external' is not one of"),
        (sample("autoscaling"), f"{METRIC}.external.metric.backend", "datadog", "'datadog' is not one of"),
        (sample("autoscaling"), f"{METRIC}.external.target", None, "'target' is a required property"),
        (sample("canary", 1), f"{CANARY}.trafficPercent", 101, "greater than the maximum"),
        (sample("canary", 1), f"{CANARY}.predictor.name", "Next", "does not match"),
        (sample("canary", 1), f"{CANARY}.predictor.model.name", None, "'name' is a required property"),
        (sample("tls"), "spec.predictor.model.env.1.name", "KSERVE_TLS_CERT_FILE", "is there twice"),
    ],
)
def test_what_is_not_valid_is_found(document: dict[str, Any], path: str, value: Any, error: str) -> None:
    document = copy.deepcopy(document)
    inner: Any = document
    *parts, last = path.split(".")
    for part in parts:
        inner = inner[int(part)] if part.isdecimal() else inner[part]
    if value is None:
        del inner[last]
    else:
        inner[last] = value
    with pytest.raises(jsonschema.ValidationError, match=error):
        check(document)
