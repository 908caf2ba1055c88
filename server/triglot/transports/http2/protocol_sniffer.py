"""Detects the protocol of a new connection: HTTP/2 with gRPC, or HTTP/1.1 with REST, both on one port.

Strategy: with TLS, client and server have agreed on it (ALPN). Without, the first bytes tell: no HTTP/1.1
request begins with HTTP/2's preface. The connection is then passed to that protocol, with the bytes that were
received.
"""

from __future__ import annotations

import asyncio
from typing import cast

from triglot.transports.http2.core.frames import PREFACE
from triglot.transports.http2.protocol import LAST_STREAM_SECONDS, BusyPoll, H2Protocol
from triglot.transports.http2.roles import Serving
from triglot.transports.rest.server import HttpServer

HTTP2, HTTP1 = "h2", "http/1.1"
"""ALPN protocol names."""


class ProtocolSniffer(asyncio.Protocol):
    """A connection whose protocol is not known yet."""

    def __init__(self, server: Serving, busy_poll: BusyPoll, rest: HttpServer | None, remote: str) -> None:
        self.loop = asyncio.get_running_loop()
        self.closed = self.loop.create_future()
        """Done once the connection was passed on, or closed."""
        self._server = server
        self._busy_poll = busy_poll
        self._rest = rest
        self._remote = remote
        self._first = b""
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.is_used = False
        self.idle_since = self.loop.time()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's is not a subclass.
        secured = transport.get_extra_info("ssl_object")
        if secured is None and self._rest is not None:
            self._server.sniffers.add(self)
            self._wait(LAST_STREAM_SECONDS if self._server.stopping else self._server.limits.settings_timeout)
        elif secured is None or secured.selected_alpn_protocol() == HTTP2:
            self._pass_to(H2Protocol(self._server, self._busy_poll, self._remote))
        else:
            # gRPC over TLS requires ALPN's h2; all other clients speak HTTP/1.1.
            self._pass_to_rest()

    def data_received(self, data: bytes) -> None:
        self._first += data
        count = min(len(self._first), len(PREFACE))
        if self._first[:count] != PREFACE[:count]:
            self._pass_to_rest()
        elif count == len(PREFACE):
            self._pass_to(H2Protocol(self._server, self._busy_poll, self._remote))

    def connection_lost(self, error: Exception | None) -> None:
        self._detach()

    def shorten_wait(self) -> None:
        """Shorten the wait for the first bytes, because the server stops; bytes already sent are still served."""
        self._wait(LAST_STREAM_SECONDS)

    def close_idle(self) -> None:
        """See `IdleConnection`."""
        self.abort()

    def abort(self) -> None:
        """Close the socket."""
        if self._transport is not None:
            self._transport.abort()

    def _wait(self, seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(seconds, self.abort)

    def _detach(self) -> None:
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self._server.sniffers.discard(self)
        if not self.closed.done():
            self.closed.set_result(None)

    def _pass_to_rest(self) -> None:
        rest = None if self._rest is None else self._rest.protocol(self._remote)
        if rest is None:
            self.abort()
        else:
            self._pass_to(rest)

    def _pass_to(self, protocol: asyncio.Protocol | H2Protocol) -> None:
        transport, first = self._transport, self._first
        assert transport is not None
        self._detach()
        # uvloop decides when reading starts whether it reads into a protocol's own buffer.
        transport.pause_reading()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        if isinstance(protocol, asyncio.BufferedProtocol):
            while first and not transport.is_closing():
                room = protocol.get_buffer(len(first))
                count = min(len(room), len(first))
                room[:count] = first[:count]
                first = first[count:]
                protocol.buffer_updated(count)
        elif first:
            protocol.data_received(first)
        if not transport.is_closing():
            transport.resume_reading()
