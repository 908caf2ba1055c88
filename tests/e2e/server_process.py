"""Runs a server as a process, of what its arguments name."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from types import TracebackType

from tests.process import Triglot

QUICK = {
    "TRIGLOT_HOST": "127.0.0.1",
    "TRIGLOT_GRPC_PORT": "0",
    "TRIGLOT_REST_PORT": "0",
    "TRIGLOT_DRAIN_DELAY": "0",
    "TRIGLOT_LOAD_RETRIES": "0",
}
"""Environment variables for free ports, shutdown without a delay, and a single attempt to load each model."""


class ServerProcess(Triglot):
    """A running `triglot serve` on free ports, or another command.

    At the end of the `with` block it is sent SIGTERM, and must end with status 0 and no unexpected traceback.
    """

    def __init__(self, *arguments: str, command: str = "serve", python: str | Path = sys.executable) -> None:
        super().__init__(*arguments, command=command, environment=QUICK, python=python)
        self.grpc_address = ""
        self.rest_address = ""

    def __enter__(self) -> ServerProcess:
        try:
            grpc_port, rest_port = self.ports()
        except BaseException as error:
            super().__exit__(type(error), error, None)
            raise
        self.grpc_address, self.rest_address = f"127.0.0.1:{grpc_port}", f"127.0.0.1:{rest_port}"
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.signal(signal.SIGTERM)
            status = self.wait()
        finally:
            super().__exit__(kind, error, trace)
        log = self.stderr.text()
        assert status == 0, f"the server ended with status {status}:\n{log}"
        # Tracebacks of a model's own code are expected.
        traced = [line for line in re.findall("(.*)\nTraceback", log) if " could not be loaded: " not in line]
        assert not traced, log
