"""Hostile names, versions and paths in KServe's protocol: each is refused, and nothing outside is opened."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.e2e.hostile_names import INVALID, NAMES, NOT_FOUND, VERSIONS, ExposedServer, the_same, write_models
from tests.e2e.server_process import QUICK, ServerProcess
from tests.process import SECONDS, Triglot, run_triglot
from tests.protocol_clients.channel import SERVICE, rpc
from tests.protocol_clients.kserve import infer_request
from tests.protocol_clients.rest import Rest
from triglot.pb.kserve import inference_pb2 as kserve

# --- KServe V2 ---


@pytest.mark.parametrize("text", NAMES)
def test_names_over_kserve_grpc(exposed: ExposedServer, text: str) -> None:
    name = exposed.name(text)
    exposed.refuses("ModelInfer", infer_request(name), kserve.ModelInferResponse)
    exposed.refuses("ModelMetadata", kserve.ModelMetadataRequest(name=name), kserve.ModelMetadataResponse)
    ready = rpc(exposed.channel, "ModelReady", kserve.ModelReadyResponse)
    # An unknown model is not ready, rather than an error.
    assert not ready(kserve.ModelReadyRequest(name=name), timeout=SECONDS).ready
    # KServe's own stubs send the name in the place of the repository's.
    for load, unload in (
        (kserve.RepositoryModelLoadRequest(model_name=name), kserve.RepositoryModelUnloadRequest(model_name=name)),
        (
            kserve.RepositoryModelLoadRequest(repository_name=name),
            kserve.RepositoryModelUnloadRequest(repository_name=name),
        ),
    ):
        assert exposed.refuses("RepositoryModelLoad", load, kserve.RepositoryModelLoadResponse) == INVALID
        assert exposed.refuses("RepositoryModelUnload", unload, kserve.RepositoryModelUnloadResponse) == INVALID


@pytest.mark.parametrize("text", NAMES)
def test_names_in_a_stream(exposed: ExposedServer, text: str) -> None:
    call = exposed.channel.stream_stream(
        SERVICE + "ModelStreamInfer",
        request_serializer=kserve.ModelInferRequest.SerializeToString,
        response_deserializer=kserve.ModelStreamInferResponse.FromString,
    )
    requests = [infer_request(exposed.name(text)), infer_request("good", 5)]
    first, second = call(iter(requests), timeout=SECONDS)
    assert "unknown model" in first.error_message
    assert second.error_message == ""


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_over_kserve_grpc(exposed: ExposedServer, version: str) -> None:
    request = infer_request("good")
    request.model_version = version
    metadata = kserve.ModelMetadataRequest(name="good", version=version)
    ready = kserve.ModelReadyRequest(name="good", version=version)
    # The name of a version, which there could be, or a text that is none.
    code = NOT_FOUND if version in ("0x1", "1.0", "1e0", "latest") else INVALID
    assert exposed.refuses("ModelInfer", request, kserve.ModelInferResponse) == code
    assert exposed.refuses("ModelMetadata", metadata, kserve.ModelMetadataResponse) == code
    if code is INVALID:
        assert exposed.refuses("ModelReady", ready, kserve.ModelReadyResponse) == code
    else:
        assert not rpc(exposed.channel, "ModelReady", kserve.ModelReadyResponse)(ready, timeout=SECONDS).ready


@pytest.mark.parametrize("method", ["ModelInfer", "ModelMetadata", "ModelReady", "RepositoryModelLoad"])
def test_names_that_are_no_text(exposed: ExposedServer, method: str) -> None:
    call = exposed.channel.unary_unary(SERVICE + method)
    for field in (b"\x0a", b"\x12"):
        with pytest.raises(grpc.RpcError) as caught:
            call(field + b"\x04\xff\xfe..", timeout=SECONDS)
        assert caught.value.code() is INVALID


@pytest.mark.parametrize("text", NAMES)
def test_names_over_kserve_rest(exposed: ExposedServer, text: str) -> None:
    tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
    body = json.dumps({"inputs": [tensor]}).encode()
    for name in the_same(exposed.name(text)):
        for verb, path in (
            ("GET", f"/v2/models/{name}/ready"),
            ("GET", f"/v2/models/{name}/versions/1"),
            ("GET", f"/v2/models/{name}/versions/1/ready"),
            ("POST", f"/v2/models/{name}/infer"),
            ("POST", f"/v2/models/{name}/versions/1/infer"),
        ):
            status, content = exposed.http(verb, path, body if verb == "POST" else b"")
            assert 400 <= status < 500, (path, status, content)
            assert content, path
        for verb in ("load", "unload"):
            status, content = exposed.http("POST", f"/v2/repository/models/{name}/{verb}")
            # Another path, perhaps: a repository's name is refused as a whole (501).
            assert 400 <= status < 500 or (status == 501 and b"'repository_name' specification" in content), (
                content
            )
            status, content = exposed.http("POST", f"/v2/repository/{name}/models/good/{verb}")
            assert status in (400, 404, 405, 501), content


@pytest.mark.parametrize("version", VERSIONS)
def test_versions_over_kserve_rest(exposed: ExposedServer, version: str) -> None:
    for text in the_same(version):
        for path in ("", "/ready"):
            status, content = exposed.http("GET", f"/v2/models/good/versions/{text}{path}")
            assert status in (400, 404), (text, status, content)
        status, content = exposed.http("POST", f"/v2/models/good/versions/{text}/infer", b"{}")
        assert status in (400, 404, 405), (text, status, content)


@pytest.mark.parametrize("name", ["linked", "in_part", "configured", "outside", "unknown"])
def test_models_that_are_missing_or_outside(exposed: ExposedServer, name: str) -> None:
    """Good names; what they stand for is not there, or leads out. Triton says INTERNAL, and 500."""
    with pytest.raises(grpc.RpcError) as caught:
        rpc(exposed.channel, "RepositoryModelLoad", kserve.RepositoryModelLoadResponse)(
            kserve.RepositoryModelLoadRequest(model_name=name), timeout=SECONDS
        )
    text = f"failed to load '{name}', failed to poll from model repository"
    assert caught.value.details().startswith(text)
    status, content = exposed.http("POST", f"/v2/repository/models/{name}/load")
    assert (status, json.loads(content)["error"]) == (500, caught.value.details())
    folder = exposed.folder
    leads_out = f"a symbolic link leads out of {folder / 'repository'}, to {folder / 'outside'}"
    reasons = {
        "linked": leads_out,
        "in_part": leads_out,
        "configured": "default_model_filename: expected a path inside",
    }
    assert reasons.get(name, "no model of this name") in caught.value.details()


@pytest.mark.parametrize(
    "config",
    [
        {"default_model_filename": "../../../outside/1/model.py"},
        {"default_model_filename": "{folder}/outside/1/model.py"},
        {"default_model_filename": "a\0b"},
        {"default_model_filename": "x" * 5000},
        {
            "output": [
                {"name": "y", "data_type": "TYPE_INT32", "dims": [1], "label_filename": "../../outside/1/model.py"}
            ]
        },
        {"name": "../outside"},
    ],
)
def test_paths_in_the_configuration_of_a_load_request(exposed: ExposedServer, config: dict[str, Any]) -> None:
    """Serving models continue, see `ExposedServer.check`."""
    text = exposed.name(json.dumps({"backend": "python", **config}))
    request = kserve.RepositoryModelLoadRequest(model_name="good")
    request.parameters["config"].string_param = text
    with pytest.raises(grpc.RpcError) as caught:
        rpc(exposed.channel, "RepositoryModelLoad", kserve.RepositoryModelLoadResponse)(request, timeout=SECONDS)
    (key,) = config
    assert f"{key}" in caught.value.details() or "model" in caught.value.details()
    body = json.dumps({"parameters": {"config": text}}).encode()
    status, content = exposed.http("POST", "/v2/repository/models/good/load", body)
    assert status >= 400
    assert json.loads(content)["error"] == caught.value.details()


# --- paths that name nothing ---


@pytest.mark.parametrize(
    "path",
    [
        "/../../../../etc/passwd",
        "/v2/../../etc/passwd",
        "/v2/models/../../outside/1/model.py",
        "/v2/models/..%2f..%2foutside%2f1%2fmodel.py",
        "/v2/models/good/versions/1/../../../outside",
        "/v2/repository/models/../../outside/load",
        "/v1/models/../../outside/1/model.py",
        "//v2/models/good",
        "/v2/models//good",
        "/v2/models/good/",
        "/static/../config",
        "/%00",
        "/v2/models/%ff%fe",
        "/v2/models/%C0%AE%C0%AE%2Foutside",
        "/v2/models/%",
    ],
)
def test_paths(exposed: ExposedServer, path: str) -> None:
    for verb in ("GET", "POST"):
        status, content = exposed.http(verb, path)
        assert 400 <= status < 500, content
        assert b"root:" not in content
        assert b"class Identity" not in content


# --- links, and who allows them ---


def test_links_are_followed_where_that_is_allowed(tmp_path: Path) -> None:
    """And what must not be opened elsewhere tells when it is."""
    arguments = (str(write_models(tmp_path)), "--model-control-mode", "explicit", "--allow-symlinks")
    with ServerProcess(*arguments, "--load-model", "linked") as server:
        assert (tmp_path / "opened-0").exists()
        assert Rest(server.ports()[1]).infer("linked")[0] == 200


def test_the_same_in_tensorflow_serving_s_place(tmp_path: Path) -> None:
    """It has no such flag, and so the text names the variable."""
    write_models(tmp_path)
    base_path = tmp_path / "repository" / "in_part"
    flags = ("--model_name=m", f"--model_base_path={base_path}", "--file_system_poll_wait_seconds=0")
    completed = run_triglot("tfserving", *flags, environment=QUICK)
    assert completed.returncode == 1
    assert f"{base_path / '1'}: a symbolic link leads out of {base_path}" in completed.stderr
    assert "TRIGLOT_ALLOW_SYMLINKS=true, allows that" in completed.stderr
    assert not (tmp_path / "opened-0").exists()
    allowing = QUICK | {"TRIGLOT_ALLOW_SYMLINKS": "true", "TRIGLOT_PROTOCOLS": "kserve"}
    with Triglot(*flags, command="tfserving", environment=allowing) as server:
        assert Rest(server.ports()[1]).infer("m")[0] == 200
        server.stop()
