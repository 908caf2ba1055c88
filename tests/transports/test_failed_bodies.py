"""Calls that fail leave nothing of their requests to the garbage collector, by any way and for any reason."""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.transports import failing_calls as calls
from tests.transports.failing_calls import Build, Request, Waits
from tests.transports.h2_peers import SECONDS
from tests.transports.live import Live, live
from tests.versions import OLD_AIOHTTP
from tests.waiting import until
from triglot.config.options import GRPC_TRANSPORTS
from triglot.core.call import Call
from triglot.core.types import InferenceRequest, InputTensor

COUNTS = (2_000, 40_000)
"""Numbers of a request: one that is decoded on the event loop, and one that is not."""
OPTIONS: dict[str, Any] = {
    "protocols": "kserve,tfserving,grps",
    "max_queue_size": 1,
    "default_timeout": 0.5,
    "response_cache_bytes": 2**20,
    "loop_lag_warning": 0.0,
}
Send = Callable[..., Any]


def kept(own: set[int]) -> tuple[int, str]:
    """Bytes that only the garbage collector frees, without the objects `own`; and what keeps them."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    garbage, size, seen = gc.garbage[:], 0, set(own)
    gc.garbage.clear()
    found = [*garbage, *(referent for item in garbage for referent in gc.get_referents(item))]
    while found:
        item: Any = found.pop()
        if id(item) not in seen and isinstance(item, bytes | bytearray | str | list | memoryview | np.ndarray):
            seen.add(id(item))
            size += sys.getsizeof(item)
            found.append(item.obj if isinstance(item, memoryview) else getattr(item, "base", None))
    frames = Counter(item.f_code.co_qualname for item in garbage if isinstance(item, FrameType))
    return size, f"{size} bytes: {dict(frames)}"


def cut(request: Request) -> Request:
    return replace(request, body=request.body[:-2])


def kinds(
    build: Build, count: int, models: dict[str, Any]
) -> Iterator[tuple[str, Request, Callable[[], bool] | None]]:
    """Failures by their names; where the client disconnects, when."""
    for model in models:
        if model not in ("waits", "full"):
            yield model, build(model, count, "x"), None
    yield "unknown model", build("none", count, "x"), None
    yield "wrong input", build("refuses", count, "z"), None
    yield "bad body", cut(build("refuses", count, "x")), None
    yield "bad body of an unknown model", cut(build("none", count, "x")), None
    yield "deadline", build("waits", count, "x"), None
    yield "queue full", build("full", count, "x"), None
    waits = models["waits"]
    assert isinstance(waits, Waits)
    if build not in calls.NOT_RUN and not OLD_AIOHTTP:
        yield "client leaves", build("waits", count, "x"), lambda: waits.running > 0


async def left_over(
    here: Live, send: Send, request: Request, leaves: Callable[[], bool] | None
) -> tuple[int, str]:
    gc.collect()
    gc.freeze()
    await send(here, request, leaves)
    await until(lambda: here.leases() == BUSY)
    for _ in range(5):
        await asyncio.sleep(0)
    return kept({id(request.body)})


BUSY = 2
"""Calls that fill the model `full`."""


async def fill(here: Live) -> list[asyncio.Task[Any]]:
    tensor = InputTensor("x", "FP32", (1,), np.zeros(1, np.float32))
    filling: list[asyncio.Task[Any]] = []
    for _ in range(BUSY):
        call = Call()
        call.limit(10 * SECONDS, "the test's patience")
        running = here.server.dataplane.infer(InferenceRequest("full", inputs=[tensor]), call)
        filling.append(asyncio.create_task(running))
        await until(lambda: here.leases() == len(filling) == here.server.dataplane.queue_depth() + 1)
    return filling


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    logging.disable()  # pytest keeps what is logged, and its errors.
    gc.disable()
    yield
    gc.enable()
    logging.disable(logging.NOTSET)


async def look(send: Send, build: Build, **transports: str) -> None:
    models = calls.models()
    wrong = []
    async with live(models, **transports, **OPTIONS) as here:
        filling = await fill(here)
        for count in COUNTS:
            for name, request, leaves in kinds(build, count, models):
                for _ in range(2):  # What is made once is there the second time.
                    size, text = await left_over(here, send, request, leaves)
                    if size < len(request.body) / 2:
                        break
                else:
                    wrong.append(f"{name}, {len(request.body)}: {text}")
        full = models["full"]
        assert isinstance(full, calls.Full)
        full.gate.set()
        await asyncio.gather(*filling)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
@pytest.mark.parametrize("method", calls.GRPC)
async def test_over_grpc(method: str, transport: str) -> None:
    await look(calls.over_grpc, calls.GRPC[method], grpc_transport=transport)


@pytest.mark.parametrize(
    ("send", "transport"), [(calls.over_http1, "h1"), (calls.over_http1, "aiohttp"), (calls.over_http2, "h1")]
)
@pytest.mark.parametrize("build", calls.REST)
async def test_over_rest(build: Build, send: Send, transport: str) -> None:
    await look(send, build, grpc_transport="h2", http_transport=transport)


@pytest.mark.parametrize("transport", GRPC_TRANSPORTS)
@pytest.mark.parametrize("count", COUNTS)
async def test_what_is_kept_is_seen(count: int, transport: str) -> None:
    models: dict[str, Any] = {"keeps": calls.Keeps(), "full": calls.Full()}
    async with live(models, grpc_transport=transport, **OPTIONS) as here:
        filling = await fill(here)
        request = calls.kserve_grpc("keeps", count, "x")
        expected = len(request.body) / 2
        found = [(await left_over(here, calls.over_grpc, request, None))[0]]

        def is_seen() -> bool:
            found.append(kept({id(request.body)})[0])  # The transport may have let go of the call only now.
            return max(found) >= expected

        await until(is_seen, "nothing is seen", lambda: found)
        models["full"].gate.set()
        await asyncio.gather(*filling)
