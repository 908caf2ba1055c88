"""Checks one connection periodically: keepalive, maximum age, and clients that do not read."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from triglot.transports.http2.core.frames import ErrorCode
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.roles import Connected
from triglot.transports.unsent import buffered

log = logging.getLogger(__name__)

LOOKS_PER_LIMIT = 4
LONGEST_SECONDS = 5.0
AGE_SPREAD = 0.1
"""Random spread of the maximum age, so that clients that connected together do not reconnect together."""
_STILL_THERE = b"triglot2"


class ConnectionTimers:
    """One timer per connection. `last_received`: when bytes were received last, in the loop's time."""

    def __init__(self, protocol: Connected, limits: Limits) -> None:
        self._protocol = protocol
        self._limits = limits
        self._loop = protocol.loop
        shortest = min(
            limits.greeting,
            limits.idle,
            limits.answer_to_ping,
            limits.stall,
            limits.max_age,
            limits.max_age_grace,
        )
        self._pause = min(LONGEST_SECONDS, shortest / LOOKS_PER_LIMIT)
        self._made = self.last_received = self._moved = self._waited = 0.0
        self._age = limits.max_age * random.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
        self._asked: float | None = None
        self._seen = (0, 0)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        """Start the checks on a new connection."""
        self._transport = transport
        self._made = self.last_received = self._moved = self._loop.time()
        self._timer = self._loop.call_later(self._pause, self._look)

    def stop(self) -> None:
        """Stop the checks on a closed connection."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def linger(self) -> None:
        """Close the socket after a while, in which the client may read our last frames, which have been
        written.
        """
        self._waited = self._loop.time()
        self._look_later(self._let_go, self._limits.linger / LOOKS_PER_LIMIT)

    def _look_later(self, look: Callable[[], None], seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, look)

    def _let_go(self) -> None:
        transport, now = self._transport, self._loop.time()
        assert transport is not None
        # A client that is still reading gets the time for it.
        if buffered(transport):
            self._waited = now
        if self._stalls(now):
            self._protocol.abort()
        elif now - self._waited < self._limits.linger:
            self._look_later(self._let_go, self._limits.linger / LOOKS_PER_LIMIT)
        elif transport.is_closing():
            self._protocol.abort()
        else:
            transport.close()  # TLS sends close_notify, and would wait long for the client's.
            self.linger()

    def _look(self) -> None:
        now = self._loop.time()
        limits, protocol = self._limits, self._protocol
        self._timer = self._loop.call_later(self._pause, self._look)
        if protocol.reading_paused:
            self.last_received = now  # Nothing is read, so a PING's reply would not be seen.
        for stream in protocol.connection.out.stalled(now, limits.stall, limits.least_taken):
            log.info("resetting a stream: its client read no response data for %.0f s", limits.stall)
            protocol.reset(stream, ErrorCode.ENHANCE_YOUR_CALM)
        if not protocol.connection.settled:
            if now - self._made >= limits.greeting:
                protocol.close(ErrorCode.SETTINGS_TIMEOUT, f"no SETTINGS in {limits.greeting:.0f} s")
        elif now - self._made >= self._age + limits.max_age_grace:
            protocol.close(text="the connection's maximum age and grace have passed")
        elif self._stalls(now):
            log.info("closing a connection: its client read no response data for %.0f s", limits.stall)
            protocol.close(ErrorCode.ENHANCE_YOUR_CALM, f"no response data was read for {limits.stall:.0f} s")
        elif now - self._made >= self._age and not protocol.draining:
            protocol.drain()
        elif self._asked is not None and self.last_received >= self._asked:  # uvloop's clock has milliseconds.
            self._asked = None
        elif self._asked is not None and now - self._asked >= limits.answer_to_ping:
            log.info("closing a connection: no reply to a keepalive PING")
            protocol.abort()
        elif self._asked is None and now - self.last_received >= limits.idle:
            self._asked = now
            protocol.connection.ping(_STILL_THERE)
            protocol.wake()

    def _stalls(self, now: float) -> bool:
        """Returns whether data is waiting for the socket, and none of it was sent for `limits.stall` seconds."""
        assert self._transport is not None
        out, waiting = self._protocol.connection.out, buffered(self._transport)
        seen = (out.moved, waiting)
        if seen != self._seen or not waiting:
            self._seen, self._moved = seen, now
        return now - self._moved >= self._limits.stall
