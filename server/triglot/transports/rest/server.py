"""The base class of the HTTP/1.1 servers for REST."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from triglot.config.options import Config
from triglot.transports.listening import Idle, IdleConnection, Listener, bind, listen_on, max_sockets
from triglot.transports.rest.calls import HttpCalls
from triglot.transports.rest.coroutines import CLEAN_UP_SECONDS
from triglot.transports.tls import Tls

RETIRE_SECONDS = 0.05
"""Seconds between two checks for open connections."""


class HttpServer(ABC):
    """Serves `calls` on one port. `start` binds; `stop` waits for calls.

    `bound`: the port's sockets, if another process has bound them. Raise `ConfigError` for a certificate that
    cannot be used.
    """

    def __init__(self, calls: HttpCalls, config: Config, *, bound: Sequence[socket.socket] = ()) -> None:
        self.calls = calls
        self.keep_alive = config.rest_keepalive_time
        """Seconds after which an idle connection is closed."""
        self._config, self._bound = config, bound
        self._tls = Tls(config, "http/1.1") if config.tls_certificate else None
        self._listener: Listener | None = None

    async def start(self, idle_of_other_port: Idle = tuple) -> int:
        """Bind and serve; returns the port. Raise `OSError` when the address cannot be bound.

        `idle_of_other_port`: see `Listener`.
        """
        config = self._config
        sockets = listen_on(self._bound) or await bind(config.host, config.rest_port, "REST")
        await self.set_up()
        port: int = sockets[0].getsockname()[1]
        self._listener = Listener(
            sockets,
            self.make,
            max_connections=max_sockets(config),
            tls=self._tls,
            idle=self.idle_connections,
            idle_of_other_port=idle_of_other_port,
        )
        self._listener.start()
        return port

    @abstractmethod
    async def set_up(self) -> None:
        """Prepare to serve connections; also without `start`, for connections that are passed to `protocol`."""

    @abstractmethod
    def make(self, remote: str) -> asyncio.Protocol:
        """Return the protocol of a new connection; `remote`: the client's address, "" where it has none."""

    @abstractmethod
    def protocol(self, remote: str) -> asyncio.Protocol | None:
        """Return the protocol of a connection accepted elsewhere; None once no more are served."""

    @abstractmethod
    def count_connections(self) -> int:
        """Return the number of open connections."""

    @abstractmethod
    def idle_connections(self) -> list[IdleConnection]:
        """Return the connections that wait for a request."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections; responses that were written are still sent."""

    def drain(self) -> None:
        """Have each connection closed with its next response, so that clients connect to another server."""
        self.calls.drain()

    async def retire(self, seconds: float) -> None:
        """Accept no more connections, because another process does; wait up to `seconds` for the open ones."""
        self.drain()
        await self._stop_listening()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.count_connections():  # noqa: ASYNC110 - not every server can notify of closed ones.
                    await asyncio.sleep(RETIRE_SECONDS)

    async def stop(self) -> None:
        """Reject new calls, wait for the others for the grace period, and end the rest with 503."""
        self.calls.refuse()
        await self._stop_listening()
        await self.calls.finish(self._config.grace)
        await self.close()

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.stop()
            await self._listener.settle(CLEAN_UP_SECONDS)
        for _ in range(3):
            await asyncio.sleep(0)  # Requests that have arrived on new connections are still answered.
