"""Request bodies: how much of one is taken, and how slowly it may come."""

from __future__ import annotations

import asyncio

from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.transports.growing import GrowingBytes
from triglot.transports.request_bytes import Reservation
from triglot.transports.rest.exchange import RequestBody
from triglot.transports.text_room import LEAST_MOVED, LOOK_SECONDS, Place

PATIENCE = 120.0
"""Seconds without a byte, after which the rest of a body is not waited for; HTTP/2 waits as long for a reader."""
GRACE_SECONDS = 30.0
LEAST_RATE = 240
"""Bytes per second, on average, at which a body has to come once the grace period is over."""


def body_at_once(coming: RequestBody, limit: int) -> bytes | None:
    """The whole body where it has come already; None where there is more to come, or it is broken.

    Raises `PayloadTooLarge`.
    """
    if (coming.length or 0) > limit:
        raise _too_large(limit)
    body = coming.whole()
    if body is not None and len(body) > limit:
        raise _too_large(limit)
    return body


async def read_body(coming: RequestBody, limit: int, reserved: Reservation, place: Place) -> bytes:
    """The whole body, which is `reserved` as it comes, and has its `place` where there may not be room for all.

    Raises `PayloadTooLarge` before more than `limit` bytes are kept, `QueueFull` when all requests together hold
    too many, and `InvalidArgument` for a body that is broken or comes too slowly.
    """
    length = coming.length
    body = GrowingBytes(length)
    size = 0
    now = asyncio.get_running_loop().time
    started = now()
    try:
        async with asyncio.timeout(min(PATIENCE, GRACE_SECONDS)) as patience:
            place.reading = patience
            while size <= limit:
                chunk = await coming.read()
                reserved.grow(len(chunk))
                size += len(chunk)
                body.add(chunk)
                place.grow(len(chunk))
                if size == length or not chunk:
                    place.complete()
                    return body.take()
                if not place.may_go_on:
                    patience.reschedule(None)
                    waited = now()
                    await place.wait()
                    started += now() - waited  # That was not the client's fault.
                patience.reschedule(min(now() + PATIENCE, started + GRACE_SECONDS + size / LEAST_RATE))
    except TimeoutError:
        text = (
            f"the request body is incomplete: {size} bytes in {now() - started:.1f} seconds, expected at least "
            f"{LEAST_RATE} bytes a second after {GRACE_SECONDS:g} seconds, and no pause of {PATIENCE:g} seconds"
        )
        if place.is_too_slow:
            text += (
                f"; while other requests wait for memory, at least {LEAST_MOVED} bytes in {LOOK_SECONDS:g} seconds"
            )
        raise InvalidArgument(text) from None
    raise _too_large(limit)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {limit} bytes")
