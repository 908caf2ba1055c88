"""Request bodies, as they come from aiohttp."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError

from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.transports.growing import GrowingBytes
from triglot.transports.request_bytes import Reservation
from triglot.transports.text_room import LEAST_MOVED, LOOK_SECONDS, Place

READ_AHEAD = 512 * 1024
"""Of a body; reading stops at twice as much. Of 600 KB in pieces of 256 KB nothing has to wait."""
PATIENCE = 120.0
"""Seconds without a byte, after which the rest of a body is not waited for; HTTP/2 waits as long for a reader."""
GRACE_SECONDS = 30.0
LEAST_RATE = 240
"""Bytes per second, on average, at which a body has to come once the grace period is over."""


def body_at_once(http: web.BaseRequest, limit: int) -> bytes | None:
    """The whole body where it has come already; None where there is more to come, or it is broken.

    Raises `PayloadTooLarge`.
    """
    content = http.content
    if not http.can_read_body:
        return b""
    if not content.is_eof() or content.exception() is not None:
        return None
    if content.total_bytes > limit:
        raise _too_large(limit)
    return content.read_nowait()


async def read_body(http: web.BaseRequest, limit: int, reserved: Reservation, place: Place) -> bytes:
    """The whole body, which is `reserved` as it comes, and has its `place` where there may not be room for all.

    Raises `PayloadTooLarge` before more than `limit` bytes are kept, `QueueFull` when all requests together hold
    too many, and `InvalidArgument` for a body that is broken or comes too slowly.
    """
    length = http.content_length
    if (length or 0) > limit:
        raise _too_large(limit)
    content = http.content
    body = GrowingBytes(length)
    size = 0
    now = asyncio.get_running_loop().time
    started = now()
    try:
        async with asyncio.timeout(min(PATIENCE, GRACE_SECONDS)) as patience:
            place.reading = patience
            while size <= limit:
                # What has a length comes in the pieces of the socket. HTTP's own chunks may be tiny, and are taken
                # many at a time.
                chunk = await content.readany() if length is None else (await content.readchunk())[0]
                reserved.grow(len(chunk))
                size += len(chunk)
                body.add(chunk)
                place.grow(len(chunk))
                if size == length or (not chunk and content.at_eof()):
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
            text += f"; while others wait for room, at least {LEAST_MOVED} bytes in {LOOK_SECONDS:g} seconds"
        raise InvalidArgument(text) from None
    except (web.RequestPayloadError, PayloadEncodingError) as error:
        raise InvalidArgument(f"the request body is broken: {error}") from None
    raise _too_large(limit)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {limit} bytes")
