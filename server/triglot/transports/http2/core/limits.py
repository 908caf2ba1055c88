"""What the other side of a connection may do, and for how long it may do nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIB = 1024 * 1024
MOST_HEADER_BYTES = 16 * 1024
"""Of one request's fields, as HTTP/2 counts them (RFC 9113, 6.5.2): with more, the call is refused, as by grpc."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    max_streams: int = 1024
    max_frame: int = 4 * MIB
    stream_window: int = 2 * MIB
    """What is smaller comes without waiting for more room: an image of a MiB and what surrounds it, too."""
    first_window: int = 2 * MIB
    """Of a stream until something of its body has been taken, if that is less."""
    connection_window: int = 64 * MIB
    """Opened as soon as something comes: `Config.max_total_queue_bytes` bounds what calls hold."""
    max_header_block: int = 48 * 1024
    """Of one request, compressed or not: with more, the connection ends. A frame of it has to fit the buffer."""
    max_continuations: int = 16
    max_settings: int = 64
    """In one frame."""
    max_unsent: int = 256 * MIB
    """Of answers that the other side has not taken; with more, its new calls are refused."""
    max_unsent_in_all: int = 1024 * MIB
    """Of all connections: with more, calls on those are refused that have more unsent than is fair."""
    fair_unsent: int = MIB
    max_unread: int = 64 * 1024
    """Of what needs no window, statuses and acknowledgements, while the socket takes nothing.

    With more, nothing is read from the connection until its client has read them.
    """
    max_open_in_all: int = 512 * MIB
    """Memory that the open calls of all connections take, about, without their bodies.

    With more, calls on those connections are refused whose own take more than is fair.
    """
    fair_open: int = 384 * 1024
    """So that each of 1000 connections holds less than a MiB: this, its share of the above, and its own."""
    max_reset_running: int = 2048
    """Streams that were reset and whose handlers have not ended; with more, new streams are refused.

    Twice `max_streams`: who resets all streams may at once reset as many more, which it opens in their place.
    """
    abuse_budget: float = 1000.0
    """Frames that cost it nothing and us something, and that its streams do not explain; see `AbuseBudget`."""
    abuse_budget_per_second: float = 100.0
    most_earned: int = 16 * 1024
    """Frames that its streams and our answers explain and that it has not sent so far."""
    greeting: float = 10.0
    """Until its first SETTINGS are there."""
    idle: float = 120.0
    """Without a byte from it, until it is asked with a PING whether it is still there."""
    answer_to_ping: float = 20.0
    max_age: float = math.inf
    """After which it is asked to connect anew."""
    max_age_grace: float = math.inf
    """For what runs then."""
    stall: float = 120.0
    """In which it has to take something of what waits for it."""
    least_taken: int = 4 * 1024
    """Bytes of a stream's answer, if so many wait, that its client has to make room for in that time."""
    linger: float = 1.0
    """After our last word, for it to be read."""


DEFAULTS = Limits()
