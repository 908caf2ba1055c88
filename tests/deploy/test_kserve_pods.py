"""The pod that KServe makes of the runtime and a sample, against Kubernetes' own schemas."""

from __future__ import annotations

from typing import Any

import pytest

from tests.deploy.kubernetes_schemas import check, kubernetes_validate
from tests.deployed import SAMPLES, documents, runtime

OF_THE_MODEL = {"modelFormat", "protocolVersion", "runtime", "runtimeVersion", "storage", "storageUri"}


def pod_of(predictor: dict[str, Any]) -> dict[str, Any]:
    """The runtime's container with what the predictor's model has in place of it or besides."""
    spec = runtime()["spec"]
    (container,) = spec["containers"]
    own = {key: value for key, value in predictor["model"].items() if key not in OF_THE_MODEL}
    mounts = container["volumeMounts"] + own.pop("volumeMounts", [])
    volumes = spec["volumes"] + predictor.get("volumes", [])
    inner = {"containers": [container | own | {"volumeMounts": mounts}], "volumes": volumes}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "p"}, "spec": inner}


PREDICTORS = [document["spec"]["predictor"] for file in SAMPLES for document in documents(file.read_text())]


@pytest.mark.parametrize("predictor", PREDICTORS)
def test_pods(predictor: dict[str, Any]) -> None:
    pod = pod_of(predictor)
    check(pod)
    (container,) = pod["spec"]["containers"]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["spec"]["volumes"]
    }


def test_the_pod_is_restricted() -> None:
    # What Kubernetes' Pod Security Standards ask of a container.
    security = runtime()["spec"]["containers"][0]["securityContext"]
    assert security["runAsNonRoot"]
    assert security["readOnlyRootFilesystem"]
    assert not security["allowPrivilegeEscalation"]
    assert security["capabilities"] == {"drop": ["ALL"]}
    assert security["seccompProfile"] == {"type": "RuntimeDefault"}


@pytest.mark.parametrize("key", ["startupprobe", "nmae"])
def test_what_is_no_container_is_found(key: str) -> None:
    pod = pod_of(PREDICTORS[0])
    pod["spec"]["containers"][0][key] = {}
    with pytest.raises(kubernetes_validate.ValidationError, match=key):
        check(pod)
