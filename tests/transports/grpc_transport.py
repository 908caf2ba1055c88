"""The suite over either transport: `pytest --grpc-transport h2` runs it over ours, and aio over libraries.

Strategy: it is the defaults of options that change, in this process and in those that tests start, so that every
test that opens a port and does not choose the transport itself goes through this one. With grpc.aio, aiohttp
carries REST: two runs cover all four.
"""

from __future__ import annotations

import os

import pytest

from triglot.config.options import GRPC_TRANSPORTS, Config

VARIABLE = "TRIGLOT_GRPC_TRANSPORT"
HTTP_VARIABLE = "TRIGLOT_HTTP_TRANSPORT"
HTTP_TRANSPORT = {"aio": "aiohttp", "h2": "h1"}
"""What carries REST beside each."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """The flag."""
    parser.addoption(
        "--grpc-transport", choices=GRPC_TRANSPORTS, help="what carries gRPC in tests that do not say"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Change the default."""
    chosen = config.getoption("--grpc-transport") or os.environ.get(VARIABLE)
    if chosen is not None:
        defaults = Config.__init__.__kwdefaults__
        assert defaults is not None
        defaults["grpc_transport"] = chosen
        os.environ[VARIABLE] = chosen
        defaults["http_transport"] = os.environ[HTTP_VARIABLE] = HTTP_TRANSPORT[chosen]
