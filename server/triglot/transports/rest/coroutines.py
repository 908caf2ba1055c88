"""The coroutines of REST calls: what takes long, or waits for a client. See also `off_loop`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Coroutine
from typing import Any, TypeVar

from triglot.core.call import Call
from triglot.core.http import HttpResponse
from triglot.core.roles import Cancellable
from triglot.transports.deflate import DEFLATED_WORK, accepted, deflate
from triglot.transports.off_loop import run_sized
from triglot.transports.rest.exchange import Exchange, with_field
from triglot.transports.rest.fields import Fields
from triglot.transports.row_call import LAST_MESSAGE_SECONDS

T = TypeVar("T")

CLEAN_UP_SECONDS = 1.0
"""Seconds to write and close after the end of the grace period."""
MAX_IN_A_ROW = 16
"""Chunks of a stream in a row, after which other tasks get a turn."""


async def compressed(http: Exchange, response: HttpResponse) -> HttpResponse:
    """Return the response in the coding that the client prefers; compressed on a thread if it takes long."""
    headers = http.values("accept-encoding")
    if not headers or (preference := accepted(",".join(headers))).coding == "identity":
        return response
    given = response.body
    body = await run_sized(len(given) * DEFLATED_WORK, lambda: deflate(bytes(given), preference))
    if body is None:
        return response
    return with_field(response, body, "Content-Encoding", preference.coding)


async def write_chunks(
    http: Exchange,
    call: Call,
    status: int,
    fields: Fields,
    next_chunk: Callable[[], bytes | None],
    wait: Callable[[], Coroutine[Any, Any, object]],
    written: Callable[[], object],
    broken: Callable[[Exception], object],
) -> None:
    """Send the chunks of a stream as the client reads them, then call `written`; `broken` if that fails.

    `next_chunk` returns b"" as long as there is none, which `wait` awaits, and None at the end.
    """
    try:
        await http.begin(status, fields)
        count = 0
        while (chunk := next_chunk()) is not None:
            if not chunk:
                await wait()
                continue
            # The model ends at the deadline, and may send a last chunk after it.
            await in_time(call, http.write(chunk), LAST_MESSAGE_SECONDS, "while the client read the response")
            count += 1
            if not count % MAX_IN_A_ROW:
                await asyncio.sleep(0)  # A write suspends only if the client does not read.
        await http.finish()
    except asyncio.CancelledError:
        return  # The call has ended. If raised, the task would keep it, and its frames.
    except Exception as error:
        broken(error)
    else:
        written()


async def in_time(call: Call, work: Awaitable[T], spare: float, when: str) -> T:
    """Await `work` until `spare` seconds after the call's deadline. Raise `DeadlineExceeded` after that."""
    if call.remaining is None:
        return await work
    try:
        async with asyncio.timeout(call.remaining + spare) as scope:
            return await work
    except TimeoutError:
        if not scope.expired():
            raise
        raise call.overdue(when) from None


async def end_calls(
    open_calls: Collection[Cancellable], call_end: asyncio.Event, grace: float, end_grace: Callable[[], object]
) -> None:
    """Wait up to `grace` seconds for open calls, then cancel the rest; `call_end` is set when none is left."""
    await _wait_for_all(open_calls, call_end, grace)
    end_grace()
    for call in list(open_calls):
        call.cancel()
    await _wait_for_all(open_calls, call_end, CLEAN_UP_SECONDS)


async def _wait_for_all(open_calls: Collection[Cancellable], call_end: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            while open_calls:
                call_end.clear()
                await call_end.wait()
    except TimeoutError:
        pass  # Some calls have not ended.
