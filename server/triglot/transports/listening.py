"""Listening sockets, and the connections that are accepted on them.

Strategy: connections are accepted here, and not by asyncio's servers, so that one above the limit is closed
before it costs anything, TLS uses the current certificate, and connections that were made before the server
stops are served.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakSet

from triglot.config.options import NO_PORT, Config
from triglot.transports.tls import Tls

log = logging.getLogger(__name__)

BACKLOG = 1024
MAX_ACCEPTED_IN_A_ROW = 64
"""Connections accepted in a row, after which other tasks get a turn."""
RETRY_SECONDS = 0.5
"""Pause after an error of accept(), when the system has no more file descriptors, for example."""
ROOM_SECONDS = 0.01
"""Pause after a connection above the limit, in which those that make room for it are being closed."""
SPARE_FILES = 100
"""File descriptors that are not for clients: of models, their processes, logs and telemetry."""
LISTENERS = 3
"""Most listeners of a server: gRPC's port, REST's, and a Unix socket."""
TLS_HANDSHAKE_SECONDS = 10.0
"""Limit on the TLS handshake."""
TLS_SHUTDOWN_SECONDS = 60.0
"""Limit on the TLS shutdown: for the client to read the rest of its response and reply to close_notify."""


async def bind(host: str, port: int, name: str = "gRPC", *, shared: bool = False) -> list[socket.socket]:
    """Return listening sockets for each address of the host, on one port; 0: any free one. Raise `OSError`.

    `shared`: other processes may listen on the port too, and the system distributes connections.
    """
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    bound: list[socket.socket] = []
    try:
        for family, _, _, _, address in dict.fromkeys(found):
            bound.append(bound_socket(family, (address[0], port, *address[2:]), shared=shared))
            port = bound[0].getsockname()[1]
        for listening in bound:
            listening.listen(BACKLOG)
    except OSError as error:
        for listening in bound:
            listening.close()
        raise OSError(error.errno, f"cannot bind {name} to {host} port {port}: {error.strerror}") from None
    return bound


def bound_socket(family: int, address: tuple[object, ...], *, shared: bool) -> socket.socket:
    """Return a bound socket that does not listen yet. `shared`: see `bind`. Raise `OSError`."""
    # A second server on a used port must be an error, and not get half of the calls, unless `shared`.
    # The protocol is given explicitly: asyncio sets TCP_NODELAY only for TCP, and without it the end of a response
    # waits for the client's delayed acknowledgement, some 40 ms.
    made = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        if family == socket.AF_INET6:
            # The IPv6 wildcard address covers IPv4 too; any other address does not.
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, int(address[0] != "::"))
        made.bind(address)
        made.setblocking(False)
    except OSError:
        made.close()
        raise
    return made


def listen_on(bound: Sequence[socket.socket]) -> list[socket.socket]:
    """Listen on sockets that another process has bound, for this one and maybe others; returns them."""
    for bound_socket in bound:
        bound_socket.setblocking(False)
        bound_socket.listen(BACKLOG)
    return list(bound)


def bind_file(path: Path) -> socket.socket:
    """Return a listening Unix socket; replaces one left behind by a killed server. Raise `OSError`."""
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


class IdleConnection(Protocol):
    """A connection that waits for a request."""

    @property
    def is_used(self) -> bool:
        """Whether it has had one."""

    @property
    def idle_since(self) -> float:
        """When its wait began, in the loop's time."""

    def close_idle(self) -> None:
        """Close the connection. A client that begins a call meanwhile knows that the call did not run."""


Idle = Callable[[], Iterable[IdleConnection]]


class Listener:
    """Accepts connections on sockets. On the event loop.

    `make` creates the protocol of each connection. `max_connections`: limit on open ones. `tls` applies to all
    sockets but Unix sockets. `handshake_seconds`: time limit on the TLS handshake. `idle` returns the listener's
    connections that make room at that limit; `idle_of_other_port` those of other listeners, which make
    room, too, when the process can open no more files.
    """

    def __init__(
        self,
        sockets: list[socket.socket],
        make: Callable[[str], asyncio.BaseProtocol],
        *,
        max_connections: int,
        tls: Tls | None = None,
        handshake_seconds: float = TLS_HANDSHAKE_SECONDS,
        idle: Idle = tuple,
        idle_of_other_port: Idle = tuple,
    ) -> None:
        self._sockets = sockets
        self._make = make
        self._max_connections = max_connections
        self._tls = tls
        self._handshake_seconds = handshake_seconds
        self._idle = idle
        self._idle_of_other_port = idle_of_other_port
        self._looked = -math.inf
        """When no idle connection was found, in the loop's time."""
        self._loop = asyncio.get_running_loop()
        self._connecting: set[asyncio.Task[Any]] = set()
        self._accepted: WeakSet[socket.socket] = WeakSet()
        """Accepted sockets, closed ones included as long as something refers to them."""
        self._is_full = False

    def start(self) -> None:
        """Start accepting connections."""
        for listening in self._sockets:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def stop(self) -> None:
        """Accept the connections that have been made already, and close the sockets."""
        for listening in self._sockets:
            self._loop.remove_reader(listening.fileno())
            while self._accept(listening):
                pass
            listening.close()
        self._sockets = []

    async def settle(self, seconds: float) -> None:
        """Wait up to `seconds` for accepted connections to be set up; those that take longer are dropped."""
        if self._connecting:
            await asyncio.wait(self._connecting, timeout=seconds)
        for task in self._connecting:
            task.cancel()

    def _accept(self, listening: socket.socket) -> bool:
        """Accept waiting connections, up to a limit; returns whether there may be more."""
        for _ in range(MAX_ACCEPTED_IN_A_ROW):
            try:
                accepted, peer = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return False
            except OSError as error:
                self._fail(listening, error)
                return False
            if not self._has_room() and self._make_room(self._idle):
                self._connect_soon(accepted, peer)
                # Before the next one, those that are closed have to give their descriptors back.
                self._pause(listening, ROOM_SECONDS, self._loop.time() + RETRY_SECONDS)
                return True
            self._take(accepted, peer)
        return True

    def _take(self, accepted: socket.socket, peer: object) -> None:
        if not self._has_room():
            accepted.close()
            if not self._is_full:
                self._is_full = True
                log.warning(
                    "%d connections are open, the most allowed: further ones are closed at once",
                    self._max_connections,
                )
            return
        self._is_full = False
        self._connect_soon(accepted, peer)

    def _connect_soon(self, accepted: socket.socket, peer: object) -> None:
        self._accepted.add(accepted)
        accepted.setblocking(False)
        if accepted.family != socket.AF_UNIX:
            with suppress(OSError):  # The client has disconnected.
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        task = self._loop.create_task(self._connect(accepted, peer))
        self._connecting.add(task)
        task.add_done_callback(self._connecting.discard)

    def _has_room(self, more: int = 1) -> bool:
        if len(self._accepted) + more <= self._max_connections:
            return True
        return sum(accepted.fileno() >= 0 for accepted in self._accepted) + more <= self._max_connections

    def _make_room(self, *idle: Idle) -> bool:
        """Close some idle connections; several at a time, because looking for them takes a while.

        First those that never had a request, then those that have waited longest.
        """
        now = self._loop.time()
        if now - self._looked < RETRY_SECONDS:
            return False
        # Those that are being set up are not known to be idle yet: meanwhile, only unused ones are closed.
        found = [
            connection for these in idle for connection in these() if not (self._connecting and connection.is_used)
        ]
        found.sort(key=attrgetter("is_used", "idle_since"))
        closing = found[: max(1, self._max_connections // 50)]
        for connection in closing:
            connection.close_idle()
        if closing:
            log.info("closed %d idle connections to make room for others", len(closing))
        else:
            self._looked = now
        return bool(closing)

    async def _connect(self, accepted: socket.socket, peer: object) -> None:
        secured: dict[str, Any] = {}
        if self._tls is not None and accepted.family != socket.AF_UNIX:
            secured = {
                "ssl": self._tls.context(),
                "ssl_handshake_timeout": self._handshake_seconds,
                "ssl_shutdown_timeout": TLS_SHUTDOWN_SECONDS,
            }
        try:
            # Of accept: the system forgets the address of a client that has reset the connection.
            remote = str(peer[0] if isinstance(peer, tuple) else peer or "")
            await self._loop.connect_accepted_socket(partial(self._make, remote), accepted, **secured)
        except (OSError, ssl.CertificateError) as error:
            log.info("cannot set up the connection of %s: %s", peer, error if str(error) else type(error).__name__)

    def _fail(self, listening: socket.socket, error: OSError) -> None:
        """Pause after an error of accept(), which a lack of descriptors usually is."""
        self._make_room(self._idle, self._idle_of_other_port)
        log.warning("accepting no connections for %.1f s: %s", RETRY_SECONDS, error.strerror)
        self._pause(listening, RETRY_SECONDS)

    def _pause(self, listening: socket.socket, seconds: float, until: float = 0.0) -> None:
        """Accept nothing for some seconds; longer, until that time of the loop, while there are too many."""
        self._loop.remove_reader(listening.fileno())
        self._loop.call_later(seconds, self._resume, listening, seconds, until)

    def _resume(self, listening: socket.socket, seconds: float, until: float) -> None:
        if listening not in self._sockets:
            return
        if self._loop.time() < until and not self._has_room(0):
            self._pause(listening, seconds, until)
        else:
            self._loop.add_reader(listening.fileno(), self._accept, listening)


def max_sockets(config: Config) -> int:
    """Return the limit on connections per listener: `max_sockets`, or a share of the clients' file descriptors.

    Connections to one port cannot use up those of another, and all together leave `SPARE_FILES`.
    """
    listeners = (config.grpc_port != NO_PORT) + bool(config.grpc_socket)
    listeners += config.rest_port != NO_PORT and not config.rest_with_grpc
    return min(config.max_sockets, max(1, _files_for_clients() // max(1, listeners)))


def raise_file_limit(config: Config) -> None:
    """Raise the limit on file descriptors to what the listeners may need, as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = LISTENERS * config.max_sockets + SPARE_FILES
    if hard != resource.RLIM_INFINITY:
        wanted = min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):  # A container may forbid it.
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _files_for_clients() -> int:
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 2**31 if soft == resource.RLIM_INFINITY else max(soft // 2, soft - SPARE_FILES)
