"""What the other side of a connection may do, and for how long it may do nothing."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes in bytes, times in seconds."""

    max_streams: int = 1024
    max_frame: int = MIB
    stream_window: int = MIB
    connection_window: int = 16 * MIB
    max_header_block: int = 64 * 1024
    """Of one request, compressed or not."""
    max_continuations: int = 16
    max_settings: int = 64
    """In one frame."""
    max_unsent: int = 256 * MIB
    """Of answers that the other side has not taken; with more, its new calls are refused."""
    max_unread: int = 8 * MIB
    """Of what needs no window, statuses and acknowledgements, while the socket takes nothing.

    Who keeps to `max_streams` as it reads them has no more than so many statuses to read.
    """
    patience: float = 1000.0
    """How often it may do what costs it nothing and us something; see `Patience`."""
    patience_per_second: float = 100.0
    greeting: float = 10.0
    """Until its first SETTINGS are there."""
    idle: float = 120.0
    """Without a byte from it, until it is asked with a PING whether it is still there."""
    answer_to_ping: float = 20.0
    stall: float = 120.0
    """For which it may take nothing of what waits for it."""
    linger: float = 1.0
    """After our last word, for it to be read."""


DEFAULTS = Limits()
