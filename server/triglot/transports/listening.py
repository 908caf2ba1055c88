"""The sockets of a host and a port, and the connections that come there.

Strategy: connections are accepted here, and not by asyncio's servers: one too many is closed before anything is
spent on it, TLS takes the certificate of the day, and what has come already when the server stops is still served.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import stat
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakSet

from triglot.config.options import NO_PORT, Config
from triglot.transports.tls import Tls

log = logging.getLogger(__name__)

BACKLOG = 1024
ACCEPTED_AT_ONCE = 64
"""So many connections, and others have their turn."""
RETRY_SECONDS = 0.5
"""Until it is tried again, when the system has no more files, for example."""
SPARE_FILES = 100
"""Of the process's files, those that are not for clients: of models, their processes, logs and telemetry."""
LISTENERS = 3
"""At most: gRPC's port, REST's and a Unix socket."""
GREETING_SECONDS = 10.0
"""For TLS to agree on its keys."""
GOODBYE_SECONDS = 60.0
"""For the other side of TLS to take the rest of its answer, and say that it has understood the end."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Sockets that somebody else has bound, for each address of the host one; others may have the ports, too."""

    grpc: list[socket.socket]
    rest: list[socket.socket]

    def close(self) -> None:
        """In this process. What waits to be accepted is lost when no other has them."""
        for one in (*self.grpc, *self.rest):
            one.close()


async def bind(host: str, port: int, name: str = "gRPC", *, shared: bool = False) -> list[socket.socket]:
    """One for each address of the host, all on one port; 0: any free one. Raises `OSError`.

    `shared`: other processes may listen there, too, and the system spreads connections over them.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            bound.append(bound_socket(family, (address[0], port, *address[2:]), shared=shared))
            port = bound[0].getsockname()[1]
        for one in bound:
            one.listen(BACKLOG)
    except OSError as error:
        for one in bound:
            one.close()
        raise OSError(error.errno, f"cannot bind {name} to {host} port {port}: {error.strerror}") from None
    return bound


def bound_socket(family: int, address: tuple[object, ...], *, shared: bool) -> socket.socket:
    """One that does not listen yet. `shared` as of `bind`. Raises `OSError`."""
    # A second server on a used port is an error, not half of the calls, unless it is meant.
    # That it is TCP is said: asyncio sets TCP_NODELAY for no other, and without it the end of an answer waits for
    # the client's delayed acknowledgement, some 40 ms.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # The wildcard is for both; any other address is its own.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        made.bind(address)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def take_over(bound: Sequence[socket.socket]) -> list[socket.socket]:
    """Sockets that another process has bound, for this one and perhaps others; from now on connections come."""
    for one in bound:
        one.setblocking(False)
        one.listen(BACKLOG)
    return list(bound)


def bind_file(path: Path) -> socket.socket:
    """A Unix socket; what a server that was killed left there is replaced. Raises `OSError`."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            path.unlink()
        made.bind(str(path))
        made.listen(BACKLOG)
        made.setblocking(False)
    except OSError as error:
        made.close()
        raise OSError(f"cannot bind gRPC to {path}: {error.strerror or error}") from None
    return made


class Listener:
    """Accepts connections on sockets, from `start` on. On the loop.

    `make` gives each its protocol. `most`: so many may be open. `tls` is for all but Unix sockets.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        make: Callable[[], asyncio.BaseProtocol],
        *,
        most: int,
        tls: Tls | None = None,
        greeting: float = GREETING_SECONDS,
    ) -> None:
        self._sockets = sockets
        self._make = make
        self._most = most
        self._tls = tls
        self._greeting = greeting
        self._loop = asyncio.get_running_loop()
        self._making: set[asyncio.Task[Any]] = set()
        self._accepted: WeakSet[socket.socket] = WeakSet()
        """Those that are open, and some that are not, which somebody keeps."""
        self._is_full = False

    def start(self) -> None:
        """Take connections."""
        for one in self._sockets:
            self._loop.add_reader(one.fileno(), self._accept, one)

    def stop(self) -> None:
        """Take those that have come already, and no more."""
        for one in self._sockets:
            self._loop.remove_reader(one.fileno())
            while self._accept(one):
                pass
            one.close()
        self._sockets = []

    async def settle(self, seconds: float) -> None:
        """Wait for connections that have been accepted to be made; those that take longer are let go."""
        if self._making:
            await asyncio.wait(self._making, timeout=seconds)
        for task in self._making:
            task.cancel()

    def _accept(self, listening: socket.socket) -> bool:
        """Take what waits, or a part of it; whether there may be more."""
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                self._pause(listening, error)
                return False
            self._take(accepted, peer)
        return True

    def _take(self, accepted: socket.socket, peer: object) -> None:
        if not self._has_room():
            accepted.close()
            if not self._is_full:
                self._is_full = True
                log.warning(
                    "%d connections are open, the most allowed: further ones are closed at once", self._most
                )
            return
        self._is_full = False
        self._accepted.add(accepted)
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            with suppress(OSError):  # Its client has left.
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(accepted, peer))
        self._making.add(task)
        task.add_done_callback(self._making.discard)

    def _has_room(self) -> bool:
        if len(self._accepted) < self._most:
            return True
        return sum(one.fileno() >= 0 for one in self._accepted) < self._most

    async def _connect(self, accepted: socket.socket, peer: object) -> None:
        secured: dict[str, Any] = {}
        if self._tls is not None and accepted.family != socket.AF_UNIX:
            secured = {
                "ssl": self._tls.context(),
                "ssl_handshake_timeout": self._greeting,
                "ssl_shutdown_timeout": GOODBYE_SECONDS,
            }
        try:
            await self._loop.connect_accepted_socket(self._make, accepted, **secured)
        except (OSError, ssl.CertificateError) as error:
            log.info("cannot set up the connection of %s: %s", peer, error if str(error) else type(error).__name__)

    def _pause(self, listening: socket.socket, error: OSError) -> None:
        log.warning("accepting no connections for %.1f s: %s", RETRY_SECONDS, error.strerror)
        self._loop.remove_reader(listening.fileno())
        self._loop.call_later(RETRY_SECONDS, self._resume, listening)

    def _resume(self, listening: socket.socket) -> None:
        if listening in self._sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)


def most_sockets(config: Config) -> int:
    """Connections that each listener may have: `max_sockets`, or its part of the files that are for clients.

    Connections to one port cannot take the files of another, and all of them together leave `SPARE_FILES`.
    """
    listeners = (config.grpc_port != NO_PORT) + bool(config.grpc_socket)
    listeners += config.rest_port != NO_PORT and not config.rest_with_grpc
    return min(config.max_sockets, max(1, _files_for_clients() // max(1, listeners)))


def raise_file_limit(config: Config) -> None:
    """Have the system allow this process as many files as its listeners may take, or as many as it can."""
    if sys.platform == "win32":
        return
    import resource  # noqa: PLC0415 - not for Windows.

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LISTENERS * config.max_sockets + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # A container may forbid it.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _files_for_clients() -> int:
    if sys.platform == "win32":
        return 2**31
    import resource  # noqa: PLC0415 - not for Windows.

    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else max(soft // 2, soft - SPARE_FILES)
