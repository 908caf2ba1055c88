"""The ports that workers share: the supervisor binds them without listening, and workers inherit the sockets."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from triglot.config.options import NO_PORT, Config
from triglot.dataplane.control import Bound
from triglot.transports.listening import bound_socket


@dataclass(frozen=True, slots=True)
class Ports:
    """Port numbers; `NO_PORT` for none. REST may share gRPC's port."""

    host: str
    grpc: int
    rest: int

    def bind(self) -> Bound:
        """Bind new sockets for a worker. Raise `OSError`."""
        rest = NO_PORT if self.rest == self.grpc else self.rest
        return Bound(_bind(self.host, self.grpc), _bind(self.host, rest))


def reserve(config: Config) -> tuple[Ports, Bound]:
    """Return ports that no other process uses, free ones for configured zeros, and the sockets that reserve them.

    Raise `OSError`.
    """
    rest_port = NO_PORT if config.rest_with_grpc else config.rest_port
    for port in (config.grpc_port, rest_port):
        _close(_bind(config.host, port, shared=False))
    grpc = _bind(config.host, config.grpc_port)
    try:
        held = Bound(grpc, _bind(config.host, rest_port))
    except OSError:
        _close(grpc)
        raise
    grpc_port = _number(held.grpc)
    return Ports(config.host, grpc_port, grpc_port if config.rest_with_grpc else _number(held.rest)), held


def _number(sockets: list[socket.socket]) -> int:
    return int(sockets[0].getsockname()[1]) if sockets else NO_PORT


def _bind(host: str, port: int, *, shared: bool = True) -> list[socket.socket]:
    if port == NO_PORT:
        return []
    bound: list[socket.socket] = []
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, _, _, _, address in dict.fromkeys(found):
            bound.append(bound_socket(family, (address[0], port, *address[2:]), shared=shared))
            port = bound[0].getsockname()[1]
    except OSError as error:
        _close(bound)
        raise OSError(
            f"cannot listen on {host} port {port}: {error.strerror}; choose another host or other ports "
            "(0: any free one)"
        ) from None
    return bound


def _close(sockets: list[socket.socket]) -> None:
    for bound in sockets:
        bound.close()
