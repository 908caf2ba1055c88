"""Shared memory that its owner changes while it is used, and what else runs beside it (spec 2.6, 3.10)."""

from __future__ import annotations

import asyncio
import json
import os
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import triglot
from tests.protocols.kserve_served import Served
from tests.protocols.tensor_places import (
    FULL_REGION,
    INTERFACES,
    SHRUNK_MEANWHILE,
    SIZE,
    In,
    Memory,
    Outcome,
    Wishes,
    X,
    ask,
    failure,
    memory,
    message_of,
    register,
    serving_memory,
    stream,
    unregister,
)
from tests.waiting import until
from triglot.core.errors import Code
from triglot.core.types import OutputOptions, RegionSlice
from triglot.protocols.kserve.regions import Region
from triglot.testing import GatedModel

EVERY = pytest.mark.parametrize("interface", INTERFACES)
INTO: Wishes = {"y": OutputOptions(region=FULL_REGION)}
FINE = (Code.OK, "")
PAIR = np.array([[1, 2]], "f4")


@pytest.fixture
def made() -> Iterator[Memory]:
    with memory(SIZE) as region:
        yield region


@pytest.fixture(params=[1, 2])
def cores(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Those that the server finds it may use."""
    count: int = request.param
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
    return count


async def names_of(served: Served) -> list[str]:
    """The regions that are listed."""
    _, _, reply = await served.rest.call("GET", "/v2/systemsharedmemory/status")
    return [region["name"] for region in json.loads(reply)]


async def assert_that_all_is_well(served: Served, interface: str) -> None:
    assert (await ask(served, interface, "identity_fp32", [In("x", PAIR)])).raw() == PAIR.tobytes()


async def test_who_copies(cores: int, made: Memory, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loop itself, where no other core is there for a thread."""
    on_main = []
    for name in ("read", "write"):
        original = getattr(Region, name)

        def copy(*arguments: Any, original: Any = original) -> None:
            on_main.append(threading.current_thread() is threading.main_thread())
            original(*arguments)

        monkeypatch.setattr(Region, name, copy)
    made.put(np.full(SIZE // 4, 7, "f4"))
    async with serving_memory({"r": made}) as served:
        assert (await ask(served, "grpc", "identity_fp32", X, INTO)).code is Code.OK
    assert on_main == [cores == 1] * 2
    assert made.get(SIZE) == np.full(SIZE // 4, 7, "f4").tobytes()


@EVERY
@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("left", [0, 1, 4096, SIZE - 1])
async def test_an_object_that_was_made_smaller(interface: str, left: int, made: Memory) -> None:
    async with serving_memory({"r": made}) as served:
        made.cut(left)
        for inputs, outputs in ((X, {"y": None}), ([In("x", np.ones((1, SIZE // 4), "f4"))], INTO)):
            outcome = await ask(served, interface, "identity_fp32", inputs, outputs)
            assert outcome == failure(interface)
        assert made.path.stat().st_size == left, "the server made it larger"
        await assert_that_all_is_well(served, interface)
        made.cut(SIZE)
        assert (await ask(served, interface, "identity_fp32", X, INTO)).code is Code.OK


@EVERY
@pytest.mark.usefixtures("cores")
@pytest.mark.parametrize("region", ["r", "into"], ids=["copied", "in place"])
async def test_an_object_that_is_made_smaller_all_the_time(interface: str, region: str, made: Memory) -> None:
    """Every request is answered, one way or the other, and the server lives."""
    over, outputs = threading.Event(), {"y": OutputOptions(region=RegionSlice(region, 0, SIZE))}

    def cut() -> None:
        while not over.is_set():
            for size in (0, SIZE, 4096, SIZE):
                made.cut(size)

    with memory(SIZE) as into:
        async with serving_memory({"r": made, "into": into}) as served:
            cutting = asyncio.ensure_future(asyncio.to_thread(cut))
            try:
                answers = [await ask(served, interface, "identity_fp32", X, outputs) for _ in range(50)]
            finally:
                over.set()
                await cutting
            well = Outcome(Code.OK, "", {"y": ("FP32", [1, SIZE // 4], b"")})
            failed = [failure(interface), *([failure(interface, SHRUNK_MEANWHILE)] if region == "into" else [])]
            assert [answer for answer in answers if answer not in (well, *failed)] == []
            await assert_that_all_is_well(served, interface)
            made.cut(SIZE)
            assert await ask(served, interface, "identity_fp32", X, outputs) == well


class Waiting(GatedModel):
    """Gives what it got when it was let go."""

    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]

    def __init__(self) -> None:
        super().__init__("infer")

    def infer(self, inputs: Any) -> Any:
        self.wait_at("infer")
        return {"y": inputs["x"] + 0}


@EVERY
@pytest.mark.parametrize("name", ["r", ""])
async def test_a_region_that_is_unregistered_while_it_is_used(interface: str, name: str, made: Memory) -> None:
    model = Waiting()
    made.put(np.full(SIZE // 4, 3, "f4"))
    with memory(SIZE) as other:
        async with serving_memory({"r": made}, model) as served:
            asked = asyncio.ensure_future(ask(served, interface, "scalar", X, INTO))
            await model.until_at("infer")
            assert await unregister(served, name) == FINE
            assert await register(served, "r", other, SIZE) == FINE
            # What the model got stays as it was.
            made.put(bytes(SIZE))
            model.open_point("infer")
            assert (await asked).code is Code.OK
            assert made.array("f4", SIZE // 4).tolist() == [3.0] * (SIZE // 4)
            assert other.get(SIZE) == bytes(SIZE)
            assert (await ask(served, interface, "scalar", X, {"y": None})).raw() == bytes(SIZE)


@EVERY
@pytest.mark.parametrize("name", ["r", ""])
async def test_region_is_released_with_its_last_request(interface: str, name: str, made: Memory) -> None:
    """As in Triton: until then it is listed, and may be used by more."""
    model = Waiting()
    async with serving_memory({"r": made}, model) as served:
        first = asyncio.ensure_future(ask(served, interface, "scalar", X, {"y": None}))
        await model.until_at("infer")
        assert await unregister(served, name) == FINE
        assert await names_of(served) == ["r"]
        second = asyncio.ensure_future(ask(served, interface, "scalar", X, INTO))
        await until(lambda: served.server.manager.registry.servable("scalar").queue_depth == 1)
        model.open_point("infer")
        assert [answer.code for answer in await asyncio.gather(first, second)] == [Code.OK, Code.OK]
        await until(lambda: not served.server._regions.registered())
        assert (await ask(served, interface, "scalar", X, INTO)).text.endswith(
            "Unable to find shared memory region: 'r'"
        )


@EVERY
async def test_unlinked_object(interface: str, made: Memory) -> None:
    made.put(PAIR)
    async with serving_memory({"r": made}) as served:
        made.path.unlink()
        place = RegionSlice("r", 0, 8)
        assert (
            await ask(served, interface, "identity_fp32", [In("x", place, "FP32", [1, 2])])
        ).raw() == PAIR.tobytes()


@EVERY
async def test_inputs_in_shared_memory_count_as_waiting_bytes(interface: str, made: Memory) -> None:
    model = Waiting()
    async with serving_memory({"r": made}, model, max_queue_bytes=SIZE) as served:
        first = asyncio.ensure_future(ask(served, interface, "scalar", [In("x", PAIR)]))
        await model.until_at("infer")
        assert "max_queue_bytes" in (await ask(served, interface, "scalar", X, INTO)).text
        model.open_point("infer")
        assert (await first).code is Code.OK
        assert (await ask(served, interface, "scalar", X, INTO)).code is Code.OK


class Doubling(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]
    response_cache = True

    def __init__(self) -> None:
        self.calls = 0

    def infer(self, inputs: Any) -> Any:
        self.calls += 1
        return {"y": inputs["x"] * 2}


@EVERY
async def test_the_response_cache(interface: str, made: Memory) -> None:
    """It knows inputs by what was in the region, and keeps outputs as they are."""
    model = Doubling()
    place = RegionSlice("r", 0, 8)
    inputs = [In("x", place, "FP32", [1, 2])]
    async with serving_memory({"r": made}, model, response_cache_bytes=SIZE) as served:
        for value, calls in ((1, 1), (1, 1), (5, 2), (1, 2)):
            made.put(PAIR * value)
            for wish in (OutputOptions(region=RegionSlice("r", 64, 8)), OutputOptions(1), None):
                outcome = await ask(served, interface, "scalar", inputs, {"y": wish})
                assert model.calls == calls
                if wish is None:
                    assert outcome.raw() == (PAIR * value * 2).tobytes()
                elif wish.classes:
                    assert outcome.raw()[4:] == f"{4 * value}.000000:1".encode()
                else:
                    assert outcome.raw() == b""
                    assert made.array("f4", 2, 64).tolist() == [2 * value, 4 * value]


class Batched(triglot.Model):
    """The sum of each row; takes part in batches of two requests."""

    inputs = [triglot.TensorSpec("x", "FP32", [-1, SIZE // 8])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, SIZE // 8])]
    max_batch_size = 2
    dynamic_batching = triglot.DynamicBatching(max_queue_delay=60)

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def infer(self, inputs: Any) -> Any:
        self.sizes.append(len(inputs["x"]))
        return {"y": inputs["x"] + 1}


@EVERY
async def test_a_batch(interface: str, made: Memory) -> None:
    model = Batched()
    half = SIZE // 2
    made.put(np.repeat(np.array([1, 2], "f4"), half // 4))
    async with serving_memory({"r": made}, model) as served:
        tasks = []
        for at in range(2):
            place = RegionSlice("r", at * half, half)
            inputs = [In("x", place, "FP32", [1, SIZE // 8])]
            tasks.append(ask(served, interface, "scalar", inputs, {"y": OutputOptions(region=place)}))
        assert all(outcome.raw() == b"" for outcome in await asyncio.gather(*tasks))
    assert model.sizes == [2]
    assert made.get(SIZE) == np.repeat(np.array([2, 3], "f4"), half // 4).tobytes()


class Steps(triglot.Model):
    """How many requests of its sequence came before."""

    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]
    max_batch_size = 1
    sequence_batching = triglot.SequenceBatching(max_idle=60)

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def infer(self, inputs: Any) -> Any:
        self.lengths.append(inputs["x"].shape[1])
        return {"y": inputs["x"]}


async def test_requests_of_a_sequence_keep_their_order(made: Memory) -> None:
    model = Steps()
    shapes = [SIZE // 4, 2, 2, SIZE // 4, 2, SIZE // 4, 2]
    messages = []
    for at, length in enumerate(shapes):
        tensor = In("x", FULL_REGION, "FP32", [1, length]) if length > 2 else In("x", PAIR)
        message = message_of("scalar", [tensor], {"y": OutputOptions(region=FULL_REGION)})
        message.parameters["sequence_id"].int64_param = 5
        message.parameters["sequence_start"].bool_param = at == 0
        message.parameters["sequence_end"].bool_param = at == len(shapes) - 1
        messages.append(message)
    async with serving_memory({"r": made}, model) as served:
        assert [outcome.raw() for outcome in await stream(served, messages)] == [b""] * len(shapes)
    assert model.lengths == shapes
