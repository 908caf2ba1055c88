"""Pytest plugin: which transports the tests go over.

gRPC has two transports, and so has REST. All tests go over the default ones, and where the transport is in play,
over grpc.aio and aiohttp, too: these are tests of their own, `test[...over_aio...]`. With `--grpc-transport` all
go over one only.

It is said as users say it, by environment variables: a server process that a test starts reads them itself, and
one in this process gets them by `transport_options`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from fnmatch import fnmatch
from typing import Any

import pytest

from triglot.config.options import GRPC_TRANSPORTS

VARIABLE = "TRIGLOT_GRPC_TRANSPORT"
HTTP_VARIABLE = "TRIGLOT_HTTP_TRANSPORT"
HTTP_TRANSPORT = {"aio": "aiohttp", "h2": "h1"}
"""What carries REST beside each."""
OVER_AIO = (
    "tests/cases/*",
    "tests/protocols/test_kserve_grpc.py",
    "tests/protocols/test_kserve_http.py",
    "tests/protocols/test_kserve_load_meanwhile.py",
    "tests/protocols/test_kserve_stream_*.py",
    "tests/protocols/test_kserve_version_names.py",
    "tests/transports/*",
    *(
        f"tests/e2e/test_{name}.py"
        for name in (
            "cancelled_callers",
            "deadlines",
            "every_protocol",
            "foreign_clients",
            "grpc_standard",
            "grpcurl",
            "grps_streams",
            "overload",
            "released_requests",
            "request_ends",
            "request_states",
            "statistics_streams",
            "tensorflow_late",
        )
    ),
)
"""The files in which the transport is in play."""
NOT_OVER_AIO = (
    # They are about our own transports.
    "tests/transports/test_h2_*",
    "tests/transports/test_http1_*",
    # They name the transports that they go over, or go over none.
    *(
        f"tests/transports/test_{name}.py"
        for name in (
            "aio_bursts",
            "aio_failed_sends",
            "aio_requests",
            "aio_unary",
            "aio_unread",
            "call_endings",
            "call_leaks",
            "calls_by_layout",
            "certificates",
            "changes_finished",
            "failed_bodies",
            "growing",
            "grpc_alike",
            "grpc_compression",
            "grpc_transport",
            "http_ahead",
            "http_routes",
            "large_heads",
            "listening",
            "malformed_fields",
            "nodelay",
            "off_loop",
            "route_errors",
            "storms",
            "storms_recorded",
        )
    ),
    # They load and unload without a transport.
    "tests/transports/test_raised_by_models.py::test_exception_of_a_load_is_reported_and_the_next_model_loads",
    "tests/transports/test_raised_by_models.py::test_what_a_close_raises_ends_nothing",
    # The same calls go to Python models, and the transports do not know who answers.
    "tests/cases/test_tfserving_cases.py::test_saved_models",
    "tests/cases/test_tfserving_cases.py::test_estimators",
    "tests/e2e/test_every_protocol.py::test_a_saved_model",
)
"""Files and tests among them that go over the default transports only."""
_MARK = "over_aio"
_MARKED = re.compile(rf"::.*[\[-]{_MARK}[-\]]")
"""Matches it anywhere among a test's parameters: those of fixtures come before it."""


def transport_options(**options: Any) -> dict[str, Any]:
    """Options for a `triglot.Config`: these, and those of the chosen transport where they say nothing of it."""
    chosen = {"grpc_transport": os.environ.get(VARIABLE), "http_transport": os.environ.get(HTTP_VARIABLE)}
    return {name: value for name, value in chosen.items() if value} | options


def is_over_aio(node_id: str) -> bool:
    """Whether a test goes over grpc.aio beside one of the same name that goes over the default transport."""
    return _MARKED.search(node_id) is not None


def runs_over_both(node_id: str) -> bool:
    """Whether the transport is in play in a test, named without parameters, that does not choose one itself."""
    file = node_id.partition("::")[0]
    return any(fnmatch(file, pattern) for pattern in OVER_AIO) and not any(
        fnmatch(name, pattern) for pattern in NOT_OVER_AIO for name in (file, node_id)
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flag."""
    parser.addoption(
        "--grpc-transport", choices=GRPC_TRANSPORTS, help="what carries gRPC in tests that do not say"
    )


def pytest_configure(config: pytest.Config) -> None:
    """For the servers of this process, and of those that tests start."""
    chosen = config.getoption("--grpc-transport")
    if chosen is not None:
        os.environ[VARIABLE], os.environ[HTTP_VARIABLE] = chosen, HTTP_TRANSPORT[chosen]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make a test twice where the transport is in play, unless one was chosen."""
    if VARIABLE not in os.environ and runs_over_both(metafunc.definition.nodeid):
        metafunc.fixturenames.append(_MARK)
        metafunc.parametrize(_MARK, [False, True], ids=[pytest.HIDDEN_PARAM, _MARK])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Choose the transport for a test, with the setup and teardown of its fixtures."""
    with pytest.MonkeyPatch.context() as environment:
        if is_over_aio(item.nodeid):
            environment.setenv(VARIABLE, "aio")
            environment.setenv(HTTP_VARIABLE, HTTP_TRANSPORT["aio"])
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End all servers before the first test that goes over other transports."""
    if nextitem is not None and is_over_aio(nextitem.nodeid) != is_over_aio(item.nodeid):
        item.session._setupstate.teardown_exact(None)
