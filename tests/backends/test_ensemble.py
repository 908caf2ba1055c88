"""Ensembles at work: what runs when, what is handed on, and how a request through several models ends."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import triglot
from tests.served_models import (
    SECONDS,
    Arrays,
    Function,
    Gated,
    Served,
    ensemble,
    ints,
    serving,
    step,
    twice,
    twice_on_loop,
)
from tests.waiting import until
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING
from triglot.core.types import InferenceRequest, InputTensor

AB = [triglot.TensorSpec(name, "INT32", [-1]) for name in ("a", "b")]


def add(inputs: Arrays) -> dict[str, Any]:
    return {"y": inputs["a"] + inputs["b"]}


def adding(a: str, b: str, given: str, model: str = "add") -> triglot.Step:
    return triglot.Step(model, {"a": a, "b": b}, {"y": given})


ADD = Function(add, inputs=AB)


async def test_steps_one_after_the_other() -> None:
    """In whatever order they are written."""
    chain = ensemble(step("twice", "m", "y"), step("loop", "x", "m"))
    models = {"a_chain": chain, "twice": Function(twice), "loop": Function(twice_on_loop)}
    async with serving(models) as served:
        assert (await served.infer("a_chain", ints(1, 2, 3))).tolist() == [4, 8, 12]
        assert served.server.dataplane.metadata(EVERYTHING, "a_chain").platform == "ensemble"
        await served.is_idle()


async def test_steps_side_by_side() -> None:
    """Neither ends before both have begun."""
    together = threading.Barrier(2)

    def meet(inputs: Arrays) -> Any:
        together.wait(SECONDS)
        return twice(inputs)

    fork = ensemble(step("one", "x", "p"), step("two", "x", "q"), adding("p", "q", "y"))
    async with serving({"fork": fork, "one": Function(meet), "two": Function(meet), "add": ADD}) as served:
        assert (await served.infer("fork", ints(5))).tolist() == [20]


async def test_a_step_waits_for_its_own_tensors_only() -> None:
    """The long way round does not hold up the step that needs nothing of it."""
    gated, passed = Gated(), threading.Event()

    def quick(inputs: Arrays) -> Any:
        passed.set()
        return twice(inputs)

    fork = ensemble(
        step("gated", "x", "slow"),
        step("twice", "x", "once"),
        step("quick", "once", "fast"),
        adding("slow", "fast", "y"),
    )
    models = {"fork": fork, "gated": gated, "twice": Function(twice), "quick": Function(quick), "add": ADD}
    async with serving(models) as served:
        asked = asyncio.create_task(served.infer("fork", ints(1)))
        await until(passed.is_set)
        gated.open_point("infer")
        assert (await asked).tolist() == [5]


async def test_nothing_is_copied_between_the_steps() -> None:
    made: list[Any] = []
    taken: list[Any] = []

    def keep(inputs: Arrays) -> Any:
        taken.append(inputs["x"])
        made.append(inputs["x"] + 1)
        return {"y": made[-1]}

    chain = ensemble(step("keep", "x", "m"), step("loop", "m", "n"), step("keep", "n", "y"))

    async def keep_on_loop(inputs: Arrays) -> Any:
        return keep(inputs)

    async with serving({"chain": chain, "keep": Function(keep), "loop": Function(keep_on_loop)}) as served:
        x = ints(*range(1000))
        answer = await served.infer("chain", x)
    assert answer[0] == 3
    assert np.shares_memory(taken[0], x)
    for before, after in zip(made, [*taken[1:], answer], strict=True):
        assert np.shares_memory(before, after)


async def test_unused_tensor_is_released() -> None:
    first: list[weakref.ref[Any]] = []
    alive: list[bool] = []

    async def make(inputs: Arrays) -> Any:
        array = inputs["x"] * 2
        first.append(weakref.ref(array))
        return {"y": array}

    async def look(inputs: Arrays) -> Any:
        alive.append(first[0]() is not None)
        return {"y": inputs["x"] + 1}

    chain = ensemble(step("make", "x", "m"), step("look", "m", "n"), step("look", "n", "y"))
    async with serving({"chain": chain, "make": Function(make), "look": Function(look)}) as served:
        assert (await served.infer("chain", ints(1))).tolist() == [4]
    assert alive == [True, False]


async def test_outputs() -> None:
    """Those of several steps, also one that another step takes; an unused tensor is no output."""
    specs = [triglot.TensorSpec(name, "INT32", [-1]) for name in ("y", "m")]
    model = ensemble(step("twice", "x", "m"), step("twice", "m", "y"), step("twice", "m", "unused"), outputs=specs)
    async with serving({"model": model, "twice": Function(twice)}) as served:
        dataplane = served.server.dataplane
        metadata = dataplane.metadata(EVERYTHING, "model")
        assert [spec.name for spec in metadata.signature.outputs] == ["y", "m"]
        assert (await served.infer("model", ints(1))).tolist() == [4]
        assert (await served.infer("model", ints(1), outputs=["y"])).tolist() == [4]
        error = await served.error("model", ints(1), outputs=["unused"])
        assert error.code is Code.INVALID_ARGUMENT


async def test_only_steps_that_requested_outputs_need_are_run() -> None:
    seen: list[str] = []

    def named(name: str) -> Function:
        def note(inputs: Arrays) -> Any:
            seen.append(name)
            return twice(inputs)

        return Function(note)

    specs = [triglot.TensorSpec(name, "INT32", [-1]) for name in ("y", "z")]
    steps = [step("a", "x", "m"), step("b", "m", "y"), step("c", "m", "z"), step("d", "z", "unused")]
    model = ensemble(*steps, outputs=specs)
    async with serving({"e": model} | {name: named(name) for name in "abcd"}) as served:
        for outputs, names in ((["y"], "ab"), (["z"], "ac"), (["z", "y"], "abcd"), ([], "abcd"), (["y"], "ab")):
            with suppress(RuntimeError):  # There is no `y`.
                await served.infer("e", ints(1), outputs=outputs)
            assert "".join(sorted(seen)) == names
            seen.clear()


async def test_what_a_step_leaves_out() -> None:
    """The ensemble's output is not there, and a step that can do without it runs without."""

    def first(inputs: Arrays) -> Any:
        given = {"y": inputs["x"] * 2, "z": inputs["x"] * 3}
        if not inputs["x"][0]:
            del given["z"]
        return triglot.Answer(given, partial=True)

    def second(inputs: Arrays) -> Any:
        return {"y": inputs["x"] + inputs.get("more", 100)}

    more = triglot.TensorSpec("more", "INT32", [-1], optional=True)
    specs = [triglot.TensorSpec(name, "INT32", [-1]) for name in ("y", "z")]
    steps = [
        triglot.Step("first", {"x": "x"}, {"y": "m", "z": "z"}),
        triglot.Step("second", {"x": "m", "more": "z"}, {"y": "y"}),
    ]
    models = {
        "e": ensemble(*steps, outputs=specs),
        "strict": ensemble(steps[0], triglot.Step("add", {"a": "m", "b": "z"}, {"y": "y"})),
        "first": Function(first, outputs=specs),
        "second": Function(second, inputs=[*Function.inputs, more]),
        "add": ADD,
    }
    async with serving(models) as served:
        for value, expected in ((1, {"y": [5], "z": [3]}), (0, {"y": [100]})):
            x = ints(value)
            request = InferenceRequest("e", inputs=[InputTensor("x", "INT32", x.shape, x)])
            response = await served.server.dataplane.infer(request, Call())
            assert {output.name: output.array.tolist() for output in response.outputs} == expected
        assert (await served.infer("strict", ints(1))).tolist() == [5]
        error = await served.error("strict", ints(0))
        assert error.message.startswith("in ensemble 'strict', expected 2 inputs but got 1 inputs for model 'add'")
        await served.is_idle()


async def test_ensembles_of_ensembles() -> None:
    models: dict[str, triglot.Model] = {"twice": Function(twice)}
    models["a"] = ensemble(step("b", "x", "m"), step("twice", "m", "y"))
    models["b"] = ensemble(step("twice", "x", "m"), step("c", "m", "y"))
    models["c"] = ensemble(step("twice", "x", "y"))
    async with serving(models) as served:
        assert (await served.infer("a", ints(1))).tolist() == [8]


async def test_what_the_request_says_reaches_every_step() -> None:
    calls: list[Call] = []

    def keep(inputs: Arrays, call: Call) -> Any:
        calls.append(call)
        return {"y": inputs["x"]}

    chain = ensemble(step("keep", "x", "m"), step("keep", "m", "y"))
    async with serving({"chain": chain, "keep": Function(keep)}) as served:
        parameters = {"sequence_id": 5, "sequence_end": True, "priority": 2, "color": "red"}
        deadline = time.monotonic() + SECONDS
        await served.infer("chain", ints(1), Call(deadline), id="seven", parameters=dict(parameters))
    assert [call.parameters for call in calls] == [parameters] * 2
    assert [call.request_id for call in calls] == ["seven"] * 2
    assert [call.deadline for call in calls] == [deadline] * 2
    assert [(call.scheduling.sequence_id, call.scheduling.sequence_end) for call in calls] == [(5, True)] * 2


@pytest.mark.parametrize(("given", "reported"), [(5, 5), ("five", "five"), (2**64 - 1, -1)])
async def test_the_answer_says_of_which_sequence_it_is(given: int | str, reported: int | str) -> None:
    """As Triton's ensembles do."""
    models = {"e": ensemble(step("twice", "x", "y")), "twice": Function(twice)}
    async with serving(models) as served:
        for flags in ({"sequence_start": True}, {}, {"sequence_end": True}):
            parameters: dict[str, Any] = {"sequence_id": given, **flags}
            request = InferenceRequest(
                "e", inputs=[InputTensor("x", "INT32", (1,), ints(1))], parameters=parameters
            )
            response = await served.server.dataplane.infer(request, Call())
            expected = {"sequence_id": reported, "sequence_start": False, "sequence_end": False} | flags
            assert response.parameters == expected


# --- bounds ---


@pytest.mark.parametrize("limit", [0, 1, 2])
async def test_calls_of_a_step_at_a_time(limit: int) -> None:
    """Further requests wait for their turn; one of them that leaves takes none away."""
    requests, instances = 6, 4
    entered, gate = threading.Semaphore(0), threading.Event()
    most, inside, lock = 0, 0, threading.Lock()

    def count(inputs: Arrays) -> Any:
        nonlocal most, inside
        with lock:
            inside += 1
            most = max(most, inside)
        entered.release()
        assert gate.wait(SECONDS)
        with lock:
            inside -= 1
        return twice(inputs)

    model = ensemble(step("count", "x", "y"), max_inflight_requests=limit)
    models = {"e": model, "count": Function(count, instances=instances)}
    async with serving(models) as served:
        asked = [asyncio.create_task(served.infer("e", ints(at))) for at in range(requests)]
        for _ in range(limit or instances):
            assert await asyncio.to_thread(entered.acquire, timeout=SECONDS)
        held = requests if limit == 0 else limit
        assert served.leases() == {"e": requests, "count": held}
        asked[-1].cancel()
        gate.set()
        answers = await asyncio.gather(*asked[:-1])
        assert [answer.tolist() for answer in answers] == [[2 * at] for at in range(requests - 1)]
        assert most == (limit or instances)
        await served.is_idle()


# --- any graph ---


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[tuple[int, int, str]], list[int]]:
    """Sums of two earlier tensors each, by which model, the first two being given; and the order of the steps."""
    count = draw(st.integers(1, 8))
    sums = [
        (draw(st.integers(0, at + 1)), draw(st.integers(0, at + 1)), draw(st.sampled_from(["add", "add_on_loop"])))
        for at in range(count)
    ]
    return sums, draw(st.permutations(range(count)))


def made_of(sums: list[tuple[int, int, str]], order: list[int]) -> triglot.Ensemble:
    """The ensemble of all sums; unused ones are its outputs, and those that are given, too."""
    steps = [adding(f"t{sums[at][0]}", f"t{sums[at][1]}", f"t{at + 2}", sums[at][2]) for at in order]
    # What is given is taken in any case.
    steps.append(adding("t0", "t1", f"t{len(sums) + 2}"))
    model = triglot.Ensemble()
    model.inputs = [triglot.TensorSpec(f"t{at}", "INT32", [-1]) for at in range(2)]
    model.outputs = [triglot.TensorSpec(f"t{at}", "INT32", [-1]) for at in range(2, len(sums) + 3)]
    model.steps = steps
    return model


@given(st.lists(graphs(), min_size=1, max_size=4))
@settings(max_examples=15)
def test_any_graph_gives_the_right_sums(all_graphs: list[tuple[list[tuple[int, int, str]], list[int]]]) -> None:
    async def add_on_loop(inputs: Arrays) -> dict[str, Any]:
        return add(inputs)

    async def run() -> None:
        models: dict[str, triglot.Model] = {
            f"graph_{at}": made_of(sums, order) for at, (sums, order) in enumerate(all_graphs)
        }
        models |= {"add": Function(add, inputs=AB, instances=2), "add_on_loop": Function(add_on_loop, inputs=AB)}
        async with serving(models) as served:
            await asyncio.gather(*[ask(served, f"graph_{at}", sums) for at, (sums, _) in enumerate(all_graphs)])
            await served.is_idle()

    asyncio.run(run())


async def ask(served: Served, name: str, sums: list[tuple[int, int, str]]) -> None:
    values = [3, 5]
    for a, b, _ in sums:
        values.append(values[a] + values[b])
    call = Call()
    call.reach = served.server.dataplane.reach
    answer = await call.infer(name, {"t0": ints(3), "t1": ints(5)})
    expected = {f"t{at}": [value] for at, value in enumerate(values) if at > 1}
    assert {key: array.tolist() for key, array in answer.items()} == expected | {f"t{len(sums) + 2}": [8]}
