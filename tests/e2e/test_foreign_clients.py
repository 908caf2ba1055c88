"""Unmodified client packages, each in an environment of its own, against a server process: one test per check."""

from __future__ import annotations

import pytest

from tests.e2e.client_scripts import ClientScript, script_tests

pytestmark = pytest.mark.both_transports

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


test_check, test_every_check_is_reported_in_order = script_tests(*SCRIPTS)
