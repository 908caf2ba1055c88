"""Request bodies, as they come from aiohttp."""

from __future__ import annotations

import asyncio

from aiohttp import web
from aiohttp.http_exceptions import PayloadEncodingError

from triglot.core.errors import InvalidArgument, PayloadTooLarge

READ_AHEAD = 512 * 1024
"""Of a body; reading stops at twice as much. Of 600 KB in pieces of 256 KB nothing has to wait."""
PATIENCE = 120.0
"""Seconds without a byte, after which the rest of a body is not waited for; HTTP/2 waits as long for a reader."""


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


async def read_body(http: web.BaseRequest, limit: int) -> bytes:
    """The whole body.

    Raises `PayloadTooLarge` before more than `limit` bytes are kept, and `InvalidArgument` for one that is broken
    or does not go on.
    """
    length = http.content_length
    if (length or 0) > limit:
        raise _too_large(limit)
    content = http.content
    chunks: list[bytes] = []
    size = 0
    now = asyncio.get_running_loop().time
    try:
        async with asyncio.timeout(PATIENCE) as patience:
            while size <= limit:
                # What has a length comes in the pieces of the socket, which are joined once. HTTP's own chunks may
                # be tiny, and are taken many at a time.
                chunk = await content.readany() if length is None else (await content.readchunk())[0]
                size += len(chunk)
                chunks.append(chunk)
                if size == length or (not chunk and content.at_eof()):
                    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
                patience.reschedule(now() + PATIENCE)
    except TimeoutError:
        told = f"the request body is incomplete: {size} bytes, and then nothing for {PATIENCE:g} seconds"
        raise InvalidArgument(told) from None
    except (web.RequestPayloadError, PayloadEncodingError) as error:
        raise InvalidArgument(f"the request body is broken: {error}") from None
    raise _too_large(limit)


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(f"the request body is larger than {limit} bytes")
