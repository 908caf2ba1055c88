"""Reads request bodies, with limits on their size and on how slowly they may arrive."""

from __future__ import annotations

import asyncio

from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.transports.growing import GrowingBytes
from triglot.transports.request_bytes import Reservation
from triglot.transports.rest.exchange import RequestBody
from triglot.transports.text_room import CHECK_SECONDS, MIN_PROGRESS, Place

IDLE_SECONDS = 120.0
"""Seconds without a byte after which reading is given up.

The same as HTTP/2's limit for clients that do not read.
"""
GRACE_SECONDS = 30.0
MIN_RATE = 240
"""Average bytes per second at which a body has to arrive after the first `GRACE_SECONDS`."""


def body_at_once(incoming: RequestBody, limit: int) -> bytes | None:
    """Returns the body if all of it has arrived; None if not, or if it is invalid.

    Raises `PayloadTooLarge`.
    """
    if (incoming.length or 0) > limit:
        raise _too_large(limit)
    body = incoming.whole()
    if body is not None and len(body) > limit:
        raise _too_large(limit)
    return body


async def read_body(incoming: RequestBody, limit: int, reserved: Reservation, place: Place) -> bytes:
    """Returns the body, whose bytes are `reserved` as they arrive; `place` limits how many are read at once.

    Raises `PayloadTooLarge` before more than `limit` bytes are kept, `QueueFull` when all requests together
    hold too much, and `InvalidArgument` for a body that is invalid or arrives too slowly.
    """
    length = incoming.length
    body = GrowingBytes(length)
    size = 0
    now = asyncio.get_running_loop().time
    started = now()
    try:
        async with asyncio.timeout(min(IDLE_SECONDS, GRACE_SECONDS)) as time_limit:
            place.reading = time_limit
            while size <= limit:
                chunk = await incoming.read()
                reserved.grow(len(chunk))
                size += len(chunk)
                body.add(chunk)
                place.grow(len(chunk))
                if size == length or not chunk:
                    place.complete()
                    return body.take()
                if not place.may_continue:
                    time_limit.reschedule(None)
                    waited = now()
                    await place.wait()
                    started += now() - waited  # The wait was not caused by the client.
                time_limit.reschedule(min(now() + IDLE_SECONDS, started + GRACE_SECONDS + size / MIN_RATE))
    except TimeoutError:
        text = (
            f"the request body is incomplete: {size} bytes in {now() - started:.1f} seconds, expected at least "
            f"{MIN_RATE} bytes a second after {GRACE_SECONDS:g} seconds, and no pause of {IDLE_SECONDS:g} seconds"
        )
        if place.is_too_slow:
            text += "; while other requests wait for memory, "
            text += f"at least {MIN_PROGRESS} bytes in {CHECK_SECONDS:g} seconds"
        raise InvalidArgument(text) from None
    raise _too_large(limit)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {limit} bytes")
