"""ModelStreamInfer streams with hundreds of open requests: each is taken in as it arrives, as in Triton.

Triton's gRPC frontend reads a stream's next request before the current one ends (triton-inference-server/server,
src/grpc/stream_infer_handler.cc).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest

from tests.protocols.stream_requests import Inputs, asking, sending, value, y
from tests.scheduling.scripted_models import Plain, Scripted
from tests.transports.live import live
from tests.waiting import until
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.stream import StreamLimits
from triglot.scheduling.loaded_version import Limits

pytestmark = pytest.mark.both_transports

MANY = 300


async def twice(inputs: Inputs) -> dict[str, Any]:
    return {"y": inputs["x"] * 2}


async def test_no_request_waits_for_those_of_another_model_and_unary_answers_keep_their_order() -> None:
    async def token(inputs: Inputs) -> AsyncIterator[Any]:
        yield y(-inputs["x"][0])

    busy = Scripted(open_gate=False)
    async with live({"busy": busy, "token": Plain(token), "quick": Plain(twice)}) as server:
        call = server.stream_infer(timeout=60)
        for at in range(MANY):
            await call.write(asking("busy" if at % 3 else "quick", at))
        await call.write(asking("token", 5))
        # The first one, of a model that is not busy, is answered before.
        assert [value(await call.read()), value(await call.read())] == [0, -5]
        busy.open_point("infer")
        assert [value(await call.read()) for _ in range(1, MANY)] == [2 * at for at in range(1, MANY)]
        call.cancel()


async def test_a_client_that_half_closes_with_hundreds_open_gets_all_answers() -> None:
    busy = Scripted(open_gate=False)
    async with live({"busy": busy}) as server:
        call = server.stream_infer(sending(*(asking("busy", at) for at in range(MANY))), timeout=60)
        await until(lambda: server.leases() == MANY)
        busy.open_point("infer")
        assert [value(response) async for response in call] == [2 * at for at in range(MANY)]
        assert await call.code() is grpc.StatusCode.OK


async def test_a_client_that_cancels_with_hundreds_open_cancels_each() -> None:
    finished = 0

    async def forever(inputs: Inputs) -> AsyncIterator[Any]:
        nonlocal finished
        try:
            yield y(1)
            await asyncio.Event().wait()
        finally:
            finished += 1

    busy = Scripted(open_gate=False)
    async with live({"forever": Plain(forever), "busy": busy}) as server:
        call = server.stream_infer(timeout=60)
        for at in range(MANY):
            await call.write(asking("busy" if at % 2 else "forever"))
        for _ in range(MANY // 2):
            await call.read()
        await until(lambda: server.leases() == MANY)
        call.cancel()
        await until(lambda: finished == MANY // 2)
        busy.open_point("infer")
        await until(lambda: server.leases() == 0)
    assert len(busy.started) == 1  # Requests that were queued are not run.


# --- limits ---


@pytest.mark.parametrize(
    ("options", "size", "most"),
    [
        ({"max_queue_size": 8}, 1, 6),
        ({"max_total_queue_size": 20}, 1, 15),
        ({"max_queue_bytes": 40_000}, 4_000, 8),
        ({"max_total_queue_bytes": 4_000_000}, 400_000, 8),
    ],
)
async def test_one_stream_leaves_a_quarter_of_a_limit_to_others_and_none_is_refused(
    options: dict[str, int], size: int, most: int
) -> None:
    running = 0
    gate = asyncio.Event()

    async def wait(inputs: Inputs) -> Any:
        nonlocal running
        running += 1
        await gate.wait()
        return y(inputs["x"][0])

    async with live({"waits": Plain(wait), "quick": Plain(twice)}, **options) as server:
        raw = pb.ModelInferRequest.FromString(asking("waits", 1))
        raw.raw_input_contents[0] *= size // 4 or 1
        raw.inputs[0].shape[0] = size // 4 or 1
        call = server.stream_infer(sending(*[raw.SerializeToString()] * 3 * most), timeout=60)
        await until(lambda: running >= most)
        assert [
            value(response) async for response in server.stream_infer(sending(asking("quick", 4)), timeout=60)
        ] == [8]
        assert running == most
        gate.set()
        assert [value(response) async for response in call] == [1] * 3 * most


@pytest.mark.parametrize("model", ["several", "one"])
async def test_a_client_that_reads_nothing_bounds_what_is_kept_for_it(model: str) -> None:
    """By bytes, and by the open requests; others are answered meanwhile."""
    made = 0

    async def large(inputs: Inputs) -> Any:
        nonlocal made
        made += 1
        return {"y": np.zeros(1 << 16, np.float32)}

    async def several(inputs: Inputs) -> AsyncIterator[Any]:
        for _ in range(3):
            yield await large(inputs)

    wanted, each = (500, 1) if model == "one" else (170, 3)
    models = {"one": Plain(large), "several": Plain(several), "quick": Plain(twice)}
    async with live(models, max_queue_size=16, max_unread_bytes=2**20) as server, server.narrow() as stream_infer:
        call = stream_infer(sending(*(asking(model) for _ in range(wanted))), timeout=60)
        await until(lambda: made >= 4)  # Which is a MiB.
        for at in range(5):
            assert [value(response) async for response in server.stream_infer(sending(asking("quick", at)))] == [
                2 * at
            ]
        # Those in gRPC's own buffers, those kept, and those of open requests.
        assert made <= 16 + 4 + 12 * each
        read = 0
        async for response in call:
            assert not response.error_message
            read += 1
            assert made <= read + 16 + 4 + 12 * each
    assert read == wanted * each


def test_the_limits_of_a_stream_leave_room_for_others() -> None:
    assert StreamLimits.within(1024, Limits(2**30, 8192, 2**29), 5) == StreamLimits(768, 3 * 2**27, 5)
    assert StreamLimits.within(1, Limits(), 5).requests == 1
    assert StreamLimits.within(1024, Limits(total_requests=100), 5).requests == 75
