"""The OpenAPI document in the hands of its tools: it is valid, and the server does what it says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

from tests import environments
from tests.e2e.client_scripts import CLIENTS, ClientScript, script_tests
from tests.e2e.server_process import ServerProcess
from tests.process import PLAIN_MODELS, clean_environment

SCRIPT = ClientScript("openapi", "openapi_document.py")
MODELS = ("half_plus_two", "identity_bytes", "token_stream")
RUN_SECONDS = 600
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


test_check, test_every_check_is_reported_in_order = script_tests(SCRIPT)


RUNS = """import json, sys
from schemathesis.cli import schemathesis

for arguments in json.loads(sys.argv[1]):
    try:
        schemathesis(arguments)
    except SystemExit as end:
        if end.code:
            raise
"""
"""Several runs in one process: the library takes seconds to import."""


def arguments(server: ServerProcess, paths: str, which: str, *further: str) -> list[str]:
    """Return those of a run that calls the server as its document says, and otherwise; the same calls each time.

    `which`: "include" only operations with such `paths`, or "exclude" them. `further` checks.
    """
    return [
        *("--no-color", "run", f"http://{server.rest_address}/openapi.json"),
        *("--phases", "examples,coverage,fuzzing"),
        *("--checks", ",".join((*CHECKS, *further)), "--max-examples", "1", "--generation-deterministic"),
        *("--continue-on-failure", "--no-shrink", "--warnings", "off", f"--{which}-path-regex", paths),
    ]


def test_no_call_is_answered_otherwise_than_the_document_says(tmp_path: Path) -> None:
    for name in MODELS:
        shutil.copytree(PLAIN_MODELS / name, tmp_path / "models" / name)
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
        runs = [
            arguments(server, f"{TENSORFLOW_SERVING}|{ADMINISTRATION}", "exclude", "unsupported_method"),
            arguments(server, TENSORFLOW_SERVING, "include"),
            arguments(server, ADMINISTRATION, "include", "unsupported_method"),
        ]
        done = subprocess.run(
            [str(environments.python("openapi")), "-c", RUNS, json.dumps(runs)],
            capture_output=True,
            text=True,
            timeout=RUN_SECONDS,
            env=clean_environment(SCHEMATHESIS_HOOKS="openapi_hooks", PYTHONPATH=str(CLIENTS)),
            cwd=tmp_path,
            check=False,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    tested = re.findall(r"Tested: (\d+)", done.stdout)
    assert [int(count) >= 10 for count in tested] == [True] * len(runs), done.stdout
