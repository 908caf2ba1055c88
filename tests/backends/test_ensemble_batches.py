"""Ensembles of models that batch: the steps of many requests are executed together, each gets its own rows."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

import triglot
from tests.served_models import SECONDS, Arrays, Function, ensemble, ints, serving, step
from tests.waiting import until
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.request_scheduling import PLAIN

BATCHED: dict[str, Any] = {"max_batch_size": 64, "dynamic_batching": triglot.DynamicBatching()}


async def test_every_request_gets_its_own_rows() -> None:
    """Also where a model gives what it took, whose memory is the batch's."""
    sizes: list[int] = []

    def same(inputs: Arrays, call: Call) -> Any:
        sizes.append(len(call.members))
        return {"y": inputs["x"]}

    def more(inputs: Arrays) -> Any:
        return {"y": inputs["x"] + 1}

    async def ask(at: int) -> None:
        for turn in range(5):
            x = ints(*range(100 * at + turn, 100 * at + turn + at % 3 + 1))
            assert np.array_equal(await served.infer("chain", x), x + 1)

    chain = ensemble(step("same", "x", "m"), step("more", "m", "n"), step("same", "n", "y"), max_batch_size=8)
    models = {"chain": chain, "same": Function(same, **BATCHED), "more": Function(more, **BATCHED)}
    async with serving(models) as served:
        await asyncio.gather(*[ask(at) for at in range(32)])
        assert max(sizes) > 1
        await served.is_idle()


def doubling(seen: list[tuple[int, ...]], *shape: int, max_batch_size: int = 0) -> Function:
    """A model that keeps the shapes that it gets."""

    def infer(inputs: Arrays) -> Any:
        seen.append(inputs["x"].shape)
        return {"y": inputs["x"] * 2}

    return Function(infer, **shaped(*shape, max_batch_size=max_batch_size))


def shaped(*shape: int, max_batch_size: int = 0) -> dict[str, Any]:
    """What a model says of `x` and `y` that have the same shape."""
    x, y = ([triglot.TensorSpec(name, "INT32", shape)] for name in "xy")
    return {"inputs": x, "outputs": y, "max_batch_size": max_batch_size}


@pytest.mark.parametrize(
    ("own", "max_batch_size", "plain", "asked", "shapes"),
    [
        # A tensor of the dims of a model that batches is a batch of one for it; else its first dim is the batch.
        ((2,), 0, (2,), (2,), [(1, 2), (2,)]),
        ((-1,), 0, (2,), (2,), [(1, 2), (2,)]),
        ((4, 2), 0, (-1, 2), (4, 2), [(4, 2), (4, 2)]),
        # For a model that does not, a batch of one is one, unless its shape has that dim, too.
        ((-1, 2), 8, (2,), (1, 2), [(1, 2), (2,)]),
        ((-1, 2), 8, (-1, 2), (1, 2), [(1, 2), (1, 2)]),
        ((-1, 2), 8, (2,), (3, 2), [(3, 2)]),
    ],
)
async def test_steps_with_and_without_a_batch(
    own: tuple[int, ...],
    max_batch_size: int,
    plain: tuple[int, ...],
    asked: tuple[int, ...],
    shapes: list[tuple[int, ...]],
) -> None:
    """A tensor has the shape of the model that takes it, with the batch dim or without."""
    seen: list[tuple[int, ...]] = []
    steps = step("batched", "x", "m"), step("plain", "m", "y")
    models = {
        "e": ensemble(*steps, **shaped(*own, max_batch_size=max_batch_size)),
        "batched": doubling(seen, -1, 2, max_batch_size=8),
        "plain": doubling(seen, *plain),
    }
    x = np.ones(asked, np.int32)
    async with serving(models) as served:
        if len(shapes) == 2:
            assert (await served.infer("e", x)).tolist() == (x * 4).tolist()
        else:
            error = await served.error("e", x)
            assert error.code is Code.INVALID_ARGUMENT
            assert error.message.startswith("in ensemble 'e', unexpected shape for input 'x' for model 'plain'")
        assert seen == shapes


async def test_what_one_member_says_of_its_scheduling_is_not_the_batchs() -> None:
    """The model that the batch calls has neither its deadline nor its priority."""
    first, gate = threading.Event(), threading.Event()
    batches: list[Call] = []
    calls: list[Call] = []

    def outer(inputs: Arrays, call: Call) -> Any:
        batches.append(call)
        first.set()
        assert gate.wait(SECONDS)
        return call.infer("inner", inputs)

    def inner(inputs: Arrays, call: Call) -> Any:
        calls.append(call)
        return {"y": inputs["x"] * 2}

    scheduling = BATCHED | {
        "dynamic_batching": triglot.DynamicBatching(priority_levels=2, default_priority_level=1)
    }
    async with serving({"outer": Function(outer, **scheduling), "inner": Function(inner)}) as served:
        unbatched = asyncio.create_task(served.infer("outer", ints(1)))
        await until(first.is_set)
        own: list[tuple[Call, dict[str, Any]]] = [
            (Call(deadline=time.monotonic() + SECONDS), {"priority": 1, "color": "red"}),
            (Call(), {"color": "red"}),
        ]
        members = []
        for at, (call, parameters) in enumerate(own):
            members.append(asyncio.create_task(served.infer("outer", ints(at + 2), call, parameters=parameters)))
            await until(lambda: served.server.dataplane.queue_depth() == len(members))
        gate.set()
        assert [answer.tolist() for answer in await asyncio.gather(unbatched, *members)] == [[2], [4], [6]]
        assert [len(call.members) for call in batches] == [1, 2]
        assert batches[1].members[0].deadline is not None
        assert (calls[1].deadline, calls[1].scheduling, calls[1].parameters) == (None, PLAIN, {"color": "red"})


@pytest.mark.parametrize("leaving", [1, 3])
async def test_a_batch_calls_another_model(leaving: int) -> None:
    """On behalf of all of its members: it continues while one of them waits, and ends with the last of them."""
    first, gate, begun, inner_gate = (threading.Event() for _ in range(4))
    calls: list[Call] = []

    def outer(inputs: Arrays, call: Call) -> Any:
        if len(call.members) == 1:
            first.set()
            assert gate.wait(SECONDS)
            return {"y": inputs["x"]}
        return call.infer("inner", inputs)

    def inner(inputs: Arrays, call: Call) -> Any:
        calls.append(call)
        begun.set()
        assert inner_gate.wait(SECONDS)
        return {"y": inputs["x"] * 2}

    async with serving({"outer": Function(outer, **BATCHED), "inner": Function(inner)}) as served:
        unbatched = asyncio.create_task(served.infer("outer", ints(1)))
        await until(first.is_set)
        members = [asyncio.create_task(served.infer("outer", ints(at))) for at in (2, 3, 4)]
        await until(lambda: served.server.dataplane.queue_depth() == 3)
        gate.set()
        assert (await unbatched).tolist() == [1]
        await until(begun.is_set)
        for member in members[:leaving]:
            member.cancel()
        await asyncio.wait(members[:leaving])
        await until(lambda: calls[0].cancelled is (leaving == 3))
        inner_gate.set()
        answers = await asyncio.gather(*members[leaving:])
        assert [answer.tolist() for answer in answers] == [[6], [8]][leaving - 1 :]
        await served.is_idle()
