"""Unmodified client packages, each in an environment of its own, against a server process: one test per check."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from client_scripts import ClientScript, Report

COMMON = ("triton_common.py",)
SCRIPTS = [
    ClientScript("tritonclient", "triton_grpc.py", ("grpc",), COMMON),
    ClientScript("tritonclient", "triton_grpc.py", ("grpc.aio",), COMMON),
    ClientScript("tritonclient", "triton_http.py", ("http",), COMMON),
    ClientScript("tritonclient", "triton_http.py", ("http.aio",), COMMON),
    ClientScript("tritonclient", "triton_stub.py"),
    ClientScript("tritonclient", "triton_stream.py"),
    ClientScript("kserve", "kserve_rest.py"),
    ClientScript("kserve", "kserve_grpc.py"),
]
CASES = [pytest.param(script, name, id=f"{script}-{name}") for script in SCRIPTS for name in script.check_names()]


@pytest.mark.parametrize(("script", "name"), CASES)
def test_check(script: ClientScript, name: str, report: Callable[[ClientScript], Report]) -> None:
    found = report(script)
    finding = found.findings.get(name, f"not reported: {found.end}")
    assert not finding, finding


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_every_check_is_reported_in_order(script: ClientScript, report: Callable[[ClientScript], Report]) -> None:
    found = report(script)
    assert list(found.findings) == script.check_names(), found.end
    assert found.end.startswith("exit status 0\n"), found.end
