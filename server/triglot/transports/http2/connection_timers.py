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

CHECKS_PER_LIMIT = 4
MAX_CHECK_SECONDS = 5.0
AGE_SPREAD = 0.1
"""Random spread of the maximum age, so that clients that connected together do not reconnect together."""
_KEEPALIVE = b"triglot2"


class ConnectionTimers:
    """One timer per connection. `last_received`: when bytes were received last, in the loop's time."""

    def __init__(self, protocol: Connected, limits: Limits) -> None:
        self._protocol = protocol
        self._limits = limits
        self._loop = protocol.loop
        shortest = min(
            limits.settings_timeout,
            limits.idle,
            limits.ping_timeout,
            limits.stall,
            limits.max_age,
            limits.max_age_grace,
        )
        self._interval = min(MAX_CHECK_SECONDS, shortest / CHECKS_PER_LIMIT)
        self._connected = self.last_received = self._progressed = self._lingers_since = 0.0
        self._age = limits.max_age * random.uniform(1 - AGE_SPREAD, 1 + AGE_SPREAD)
        self._pinged: float | None = None
        self._last_progress = (0, 0)
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None

    def start(self, transport: asyncio.Transport) -> None:
        """Start the checks on a new connection."""
        self._transport = transport
        self._connected = self.last_received = self._progressed = self._loop.time()
        self._timer = self._loop.call_later(self._interval, self._check)

    def stop(self) -> None:
        """Stop the checks on a closed connection."""
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()

    def linger(self) -> None:
        """Close the socket after a while, in which the client may read our last frames, which have been
        written.
        """
        self._lingers_since = self._loop.time()
        self._schedule(self._check_lingering, self._limits.linger / CHECKS_PER_LIMIT)

    def _schedule(self, check: Callable[[], None], seconds: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later(seconds, check)

    def _check_lingering(self) -> None:
        transport, now = self._transport, self._loop.time()
        assert transport is not None
        # A client that is still reading gets the time for it.
        if buffered(transport):
            self._lingers_since = now
        if self._is_stalled(now):
            self._protocol.abort()
        elif now - self._lingers_since < self._limits.linger:
            self._schedule(self._check_lingering, self._limits.linger / CHECKS_PER_LIMIT)
        elif transport.is_closing():
            self._protocol.abort()
        else:
            transport.close()  # TLS sends close_notify, and would wait long for the client's.
            self.linger()

    def _check(self) -> None:
        now = self._loop.time()
        limits, protocol = self._limits, self._protocol
        self._timer = self._loop.call_later(self._interval, self._check)
        if protocol.reading_paused:
            self.last_received = now  # Nothing is read, so a PING's reply would not be seen.
        for stream in protocol.connection.out.stalled(now, limits.stall, limits.min_read):
            log.info("resetting a stream: its client read no response data for %.0f s", limits.stall)
            protocol.reset(stream, ErrorCode.ENHANCE_YOUR_CALM)
        if not protocol.connection.settings_received:
            if now - self._connected >= limits.settings_timeout:
                protocol.close(ErrorCode.SETTINGS_TIMEOUT, f"no SETTINGS in {limits.settings_timeout:.0f} s")
        elif now - self._connected >= self._age + limits.max_age_grace:
            protocol.close(text="the connection's maximum age and grace have passed")
        elif self._is_stalled(now):
            log.info("closing a connection: its client read no response data for %.0f s", limits.stall)
            protocol.close(ErrorCode.ENHANCE_YOUR_CALM, f"no response data was read for {limits.stall:.0f} s")
        elif now - self._connected >= self._age and not protocol.draining:
            protocol.drain()
        elif self._pinged is not None and self.last_received >= self._pinged:  # uvloop's clock has milliseconds.
            self._pinged = None
        elif self._pinged is not None and now - self._pinged >= limits.ping_timeout:
            log.info("closing a connection: no reply to a keepalive PING")
            protocol.abort()
        elif self._pinged is None and now - self.last_received >= limits.idle:
            self._pinged = now
            protocol.connection.ping(_KEEPALIVE)
            protocol.schedule_write()

    def _is_stalled(self, now: float) -> bool:
        """Return whether data is waiting for the socket, and none of it was sent for `limits.stall` seconds."""
        assert self._transport is not None
        out, waiting = self._protocol.connection.out, buffered(self._transport)
        seen = (out.bytes_sent, waiting)
        if seen != self._last_progress or not waiting:
            self._last_progress, self._progressed = seen, now
        return now - self._progressed >= self._limits.stall
