"""Entry point of Ray's driver: checks that the cluster is reachable before it imports Ray, which takes seconds."""

from __future__ import annotations

import json
import socket
import sys

REACHABLE_SECONDS = 5.0
"""Timeout of the test connection to the cluster, in seconds."""


def main() -> None:
    """Run the driver, with the arguments SOCKET ADDRESS."""
    server = socket.socket(fileno=int(sys.argv[1]))
    address = sys.argv[2]
    try:
        _check_reachable(address)
        from triglot.executors.ray import driver  # noqa: PLC0415 - see above.

        driver.run(server, address)
    except OSError as error:
        event = {"failed": f"cannot connect to the Ray cluster at {address!r}: {error}"}
        server.sendall(json.dumps(event).encode() + b"\n")


def _check_reachable(address: str) -> None:
    """Raise `OSError` when nothing listens at `address`: Ray itself would retry for minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal() and "/" not in host:
        socket.create_connection((host.strip("[]"), int(port)), REACHABLE_SECONDS).close()
