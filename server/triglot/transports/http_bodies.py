"""Request bodies, as they come from aiohttp."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError

from triglot.core.errors import InvalidArgument, PayloadTooLarge
from triglot.transports.request_bytes import Reservation

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


async def read_body(http: web.BaseRequest, limit: int, reserved: Reservation) -> bytes:
    """The whole body, which is `reserved` as it comes.

    Raises `PayloadTooLarge` before more than `limit` bytes are kept, `QueueFull` when all requests together hold
    too many, and `InvalidArgument` for a body that is broken or comes too slowly.
    """
    length = http.content_length
    if (length or 0) > limit:
        raise _too_large(limit)
    content = http.content
    chunks: list[bytes] = []
    size = 0
    now = asyncio.get_running_loop().time
    started = now()
    try:
        async with asyncio.timeout(min(PATIENCE, GRACE_SECONDS)) as patience:
            while size <= limit:
                # What has a length comes in the pieces of the socket, which are joined once. HTTP's own chunks may
                # be tiny, and are taken many at a time.
                chunk = await content.readany() if length is None else (await content.readchunk())[0]
                reserved.grow(len(chunk))
                size += len(chunk)
                chunks.append(chunk)
                if size == length or (not chunk and content.at_eof()):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
                patience.reschedule(min(now() + PATIENCE, started + GRACE_SECONDS + size / LEAST_RATE))
    except TimeoutError:
        text = (
            f"the request body is incomplete: {size} bytes in {now() - started:.1f} seconds, expected at least "
            f"{LEAST_RATE} bytes a second after {GRACE_SECONDS:g} seconds, and no pause of {PATIENCE:g} seconds"
        )
        raise InvalidArgument(text) from None
    except (web.RequestPayloadError, PayloadEncodingError) as error:
        raise InvalidArgument(f"the request body is broken: {error}") from None
    raise _too_large(limit)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {limit} bytes")
