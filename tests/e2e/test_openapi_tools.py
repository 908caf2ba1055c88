"""The OpenAPI document in the hands of its tools: it is valid, and the server does what it says."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from client_scripts import CLIENTS, ClientScript, ReportOf, cases
from server_process import ServerProcess

import environments
import triglot
from process import clean_environment

SCRIPT = ClientScript("openapi", "openapi_document.py")
DEMO = Path(triglot.__file__).parent / "demo"
MODELS = ("half_plus_two", "identity_bytes", "token_stream")
RUN_SECONDS = 300
CHECKS = (
    "server_errors_are_in_the_document",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
    "missing_required_header",
    "allow_header_conformance",
)
"""What is not checked: that the server takes nothing else, and that it takes whatever fits a schema. Protocols are
more lenient than schemas can say, and models choose."""
ADMINISTRATION = "/(un)?load$|/(un)?register$|/(on|off)line$|/setting$|/logging$"
"""Paths that change the server: they come last."""
TENSORFLOW_SERVING = "^/v1|^/own/metrics$"
"""Where a method that a path does not have is answered otherwise than with 405, as in TensorFlow Serving."""


@pytest.mark.parametrize(("script", "name"), cases([SCRIPT]))
def test_check(script: ClientScript, name: str, report: ReportOf) -> None:
    report(script).assert_held(name)


def test_every_check_is_reported_in_order(report: ReportOf) -> None:
    report(SCRIPT).assert_complete(SCRIPT)


def schemathesis(folder: Path, server: ServerProcess, paths: str, which: str, *further: str) -> None:
    """Calls the server as its document says, and otherwise; the same calls each time.

    `folder`: where it keeps files. `which`: only operations with such `paths`, or only others. `further` checks.
    """
    done = subprocess.run(
        [
            *(str(environments.python("openapi").with_name("schemathesis")), "--no-color"),
            *("run", f"http://{server.rest_address}/openapi.json", "--phases", "examples,coverage,fuzzing"),
            *("--checks", ",".join((*CHECKS, *further)), "--max-examples", "1", "--generation-deterministic"),
            *("--continue-on-failure", "--no-shrink", "--warnings", "off", f"--{which}-path-regex", paths),
        ],
        capture_output=True,
        text=True,
        timeout=RUN_SECONDS,
        env=clean_environment(SCHEMATHESIS_HOOKS="openapi_hooks", PYTHONPATH=str(CLIENTS)),
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = re.search(r"Tested: (\d+)", done.stdout)
    assert tested is not None, done.stdout
    assert int(tested[1]) >= 10


def test_no_call_is_answered_otherwise_than_the_document_says(tmp_path: Path) -> None:
    for name in MODELS:
        shutil.copytree(DEMO / name, tmp_path / "models" / name)
    options = {
        "model-control-mode": "explicit",
        "load-model": "*",
        "shared-memory-prefix": "/triglot-openapi-",
        "trace-file": tmp_path / "trace.json",
        "grps-path": "/own/grps",
        "predict-route": "/own/predict",
        "health-route": "/own/health",
        "monitoring-path": "/own/metrics",
    }
    flags = [f"--{name}={value}" for name, value in options.items()]
    with ServerProcess(str(tmp_path / "models"), *flags) as server:
        schemathesis(tmp_path, server, f"{TENSORFLOW_SERVING}|{ADMINISTRATION}", "exclude", "unsupported_method")
        schemathesis(tmp_path, server, TENSORFLOW_SERVING, "include")
        schemathesis(tmp_path, server, ADMINISTRATION, "include", "unsupported_method")
