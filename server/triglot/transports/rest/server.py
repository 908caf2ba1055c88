"""What serves REST over HTTP/1.1, whatever carries it."""

from __future__ import annotations

import asyncio
import socket
from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import suppress

from triglot.config.options import Config
from triglot.transports.listening import Listener, bind, most_sockets, take_over
from triglot.transports.rest.calls import CLEAN_UP_SECONDS, HttpCalls
from triglot.transports.tls import Tls

RETIRE_SECONDS = 0.05
"""Between two checks for connections that are left."""


class HttpServer(ABC):
    """Serves `calls` on one port. `start` binds; `stop` waits for calls.

    `bound`: the port's sockets, where somebody else has bound them. Raises `ConfigError` for a certificate that
    cannot be used.
    """

    def __init__(self, calls: HttpCalls, config: Config, *, bound: Sequence[socket.socket] = ()) -> None:
        self.calls = calls
        self._config, self._bound = config, bound
        self._tls = Tls(config, "http/1.1") if config.tls_certificate else None
        self._listener: Listener | None = None

    async def start(self) -> int:
        """Bind and serve; the port. Raises `OSError` when the address cannot be bound."""
        config = self._config
        sockets = take_over(self._bound) or await bind(config.host, config.rest_port, "REST")
        await self.set_up()
        port: int = sockets[0].getsockname()[1]
        self._listener = Listener(sockets, self.make, most=most_sockets(config), tls=self._tls)
        self._listener.start()
        return port

    @abstractmethod
    async def set_up(self) -> None:
        """Be ready for connections that somebody else accepts, and hands over to `protocol`."""

    @abstractmethod
    def make(self) -> asyncio.Protocol:
        """What serves one connection."""

    @abstractmethod
    def protocol(self) -> asyncio.Protocol | None:
        """What serves one connection; None when none is served any more."""

    @abstractmethod
    def count_connections(self) -> int:
        """Those that are open."""

    @abstractmethod
    async def close(self) -> None:
        """Close all connections; what has been answered is still sent."""

    def drain(self) -> None:
        """Have each connection closed with its next answer, so that clients go elsewhere."""
        self.calls.drain()

    async def retire(self, seconds: float) -> None:
        """Take no more connections, since another process does; wait for the others, `seconds` at most."""
        self.drain()
        await self._stop_listening()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.count_connections():  # noqa: ASYNC110 - not every kind knows of their ends.
                    await asyncio.sleep(RETIRE_SECONDS)

    async def stop(self) -> None:
        """Refuse new calls, wait for the others as long as the grace period, answer the rest with 503."""
        self.calls.refuse()
        await self._stop_listening()
        await self.calls.finish(self._config.grace)
        await self.close()

    async def _stop_listening(self) -> None:
        if self._listener is not None:
            self._listener.stop()
            await self._listener.settle(CLEAN_UP_SECONDS)
        for _ in range(3):
            await asyncio.sleep(0)  # What has come on new connections is still answered.
