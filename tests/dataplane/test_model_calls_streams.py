"""Answers of other models one by one, and what is counted of calls that models make."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import triglot
from tests.served_models import Arrays, Function, Gated, Served, both, calling, ints, serving, twice
from tests.waiting import until
from triglot.core.call import Call
from triglot.core.errors import Code


async def stream(inputs: Arrays) -> Any:
    for value in inputs["x"]:
        yield {"y": np.array([value], np.int32)}


def stream_on_thread(inputs: Arrays) -> Iterator[Any]:
    for value in inputs["x"]:
        yield {"y": np.array([value], np.int32)}


def failing(_: Arrays) -> Any:
    raise triglot.NotFound("no such word")


@both
@pytest.mark.parametrize("callee", [stream, stream_on_thread, twice], ids=["loop", "thread", "not decoupled"])
async def test_answers_one_by_one(callee: Any, on_loop: bool) -> None:
    async def async_outer(inputs: Arrays, call: Call) -> Any:
        return {"y": np.concatenate([answer["y"] async for answer in call.infer_stream("inner", inputs)])}

    def outer(inputs: Arrays, call: Call) -> Any:
        return {"y": np.concatenate([answer["y"] for answer in call.infer_stream("inner", inputs)])}

    models = {"inner": Function(callee), "outer": Function(async_outer if on_loop else outer)}
    async with serving(models) as served:
        expected = [2, 4] if callee is twice else [1, 2]
        assert (await served.infer("outer", ints(1, 2))).tolist() == expected
        await served.is_idle()


def endless_model() -> tuple[Callable[[Arrays], Iterator[Any]], threading.Event]:
    """A streaming model's function that never ends, and what is set when it is closed."""
    closed = threading.Event()

    def endless(_: Arrays) -> Iterator[Any]:
        try:
            while True:
                yield {"y": ints(1)}
        finally:
            closed.set()

    return endless, closed


@both
async def test_a_reader_that_has_enough(on_loop: bool) -> None:
    """The called model is closed at its next answer."""
    endless, closed = endless_model()

    async def async_outer(inputs: Arrays, call: Call) -> Any:
        async for answer in call.infer_stream("endless", inputs):
            return answer
        raise AssertionError

    def outer(inputs: Arrays, call: Call) -> Any:
        for answer in call.infer_stream("endless", inputs):
            return answer
        raise AssertionError

    models = {"endless": Function(endless), "outer": Function(async_outer if on_loop else outer)}
    async with serving(models) as served:
        assert (await served.infer("outer", ints(1))).tolist() == [1]
        await until(closed.is_set)
        await served.is_idle()


@both
async def test_the_caller_of_a_stream_leaves(on_loop: bool) -> None:
    begun = threading.Event()
    endless, closed = endless_model()

    async def async_outer(inputs: Arrays, call: Call) -> Any:
        async for _ in call.infer_stream("endless", inputs):
            begun.set()

    def outer(inputs: Arrays, call: Call) -> Any:
        for _ in call.infer_stream("endless", inputs):
            begun.set()

    models = {"endless": Function(endless), "outer": Function(async_outer if on_loop else outer)}
    async with serving(models) as served:
        asked = asyncio.create_task(served.infer("outer", ints(1)))
        await until(begun.is_set)
        asked.cancel()
        await until(closed.is_set)
        await served.is_idle()


@both
async def test_errors_of_streams(on_loop: bool) -> None:
    async def late(_: Arrays) -> Any:
        yield {"y": ints(1)}
        raise triglot.NotFound("no more")

    async def async_outer(inputs: Arrays, call: Call) -> Any:
        return [answer async for answer in call.infer_stream("late", inputs)]

    def outer(inputs: Arrays, call: Call) -> Any:
        return list(call.infer_stream("late", inputs))

    models = {"late": Function(late), "outer": Function(async_outer if on_loop else outer)}
    async with serving(models) as served:
        error = await served.error("outer", ints(1))
        assert (error.code, error.message) == (Code.NOT_FOUND, "model 'late': no more")
        await served.is_idle()


# --- what is counted ---


def counts_of(served: Served) -> dict[tuple[str, str, str, str], int]:
    """Calls by protocol, method, model and code."""
    return {
        (endpoint.protocol, endpoint.method, kind.model, kind.code.name): stats.latency.count
        for endpoint, kind, stats in served.server.telemetry.calls()
    }


async def test_what_is_counted() -> None:
    """The called model's own numbers grow, those of what clients ask for do not."""

    async def outer(inputs: Arrays, call: Call) -> Any:
        async for _ in call.infer_stream("twice", inputs):
            pass
        try:
            await call.infer("failing", inputs)
        except triglot.NotFound:
            return await call.infer("twice", inputs)

    models = {"twice": Function(twice), "failing": Function(failing), "outer": Function(outer)}
    async with serving(models) as served:
        await served.infer("outer", ints(1))
        telemetry = served.server.telemetry
        assert counts_of(served) == {
            ("internal", "infer", "twice", "OK"): 1,
            ("internal", "infer_stream", "twice", "OK"): 1,
            ("internal", "infer", "failing", "NOT_FOUND"): 1,
        }
        twice_stats = telemetry.models()["twice", 1]
        assert (twice_stats.requests, twice_stats.failures, twice_stats.executed) == (2, 0, 2)
        assert telemetry.models()["failing", 1].failures == 1
        assert all(traffic.requests == traffic.executed == 0 for traffic in telemetry.traffic().values())
        assert "internal" not in telemetry.traffic()
        telemetry.tick(time.monotonic() + 2)
        assert not any(second.failures for second in telemetry.history)
        assert not any(second.latencies or any(second.requests.values()) for second in telemetry.history)


async def test_a_call_under_way_is_not_in_flight_for_clients() -> None:
    gated = Gated()
    async with serving({"gated": gated, "outer": calling("gated", on_loop=True)}) as served:
        asked = asyncio.create_task(served.infer("outer", ints(1)))
        await gated.until_at("infer")
        telemetry = served.server.telemetry
        calls = [endpoint.in_flight for endpoint in telemetry.endpoints() if endpoint.entrypoint == "MODEL"]
        assert calls == [1, 0]
        assert telemetry.in_flight == 0
        gated.open_point("infer")
        await asked


async def test_warm_up_reaches_other_models_and_counts_nothing() -> None:
    models = {
        "twice": Function(twice),
        "outer": Function(lambda inputs, call: call.infer("twice", inputs), example={"x": ints(1)}),
    }
    async with serving(models) as served:
        assert counts_of(served) == {}
        assert (await served.infer("outer", ints(1))).tolist() == [2]
