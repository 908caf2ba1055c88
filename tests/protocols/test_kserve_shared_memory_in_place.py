"""Models that read their inputs where the client has them, and which inputs these are (spec 2.6, 3.10)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from tests.protocols.kserve_served import Served
from tests.protocols.tensor_places import (
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
    filled,
    memory,
    message_of,
    register,
    serving_memory,
    unregister,
)
from tests.waiting import until
from triglot.core.errors import Code
from triglot.core.tensor import DATATYPES, Array
from triglot.core.types import InferenceResponse, OutputOptions, RegionSlice
from triglot.protocols.kserve.extended_plane import ExtendedPlane
from triglot.testing import GatedModel

EVERY = pytest.mark.parametrize("interface", INTERFACES)
BEFORE, AFTER = 3, 5
INTO = RegionSlice("into", 0, SIZE)
PLACED: Wishes = {"y": OutputOptions(region=INTO)}
WELL = Outcome(Code.OK, "", {"y": ("FP32", [1, SIZE // 4], b"")})


class Waiting(GatedModel):
    """Looks at its input when it was let go, and gives that back."""

    any_tensors = True
    inputs_in_place = True

    def __init__(self) -> None:
        super().__init__("infer")
        self.look: Callable[[Array], Any] = np.copy

    def infer(self, inputs: Any) -> Any:
        self.wait_at("infer")
        return {"y": self.look(inputs["x"])}


class Copying(Waiting):
    inputs_in_place = False


class Cached(Waiting):
    any_tensors = False
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]
    response_cache = True


class InSequences(Cached):
    response_cache = False
    sequence_batching = triglot.SequenceBatching(max_idle=60)


@pytest.fixture
def made() -> Iterator[Memory]:
    with memory(SIZE) as region:
        yield region


@pytest.fixture
def into() -> Iterator[Memory]:
    with memory(SIZE) as region:
        yield region


async def asked(served: Served, interface: str, inputs: list[In], outputs: Wishes) -> asyncio.Future[Outcome]:
    return asyncio.ensure_future(ask(served, interface, "scalar", inputs, outputs))


async def changed(
    served: Served, interface: str, model: Waiting, made: Memory, datatype: str, wish: RegionSlice
) -> None:
    """Have the model look at its input when that has been changed."""
    made.put(filled(datatype, BEFORE, SIZE))
    itemsize = DATATYPES[datatype].itemsize
    inputs = [In("x", RegionSlice("r", 0, wish.size), datatype, [1, wish.size // itemsize])]
    running = await asked(served, interface, inputs, {"y": OutputOptions(region=wish)})
    await model.until_at("infer")
    made.put(filled(datatype, AFTER, SIZE))
    model.open_point("infer")
    assert (await running).code is Code.OK


@EVERY
@pytest.mark.parametrize(
    ("datatype", "seen"),
    [
        *((datatype, AFTER) for datatype in ("FP16", "BF16", "FP32", "FP64")),
        *((datatype, BEFORE) for datatype in ("INT8", "UINT8", "INT32", "INT64")),
    ],
)
async def test_large_inputs(interface: str, datatype: str, seen: int, made: Memory, into: Memory) -> None:
    """Floats are what the client's memory has whenever the model looks; integers it may check, and use later."""
    model = Waiting()
    async with serving_memory({"r": made, "into": into}, model, response_cache_bytes=2 * SIZE) as served:
        await changed(served, interface, model, made, datatype, INTO)
        assert into.get(SIZE) == filled(datatype, seen, SIZE)


@EVERY
@pytest.mark.parametrize("kind", [Copying, Cached])
async def test_models_that_may_keep_inputs(
    interface: str, kind: type[Waiting], made: Memory, into: Memory
) -> None:
    model = kind()
    async with serving_memory({"r": made, "into": into}, model, response_cache_bytes=2 * SIZE) as served:
        await changed(served, interface, model, made, "FP32", INTO)
        assert into.get(SIZE) == filled("FP32", BEFORE, SIZE)


@EVERY
async def test_small_inputs_are_copied(interface: str, made: Memory, into: Memory) -> None:
    model, size = Waiting(), 4096
    async with serving_memory({"r": made, "into": into}, model, response_cache_bytes=2 * SIZE) as served:
        await changed(served, interface, model, made, "FP32", RegionSlice("into", 0, size))
        assert into.get(size) == filled("FP32", BEFORE, size)


@EVERY
async def test_an_object_that_is_written_to(interface: str, made: Memory, into: Memory) -> None:
    """One output must not become another one's input, under whichever name its region has."""
    model = Waiting()
    async with serving_memory({"r": made, "into": into}, model, response_cache_bytes=2 * SIZE) as served:
        assert await register(served, "again", made, SIZE) == (Code.OK, "")
        await changed(served, interface, model, made, "FP32", RegionSlice("again", 0, SIZE))
        assert made.get(SIZE) == filled("FP32", BEFORE, SIZE)


async def test_a_model_of_sequences(made: Memory, into: Memory) -> None:
    """It may have its state from them."""
    model = InSequences()
    made.put(filled("FP32", BEFORE, SIZE))
    message = message_of("scalar", X, PLACED)
    message.parameters["sequence_id"].int64_param = 7
    message.parameters["sequence_start"].bool_param = True
    async with serving_memory({"r": made, "into": into}, model, response_cache_bytes=2 * SIZE) as served:
        running = asyncio.ensure_future(served.grpc.call("ModelInfer", message.SerializeToString()))
        await model.until_at("infer")
        made.put(filled("FP32", AFTER, SIZE))
        model.open_point("infer")
        assert (await running)[0] is Code.OK
        assert into.get(SIZE) == filled("FP32", BEFORE, SIZE)


@EVERY
@pytest.mark.parametrize("left", [0, 4096, SIZE - 1])
@pytest.mark.parametrize("look", [np.copy, np.sum, bytes, lambda x: 1 / 0], ids=["copy", "sum", "bytes", "error"])
async def test_an_object_that_is_made_smaller_while_a_model_runs(
    look: Callable[[Array], Any], left: int, interface: str, made: Memory, into: Memory
) -> None:
    """What came of it is worth nothing, an error of the model's included; the process lives."""
    model = Waiting()
    model.look = look
    async with serving_memory({"r": made, "into": into}, model, response_cache_bytes=2 * SIZE) as served:
        running = await asked(served, interface, X, PLACED)
        await model.until_at("infer")
        made.cut(left)
        model.open_point("infer")
        assert await running == failure(interface)
        assert made.path.stat().st_size == left
        made.cut(SIZE)
        model.look = np.copy
        assert await ask(served, interface, "scalar", X, PLACED) == WELL


@EVERY
async def test_an_object_that_was_smaller_for_a_while(interface: str, made: Memory, into: Memory) -> None:
    """It is as large as before when the model answers, which has seen zeros."""
    model = Waiting()
    made.put(filled("FP32", BEFORE, SIZE))

    def look(x: Array) -> Array:
        made.cut(0)
        seen = x.copy()
        made.cut(SIZE)
        made.put(filled("FP32", BEFORE, SIZE))
        return seen

    model.look = look
    model.open_point("infer")
    async with serving_memory({"r": made, "into": into}, model, response_cache_bytes=2 * SIZE) as served:
        assert await ask(served, interface, "scalar", X, PLACED) == failure(interface, SHRUNK_MEANWHILE)
        model.look = np.copy
        assert await ask(served, interface, "scalar", X, PLACED) == WELL
        assert into.get(SIZE) == filled("FP32", BEFORE, SIZE)


def mapped(running: Memory) -> int:
    maps = Path("/proc/self/maps").read_text().splitlines()
    return sum(line.endswith((str(running.path), f"{running.path} (deleted)")) for line in maps)


@EVERY
@pytest.mark.parametrize("name", ["r", ""])
async def test_a_region_that_is_unregistered_meanwhile(
    interface: str, name: str, made: Memory, into: Memory
) -> None:
    """It stays for as long as the model runs, and goes then."""
    model = Waiting()
    made.put(filled("FP32", BEFORE, SIZE))
    with memory(SIZE) as other:
        async with serving_memory({"r": made, "into": into}, model, response_cache_bytes=2 * SIZE) as served:
            running = await asked(served, interface, X, PLACED)
            await model.until_at("infer")
            assert await unregister(served, name) == (Code.OK, "")
            assert await register(served, "r", other, SIZE) == (Code.OK, "")
            made.path.unlink()
            assert mapped(made) == 1
            model.open_point("infer")
            assert (await running).code is Code.OK
            assert into.get(SIZE) == filled("FP32", BEFORE, SIZE)
    await until(lambda: mapped(made) == 0)


@EVERY
async def test_answers_have_memory_of_their_own(
    interface: str, made: Memory, into: Memory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a model gives back as it came is the client's only until it has been answered."""
    original, shared = ExtendedPlane.infer, []

    async def infer(self: ExtendedPlane, request: Any, call: Any) -> InferenceResponse:
        response = await original(self, request, call)
        given = np.frombuffer(request.inputs[0].data, np.uint8)
        shared.append(np.may_share_memory(given, response.outputs[0].array))
        return response

    monkeypatch.setattr(ExtendedPlane, "infer", infer)
    made.put(filled("FP32", BEFORE, SIZE))
    async with serving_memory({"r": made, "into": into}) as served:
        assert await ask(served, interface, "identity_fp32", X, PLACED) == WELL
        assert into.get(SIZE) == filled("FP32", BEFORE, SIZE)
        assert (await ask(served, interface, "identity_fp32", X, {"y": None})).raw() == filled(
            "FP32", BEFORE, SIZE
        )
    assert shared == [True, False]
