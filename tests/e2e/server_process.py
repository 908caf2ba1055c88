"""A server as a process: of the embedded demo models, or of whatever its arguments name."""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path
from types import TracebackType

from process import Triglot

QUICK = {
    "TRIGLOT_HOST": "127.0.0.1",
    "TRIGLOT_GRPC_PORT": "0",
    "TRIGLOT_REST_PORT": "0",
    "TRIGLOT_DRAIN_DELAY": "0",
    "TRIGLOT_LOAD_RETRIES": "0",
}
"""Free ports, an end without a delay, and one try of each load."""


class ServerProcess(Triglot):
    """`triglot serve` on free ports, or another command.

    Leaving the `with` block sends SIGTERM, and expects a clean end.
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
        # But for those of a model's own code.
        traced = [line for line in re.findall("(.*)\nTraceback", log) if " could not be loaded: " not in line]
        assert not traced, log
