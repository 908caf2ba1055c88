"""The Helm chart, rendered by Helm, against Kubernetes' schemas and those of KEDA and the Prometheus operator."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import triglot
from tests.deploy.kubernetes_schemas import check, kubernetes_validate
from tests.deploy.render_chart import NAMESPACE, helm, rendered
from tests.deployed import CHART

keda = pytest.importorskip("cloudcoil.models.keda.v1alpha1")
operator = pytest.importorskip("cloudcoil.models.prometheus_operator.v1")

CUSTOM = {"ScaledObject": keda.ScaledObject, "ServiceMonitor": operator.ServiceMonitor}
ALWAYS = {("Deployment", ""), ("Service", ""), ("Service", "-headless"), ("PodDisruptionBudget", "")}
VALUES: dict[str, dict[str, Any]] = {
    "defaults": {},
    "hpa": {"autoscaling": {"kind": "hpa", "heldRequests": 8}},
    "keda": {"autoscaling": {"kind": "keda", "minReplicas": 3}, "serviceMonitor": {"enabled": True}},
    "everything": {
        "image": {"tag": "1.2"},
        "imagePullSecrets": [{"name": "registry"}],
        "models": {
            "paths": ["/models", "iris=/models-2/iris"],
            "volume": {"persistentVolumeClaim": {"claimName": "m"}},
        },
        "args": ["--tls-certificate=/tls/tls.crt", "--tls-key=/tls/tls.key", "--watch"],
        "env": [{"name": "TRIGLOT_LOG_LEVEL", "value": "warning"}],
        "extraVolumes": [{"name": "tls", "secret": {"secretName": "tls"}}],
        "extraVolumeMounts": [{"name": "tls", "mountPath": "/tls", "readOnly": True}],
        "tls": True,
        "podDisruptionBudget": {"minAvailable": "50%"},
        "serviceMonitor": {"enabled": True, "labels": {"release": "prometheus"}},
        "podAnnotations": {"a": "b"},
        "podLabels": {"team": "ml"},
        "nodeSelector": {"disk": "ssd"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"nodeAffinity": {}},
    },
}


def check_object(document: dict[str, Any]) -> None:
    """By the schema of its kind: fields that it does not have are wrong, too."""
    if of_kind := CUSTOM.get(document["kind"]):
        made = of_kind.model_validate(document)
        assert made.model_dump(by_alias=True, exclude_unset=True, mode="json") == document
    else:
        check(document)


def of(documents: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    """The first object of a kind."""
    return next(document for document in documents if document["kind"] == kind)


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_what_is_rendered_is_valid(values: dict[str, Any]) -> None:
    documents = rendered(values)
    for document in documents:
        check_object(document)
    named = {
        (document["kind"], document["metadata"]["name"].removeprefix("demo-triglot")) for document in documents
    }
    assert named - {("ScaledObject", ""), ("ServiceMonitor", ""), ("HorizontalPodAutoscaler", "")} == ALWAYS


@pytest.mark.parametrize("values", VALUES.values(), ids=VALUES)
def test_everything_selects_the_pods(values: dict[str, Any]) -> None:
    documents = rendered(values)
    deployment = of(documents, "Deployment")
    template = deployment["spec"]["template"]
    labels = template["metadata"]["labels"].items()
    (container,) = template["spec"]["containers"]
    (port,) = container["ports"]
    for document in documents:
        spec = document["spec"]
        match document["kind"]:
            case "Service":
                assert spec["selector"].items() <= labels
                assert [port["targetPort"] for port in spec["ports"]] == [port["name"]]
            case "Deployment" | "PodDisruptionBudget":
                assert spec["selector"]["matchLabels"].items() <= labels
            case "ServiceMonitor":
                # One of the services, or each pod is counted twice.
                selector = spec["selector"]["matchLabels"].items()
                services = [document for document in documents if document["kind"] == "Service"]
                (service,) = [service for service in services if selector <= service["metadata"]["labels"].items()]
                assert [port["port"] for port in spec["endpoints"]] == [
                    port["name"] for port in service["spec"]["ports"]
                ]
            case "HorizontalPodAutoscaler" | "ScaledObject":
                assert spec["scaleTargetRef"]["name"] == deployment["metadata"]["name"]
                assert "replicas" not in deployment["spec"]  # Or each upgrade would undo what it has scaled.
    volumes = {volume["name"] for volume in template["spec"]["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes


@pytest.mark.parametrize("shutdown", [{}, {"drain": 0, "grace": 300}, {"drain": 30, "grace": 5, "unload": 60}])
def test_kubernetes_waits_until_the_server_has_ended(shutdown: dict[str, int]) -> None:
    spec = of(rendered({"shutdown": shutdown}), "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    options = dict(text[2:].split("=") for text in container["args"] if "=" in text)
    expected = {"drain": 5, "grace": 20, "unload": 10} | shutdown
    assert (int(options["drain-delay"]), int(options["grace"])) == (expected["drain"], expected["grace"])
    assert spec["terminationGracePeriodSeconds"] == sum(expected.values())


def test_the_pod_is_restricted() -> None:
    spec = of(rendered({}), "Deployment")["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert spec["securityContext"]["runAsNonRoot"]
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert not spec["automountServiceAccountToken"]


def test_keda_asks_for_what_waits_and_runs_in_these_pods() -> None:
    (trigger,) = of(rendered(VALUES["keda"]), "ScaledObject")["spec"]["triggers"]
    query = f'sum(triglot_held_requests{{namespace="{NAMESPACE}", pod=~"demo-triglot-.+"}})'
    assert trigger["metadata"]["query"] == query
    assert trigger["metricType"] == "AverageValue"


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 2},
        {"shutdown": {"grace": "long"}},
        {"autoscaling": {"kind": "cpu"}},
        {"models": {"paths": []}},
        {"port": 80},  # Not for a user that is not root.
    ],
)
def test_wrong_values_are_refused(values: dict[str, Any]) -> None:
    with pytest.raises(helm.HelmValuesError, match=next(iter(values))):
        rendered(values)


def test_what_is_not_valid_is_found() -> None:
    documents = rendered(VALUES["keda"])
    for kind, path in (("Deployment", "template"), ("Service", "ports"), ("ScaledObject", "triggers")):
        wrong = copy.deepcopy(of(documents, kind))
        wrong["spec"][f"{path}s"] = wrong["spec"][path]
        with pytest.raises((kubernetes_validate.ValidationError, AssertionError)):
            check_object(wrong)


def test_lint_and_version() -> None:
    report = helm.lint(CHART, strict=True)
    assert not report["errors"]
    with helm.Chart.load(CHART) as chart:
        assert chart.metadata["appVersion"] == triglot.__version__
