"""Limits on what a client may do on a connection, and for how long it may be silent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

MIB: Final = 1024 * 1024
MAX_HEADER_BYTES: Final = 16 * 1024
"""Limit on a gRPC call's fields, as HTTP/2 counts them (RFC 9113, 6.5.2).

Above it, the call is rejected, as by grpc.
"""
MAX_FIELDS_BYTES: Final = 132 * 1024
"""Fields that any request may have, counted likewise: REST's may be as large as over HTTP/1.1."""
MAX_FIELDS: Final = 512
"""The same in fields: of 32 bytes and more each, they exceed `MAX_HEADER_BYTES`."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on a connection; sizes in bytes, times in seconds."""

    max_streams: int = 1024
    max_frame: int = 4 * MIB
    stream_window: int = 2 * MIB
    """Smaller bodies arrive without waiting for WINDOW_UPDATE, such as an image of 1 MiB with its framing."""
    first_window: int = 2 * MIB
    """Initial window of a stream, until some of its body has been consumed, if less than `stream_window`."""
    connection_window: int = 64 * MIB
    """Opened as soon as data arrives: `Config.max_total_queue_bytes` bounds what calls hold."""
    max_header_block: int = 4 * MIB
    """Limit on a compressed header block; above it, the connection ends.

    What exceeds the limits of requests is discarded as it arrives, and only that request is rejected.
    """
    max_continuations: int = 512
    """The same in frames, whose smallest size is 16 KiB."""
    max_header_list: int = MAX_HEADER_BYTES
    """Advice to clients: the largest fields of a request, as HTTP/2 counts them."""
    max_control_frame: int = 48 * 1024
    """Limit on frames without data or fields; they have to fit into the receive buffer."""
    max_settings: int = 64
    """Settings in one frame."""
    max_unsent: int = 256 * MIB
    """Limit on responses that the client has not read; above it, its new calls are rejected."""
    max_unsent_in_all: int = 1024 * MIB
    """The same for all connections; above it, calls are rejected on those with more than `fair_unsent`."""
    fair_unsent: int = MIB
    max_unread: int = 64 * 1024
    """Limit on statuses, acknowledgements and other frames without flow control, while the socket's buffer is
    full.

    Above it, nothing is read from the connection until the client has read them.
    """
    max_open_in_all: int = 512 * MIB
    """Approximate limit on the memory of open calls of all connections, without their bodies.

    Above it, connections with more than `fair_open` get their new calls rejected.
    """
    fair_open: int = 384 * 1024
    """Keeps each of 1000 connections below 1 MiB: this, its share of `max_open_in_all`, and its own memory."""
    max_reset_running: int = 2048
    """Limit on reset streams whose handlers have not ended; above it, new streams are refused.

    Twice `max_streams`: a client that resets all of its streams may reset as many again, opened in their place.
    """
    abuse_budget: float = 1000.0
    """Frames that cost the server work, and that the client's streams do not account for; see `AbuseBudget`."""
    abuse_budget_per_second: float = 100.0
    max_earned: int = 16 * 1024
    """Limit on frames that the client's streams and our responses account for, and that it has not sent yet."""
    settings_timeout: float = 10.0
    """Time for the client's first SETTINGS to arrive."""
    idle: float = 120.0
    """Time without a byte received, after which a keepalive PING is sent."""
    ping_timeout: float = 20.0
    max_age: float = math.inf
    """Age at which the connection is drained, so that the client connects again."""
    max_age_grace: float = math.inf
    """Time for running calls after that."""
    stall: float = 120.0
    """Time within which the client has to read some of the data that waits for it."""
    min_read: int = 4 * 1024
    """Bytes of a stream's response for which the client has to open the window in that time."""
    linger: float = 1.0
    """Time after our last frame for the client to read it, before the socket is closed."""


DEFAULTS: Final = Limits()
