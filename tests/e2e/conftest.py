"""One server with the embedded demo models for all end-to-end tests, and one run of each client script."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from client_scripts import ClientScript, Report
from server_process import ServerProcess


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """The server, ready."""
    with ServerProcess() as process:
        yield process


@pytest.fixture(scope="session")
def report(server: ServerProcess) -> Callable[[ClientScript], Report]:
    """What a client script found; it runs when it is first asked for."""
    reports: dict[ClientScript, Report] = {}

    def report_of(script: ClientScript) -> Report:
        if script not in reports:
            reports[script] = script.run(server)
        return reports[script]

    return report_of
