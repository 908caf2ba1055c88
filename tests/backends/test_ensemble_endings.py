"""How a request through several models ends when it does not go well."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from typing import Any

import pytest

import triglot
from tests.served_models import Arrays, Function, Gated, both, calling, ensemble, ints, serving, step, twice
from tests.waiting import until
from triglot.core.call import Call
from triglot.core.errors import Code

AB = [triglot.TensorSpec(name, "INT32", [-1]) for name in ("a", "b")]
ADD = Function(lambda inputs: {"y": inputs["a"] + inputs["b"]}, inputs=AB)


def adding(a: str, b: str, given: str) -> triglot.Step:
    return triglot.Step("add", {"a": a, "b": b}, {"y": given})


async def test_an_error_of_a_step_ends_the_others() -> None:
    gated = Gated()

    def fail(_: Arrays) -> Any:
        gated.wait_until_at("infer")
        raise triglot.FailedPrecondition("no such word")

    fork = ensemble(step("gated", "x", "p"), step("fail", "x", "q"), adding("p", "q", "y"))
    models = {"fork": fork, "gated": gated, "fail": Function(fail), "add": ADD}
    async with serving(models) as served:
        error = await served.error("fork", ints(1))
        text = "in ensemble 'fork', model 'fail': no such word"
        assert (error.code, error.message) == (Code.FAILED_PRECONDITION, text)
        await until(lambda: gated.calls[0].cancelled)
        gated.open_point("infer")
        await served.is_idle()


async def test_errors_of_nested_steps_say_the_way() -> None:
    def fail(_: Arrays) -> Any:
        raise ZeroDivisionError

    models = {
        "outer": ensemble(step("inner", "x", "y")),
        "inner": ensemble(step("fail", "x", "y")),
        "fail": Function(fail),
    }
    async with serving(models) as served:
        error = await served.error("outer", ints(1))
        assert error.code is Code.INTERNAL
        assert error.message.startswith("in ensemble 'outer', in ensemble 'inner', fail version 1 failed, error ")


async def test_a_tensor_that_does_not_fit_after_all() -> None:
    """Where sizes are not said, only a request shows them."""
    two = [triglot.TensorSpec("x", "INT32", [2])]
    models = {"e": ensemble(step("two", "x", "y")), "two": Function(twice, inputs=two)}
    async with serving(models) as served:
        assert (await served.infer("e", ints(1, 2))).tolist() == [2, 4]
        error = await served.error("e", ints(1))
        assert error.code is Code.INVALID_ARGUMENT
        assert error.message.startswith("in ensemble 'e', unexpected shape for input 'x' for model 'two'.")


@pytest.mark.parametrize("caller", ["ensemble", "thread", "loop"])
async def test_an_error_keeps_nothing_of_the_request(caller: str) -> None:
    """Not even until the garbage collector comes by."""

    def fail(_: Arrays) -> Any:
        raise triglot.NotFound("no such word")

    models = {
        "e": ensemble(step("twice", "x", "m"), step("fail", "m", "y"))
        if caller == "ensemble"
        else calling("fail", on_loop=caller == "loop"),
        "twice": Function(twice),
        "fail": Function(fail),
    }
    async with serving(models) as served:
        gc.disable()
        try:
            x = ints(*range(1000))
            kept = weakref.ref(x)
            error = await served.error("e", x)
            assert error.code is Code.NOT_FOUND
            del error, x
            await until(lambda: kept() is None)
        finally:
            gc.enable()


@both
@pytest.mark.parametrize("at_a_time", [0, 2])
async def test_many_steps_that_fail_keep_nothing_of_the_request(at_a_time: int, on_loop: bool) -> None:
    """Whether they fail as well, are cancelled, or wait for their turn."""

    def fail(_: Arrays) -> Any:
        raise triglot.NotFound("no such word")

    async def fail_on_loop(_: Arrays) -> Any:
        raise triglot.NotFound("no such word")

    steps = [step("fail", "x", f"a{at}") for at in range(20)]
    wide = ensemble(*steps, step("twice", "a0", "y"), max_inflight_requests=at_a_time)
    models = {"wide": wide, "fail": Function(fail_on_loop if on_loop else fail), "twice": Function(twice)}
    async with serving(models) as served:
        gc.collect()
        gc.disable()
        try:
            x = ints(*range(1000))
            kept = weakref.ref(x)
            error = await served.error("wide", x)
            assert error.code is Code.NOT_FOUND
            del error, x
            await until(lambda: kept() is None)
        finally:
            gc.enable()


def chain_with_a_gate(place: int) -> tuple[dict[str, triglot.Model], Gated]:
    """Three steps, one of which waits."""
    gated = Gated()
    names = ["gated" if at == place else "twice" for at in range(3)]
    tensors = ["x", "m", "n", "y"]
    steps = [step(name, tensors[at], tensors[at + 1]) for at, name in enumerate(names)]
    return {"chain": ensemble(*steps), "gated": gated, "twice": Function(twice)}, gated


@pytest.mark.parametrize("place", range(3))
async def test_the_caller_leaves_during_each_step(place: int) -> None:
    models, gated = chain_with_a_gate(place)
    async with serving(models) as served:
        asked = asyncio.create_task(served.infer("chain", ints(1)))
        await gated.until_at("infer")
        asked.cancel()
        await until(lambda: gated.calls[0].cancelled)
        gated.open_point("infer")
        await served.is_idle()
        assert asked.cancelled()
        assert (await served.infer("chain", ints(1))).tolist() == [4]
        assert len(gated.calls) == 2


@pytest.mark.parametrize("place", range(3))
async def test_the_caller_leaves_while_a_step_is_queued(place: int) -> None:
    """It is never started."""
    models, gated = chain_with_a_gate(place)
    async with serving(models) as served:
        busy = asyncio.create_task(served.infer("gated", ints(7)))
        await gated.until_at("infer")
        asked = asyncio.create_task(served.infer("chain", ints(1)))
        await until(lambda: served.server.dataplane.queue_depth() == 1)
        asked.cancel()
        await until(lambda: served.server.dataplane.queue_depth() == 0)
        gated.open_point("infer")
        assert (await busy).tolist() == [7]
        await served.is_idle()
        assert len(gated.calls) == 1
        assert (await served.infer("chain", ints(1))).tolist() == [4]


@pytest.mark.parametrize("place", range(3))
async def test_the_deadline_passes_during_each_step(place: int) -> None:
    models, gated = chain_with_a_gate(place)
    async with serving(models) as served:
        error = await served.error("chain", ints(1), Call(time.monotonic() + 0.2))
        assert error.code is Code.DEADLINE_EXCEEDED
        gated.open_point("infer")
        await served.is_idle()
        assert (await served.infer("chain", ints(1))).tolist() == [4]
