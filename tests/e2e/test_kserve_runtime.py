"""KServe's ClusterServingRuntime, run as the kubelet runs it, and KServe's own clients."""

from __future__ import annotations

import json
import ssl
import urllib.request
from pathlib import Path

import grpc
import pytest
import trustme

from tests import environments
from tests.deployed import KSERVE, MLSERVER, command_line, documents, runtime
from tests.e2e.client_scripts import ClientScript
from tests.e2e.kserve_formats import FORMATS, IN_PLACE
from tests.kubelet import Pod, restricted
from tests.process import SECONDS, triglot_command, unused_ports
from tests.protocol_clients.kserve import server_ready

NAME = "sample-of-kserve"
SCRIPT = ClientScript("kserve", "kserve_named.py")
(CONTAINER,) = runtime()["spec"]["containers"]


@pytest.mark.newest
@pytest.mark.parametrize("case", FORMATS)
def test_kserves_clients_ask_for_the_name_of_the_service(tmp_path: Path, case: str) -> None:
    sample = FORMATS[case]
    models = tmp_path / "models"
    models.mkdir()
    prefix = restricted(models)
    sample.write(models)
    port, _ = unused_ports()
    python = environments.python(sample.environment)
    command = prefix + triglot_command(tuple(command_line(NAME, port)), python=python)
    with Pod(CONTAINER, command, port) as pod:
        pod.wait_until_ready()
        address, name = f"127.0.0.1:{port}", sample.name or NAME
        report = SCRIPT.run_with(
            address, address, name, json.dumps({"inputs": sample.inputs, "outputs": sample.outputs})
        )
        for check in SCRIPT.check_names():
            report.assert_held(check)
        report.assert_complete(SCRIPT)


@pytest.mark.newest
@pytest.mark.parametrize(
    "name", dict.fromkeys(found["name"] for found in runtime(MLSERVER)["spec"]["supportedModelFormats"])
)
def test_runtime_in_place_of_kserve_mlserver(tmp_path: Path, name: str) -> None:
    model_class, sample = IN_PLACE[name]
    models = tmp_path / "models"
    models.mkdir()
    prefix = restricted(models)
    sample.write(models)
    port, grpc_port = unused_ports()
    (container,) = runtime(MLSERVER)["spec"]["containers"]
    values = {"{{.Labels.modelClass}}": model_class, "8080": str(port), "9000": str(grpc_port)}
    variables = [{"name": variable["name"], "value": values[variable["value"]]} for variable in container["env"]]
    # KServe's webhook adds these.
    variables += [
        {"name": "MLSERVER_MODEL_NAME", "value": NAME},
        {"name": "MLSERVER_MODEL_URI", "value": "/mnt/models"},
        {"name": "MLSERVER_METRICS_PORT", "value": str(unused_ports()[0])},
    ]
    command = prefix + triglot_command(tuple(container["args"]), python=environments.python(sample.environment))
    with Pod(container | {"env": variables}, command, port) as pod:
        pod.wait_until_ready()
        body = json.dumps({"parameters": {"content_type": "pd"}, "inputs": sample.inputs}).encode()
        with urllib.request.urlopen(
            f"http://127.0.0.1:{port}/v2/models/{NAME}/infer", body, timeout=SECONDS
        ) as response:
            outputs = json.load(response)["outputs"]
        assert {output["name"]: output["data"] for output in outputs} == {
            name: pytest.approx(values) for name, values in sample.outputs.items()
        }
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            assert server_ready(channel)


@pytest.mark.newest
def test_a_certificate_by_kserves_variables(tmp_path: Path) -> None:
    folders = models, tls = tmp_path / "models", tmp_path / "tls"
    for folder in folders:
        folder.mkdir()
    prefix = restricted(models, tls)
    FORMATS["onnx"].write(models)
    authority = trustme.CA()
    certificate = authority.issue_cert("127.0.0.1")
    certificate.private_key_pem.write_to_path(str(tls / "tls.key"))
    certificate.cert_chain_pems[0].write_to_path(str(tls / "tls.crt"))
    (sample,) = documents((KSERVE / "samples" / "tls.yaml").read_text())
    model = json.loads(json.dumps(sample["spec"]["predictor"]["model"]).replace("/etc/triglot/tls", str(tls)))
    port, _ = unused_ports()
    command = prefix + triglot_command(tuple(command_line(NAME, port)))
    with Pod(CONTAINER | model, command, port) as pod:
        pod.wait_until_ready()
        context = ssl.create_default_context()
        authority.configure_trust(context)
        url = f"https://127.0.0.1:{port}/v2/models/{NAME}/ready"
        with urllib.request.urlopen(url, context=context, timeout=SECONDS) as response:
            assert response.status == 200
        credentials = grpc.ssl_channel_credentials(authority.cert_pem.bytes())
        with grpc.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
            assert server_ready(channel)
