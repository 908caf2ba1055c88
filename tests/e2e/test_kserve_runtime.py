"""KServe's ClusterServingRuntime, run as the kubelet runs it, and KServe's own clients."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from client_scripts import ClientScript
from kserve_formats import FORMATS

import environments
from deployed import command_line, runtime
from kubelet import Pod, restricted
from process import triglot_command, unused_ports

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
