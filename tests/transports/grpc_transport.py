"""Which transport the tests go through: `pytest --grpc-transport aio`; without it, the server's default.

It is said as users say it, by environment variables: a server process that a test starts reads them itself, and
one in this process gets them by `transport_options`. With grpc.aio, aiohttp carries REST: two runs cover all four.
"""

from __future__ import annotations

import os
from typing import Any

import pytest

from triglot.config.options import GRPC_TRANSPORTS

VARIABLE = "TRIGLOT_GRPC_TRANSPORT"
HTTP_VARIABLE = "TRIGLOT_HTTP_TRANSPORT"
HTTP_TRANSPORT = {"aio": "aiohttp", "h2": "h1"}
"""What carries REST beside each."""


def transport_options(**options: Any) -> dict[str, Any]:
    """Options for a `triglot.Config`: these, and those of the chosen transport where they say nothing of it."""
    chosen = {"grpc_transport": os.environ.get(VARIABLE), "http_transport": os.environ.get(HTTP_VARIABLE)}
    return {name: value for name, value in chosen.items() if value} | options


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
