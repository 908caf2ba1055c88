"""The suite over either gRPC transport: `pytest --grpc-transport h2` runs it over ours.

Strategy: it is the default of the option that changes, in this process and in those that tests start, so that
every test that opens a gRPC door and does not choose the transport itself goes through this one.
"""

from __future__ import annotations

import os

import pytest

from triglot.config import GRPC_TRANSPORTS, Config

VARIABLE = "TRIGLOT_GRPC_TRANSPORT"


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
