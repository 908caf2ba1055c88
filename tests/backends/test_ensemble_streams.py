"""Ensembles with decoupled steps: each of their answers goes through the steps after it, and is answered then."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from typing import Any

import pytest

import triglot
from tests.served_models import Arrays, Function, Gated, Served, ensemble, ints, serving, step, twice
from tests.waiting import until
from triglot.core.awaiting import Responses
from triglot.core.call import Call
from triglot.core.errors import Code, ServingError
from triglot.core.operation import EVERYTHING
from triglot.core.types import InferenceRequest, InputTensor
from triglot.dataplane.request_path import Decoupled
from triglot.model.ensemble import MAX_RUNS

AB = [triglot.TensorSpec(name, "INT32", [-1]) for name in ("a", "b")]


def each(inputs: Arrays) -> Iterator[dict[str, Any]]:
    """An `infer`: each element by itself."""
    for value in inputs["x"]:
        yield {"y": ints(value)}


async def each_on_loop(inputs: Arrays) -> AsyncGenerator[dict[str, Any], None]:
    for value in inputs["x"]:
        yield {"y": ints(value)}


def below(inputs: Arrays) -> Iterator[dict[str, Any]]:
    """An `infer`: the numbers below the one that it gets."""
    for value in range(int(inputs["x"][0])):
        yield {"y": ints(value)}


both = pytest.mark.parametrize("infer", [each, each_on_loop], ids=["thread", "loop"])


def answers(served: Served, *values: int, model: str = "e", **fields: Any) -> Responses:
    x = ints(*values)
    request = InferenceRequest(model, inputs=[InputTensor("x", "INT32", x.shape, x)], **fields)
    return served.server.dataplane.infer_stream(request, Call())


async def streamed(served: Served, *values: int, **fields: Any) -> list[dict[str, list[int]]]:
    """All of them, by the names of their outputs."""
    return [
        {output.name: output.array.tolist() for output in response.outputs}
        async for response in answers(served, *values, **fields)
    ]


async def ys(served: Served, *values: int, **fields: Any) -> list[int]:
    return [number for answer in await streamed(served, *values, **fields) for number in answer["y"]]


@both
@pytest.mark.parametrize("count", [0, 1, 5, 3 * MAX_RUNS])
async def test_each_response_runs_the_following_steps(infer: Any, count: int) -> None:
    models = {
        "e": ensemble(step("twice", "x", "m"), step("each", "m", "n"), step("twice", "n", "y")),
        "each": Function(infer),
        "twice": Function(twice),
    }
    async with serving(models) as served:
        assert await ys(served, *range(count)) == [4 * value for value in range(count)]
        assert served.server.dataplane.metadata(EVERYTHING, "e").decoupled
        await served.is_idle()


@both
async def test_the_decoupled_step_is_the_last(infer: Any) -> None:
    models = {
        "e": ensemble(step("twice", "x", "m"), step("each", "m", "y")),
        "each": Function(infer),
        "twice": Function(twice),
    }
    async with serving(models) as served:
        assert await streamed(served, 1, 2) == [{"y": [2]}, {"y": [4]}]


async def test_order() -> None:
    """Answers leave as those of the decoupled step came, whichever is there first."""
    second = asyncio.Event()

    async def swap(inputs: Arrays) -> Any:
        if inputs["x"][0] == 1:
            await second.wait()
        else:
            second.set()
        return {"y": inputs["x"]}

    models = {
        "e": ensemble(step("each", "x", "m"), step("swap", "m", "y")),
        "each": Function(each),
        "swap": Function(swap),
    }
    async with serving(models) as served:
        assert await ys(served, 1, 2) == [1, 2]


async def test_steps_that_take_parts_of_the_same_answer() -> None:
    steps = [
        step("each", "x", "m"),
        step("twice", "m", "p"),
        step("twice", "p", "q"),
        triglot.Step("add", {"a": "m", "b": "q"}, {"y": "y"}),
    ]
    models = {
        "e": ensemble(*steps),
        "each": Function(each),
        "twice": Function(twice),
        "add": Function(lambda inputs: {"y": inputs["a"] + inputs["b"]}, inputs=AB),
    }
    async with serving(models) as served:
        assert await ys(served, 1, 2, 3) == [5, 10, 15]


async def test_streams_of_streams() -> None:
    """Of one ensemble, and of an ensemble that is a step."""
    models: dict[str, triglot.Model] = {
        "e": ensemble(step("each", "x", "m"), step("below", "m", "n"), step("twice", "n", "y")),
        "outer": ensemble(step("each", "x", "m"), step("inner", "m", "y")),
        "inner": ensemble(step("below", "x", "m"), step("twice", "m", "y")),
        "each": Function(each),
        "below": Function(below),
        "twice": Function(twice),
    }
    async with serving(models) as served:
        for name in ("e", "outer"):
            assert await ys(served, 3, 0, 2, model=name) == [0, 2, 4, 0, 2]
            many = 3 * MAX_RUNS
            assert await ys(served, many, many, model=name) == [2 * number for number in range(many)] * 2
        await served.is_idle()


@both
async def test_a_stream_through_the_same_model_again(infer: Any) -> None:
    """Whose only instance is free for it when all answers of the first stream are read."""
    models = {
        "e": ensemble(step("each", "x", "m"), step("twice", "m", "n"), step("each", "n", "y")),
        "each": Function(infer),
        "twice": Function(twice),
    }
    async with serving(models) as served:
        many = range(4 * MAX_RUNS)
        assert await ys(served, *many) == [2 * number for number in many]
        await served.is_idle()


async def test_a_decoupled_step_that_leads_to_no_output() -> None:
    """It is run to its end where all outputs are requested, and there is one answer."""
    seen: list[int] = []

    def note(inputs: Arrays) -> Any:
        seen.append(int(inputs["x"][0]))
        return {"y": inputs["x"]}

    outputs = [triglot.TensorSpec(name, "INT32", [-1]) for name in ("y", "z")]
    steps = [step("each", "x", "m"), step("note", "m", "n"), step("twice", "x", "y"), step("twice", "x", "z")]
    models = {
        "e": ensemble(*steps, outputs=outputs),
        "each": Function(each),
        "note": Function(note),
        "twice": Function(twice),
    }
    async with serving(models) as served:
        assert await streamed(served, 1, 2) == [{"y": [2, 4], "z": [2, 4]}]
        assert sorted(seen) == [1, 2]
        assert await streamed(served, 1, 2, outputs=["y"]) == [{"y": [2, 4]}]
        assert sorted(seen) == [1, 2]


async def test_what_an_answer_leaves_out() -> None:
    def some(inputs: Arrays) -> Iterator[triglot.Answer]:
        for value in inputs["x"]:
            outputs = {"y": ints(value), "z": ints(-value)}
            yield triglot.Answer(
                {name: outputs[name] for name in outputs if value != 1 or name == "y"}, partial=True
            )

    outputs = [triglot.TensorSpec(name, "INT32", [-1]) for name in ("y", "z")]
    steps = [triglot.Step("some", {"x": "x"}, {"y": "m", "z": "z"}), step("twice", "m", "y")]
    models = {
        "e": ensemble(*steps, outputs=outputs),
        "some": Function(some, outputs=outputs),
        "twice": Function(twice),
    }
    async with serving(models) as served:
        assert await streamed(served, 1, 2) == [{"y": [2]}, {"y": [4], "z": [-2]}]
        assert await streamed(served, 1, 2, outputs=["z"]) == [{}, {"z": [-2]}]


async def test_a_stream_that_becomes_a_sequence() -> None:
    """An answer may say which sequence it belongs to, for the steps after it, and the ensemble's own answer."""
    calls: list[Call] = []

    def begin_and_end(inputs: Arrays) -> Iterator[triglot.Answer]:
        last = len(inputs["x"]) - 1
        for at, value in enumerate(inputs["x"]):
            parameters: dict[str, Any] = {"sequence_id": 7}
            parameters |= {"sequence_start": True} if at == 0 else {"sequence_end": True} if at == last else {}
            yield triglot.Answer({"y": ints(value)}, parameters)

    def total(inputs: Arrays, call: Call) -> Any:
        calls.append(call)
        return {"y": inputs["x"]}

    models = {
        "e": ensemble(step("all", "x", "m"), step("total", "m", "y")),
        "all": Function(begin_and_end),
        "total": Function(total, sequence_batching=triglot.SequenceBatching()),
    }
    async with serving(models) as served:
        parameters = [
            response.parameters async for response in answers(served, 1, 2, 3, parameters={"color": "red"})
        ]
    flags = [(True, False), (False, False), (False, True)]
    assert parameters == [{"sequence_id": 7, "sequence_start": start, "sequence_end": end} for start, end in flags]
    scheduling = [call.scheduling for call in calls]
    assert [(flags.sequence_id, flags.sequence_start, flags.sequence_end) for flags in scheduling] == [
        (7, *flag) for flag in flags
    ]
    assert [call.parameters["color"] for call in calls] == ["red"] * 3


async def test_one_answer_is_not_asked_for() -> None:
    models = {"e": ensemble(step("each", "x", "y")), "each": Function(each)}
    async with serving(models) as served:
        with pytest.raises(Decoupled):
            await served.infer("e", ints(1))


# --- how they end ---


async def test_an_error_of_a_step_ends_the_stream() -> None:
    """After the answers before it."""
    closed = threading.Event()

    def endless(_: Arrays) -> Iterator[dict[str, Any]]:
        value = 0
        try:
            while True:
                yield {"y": ints(value)}
                value += 1
        finally:
            closed.set()

    def fail(inputs: Arrays) -> Any:
        if inputs["x"][0] == 2:
            raise triglot.FailedPrecondition("no such word")
        return {"y": inputs["x"]}

    models = {
        "e": ensemble(step("endless", "x", "m"), step("fail", "m", "y")),
        "endless": Function(endless),
        "fail": Function(fail),
    }
    async with serving(models) as served:
        stream = answers(served, 0)
        assert [(await anext(stream)).outputs[0].array.tolist() for _ in range(2)] == [[0], [1]]
        with pytest.raises(ServingError) as caught:
            await anext(stream)
        assert caught.value.code is Code.FAILED_PRECONDITION
        assert caught.value.message == "in ensemble 'e', model 'fail': no such word"
        await until(closed.is_set)
        await served.is_idle()


@both
async def test_an_error_of_the_decoupled_step(infer: Any) -> None:
    if infer is each:

        def fail(inputs: Arrays) -> Iterator[dict[str, Any]]:
            yield from each(inputs)
            raise triglot.FailedPrecondition("no more words")

        model = Function(fail)
    else:

        async def fail_on_loop(inputs: Arrays) -> AsyncGenerator[dict[str, Any], None]:
            async for answer in each_on_loop(inputs):
                yield answer
            raise triglot.FailedPrecondition("no more words")

        model = Function(fail_on_loop)
    models = {
        "e": ensemble(step("fail", "x", "m"), step("twice", "m", "y")),
        "fail": model,
        "twice": Function(twice),
    }
    async with serving(models) as served:
        stream = answers(served, 7)
        assert (await anext(stream)).outputs[0].array.tolist() == [14]
        with pytest.raises(ServingError) as caught:
            await anext(stream)
        assert caught.value.message == "in ensemble 'e', model 'fail': no more words"
        await served.is_idle()


async def test_a_reader_who_leaves() -> None:
    """The decoupled step ends, and so do the steps that its answers pass."""
    gated, closed = Gated(), threading.Event()

    def endless(inputs: Arrays) -> Iterator[dict[str, Any]]:
        try:
            while True:
                yield {"y": inputs["x"]}
        finally:
            closed.set()

    models = {
        "e": ensemble(step("endless", "x", "m"), step("gated", "m", "y")),
        "endless": Function(endless),
        "gated": gated,
    }
    async with serving(models) as served:
        reading = asyncio.create_task(ys(served, 1))
        await gated.until_at("infer")
        reading.cancel()
        await until(closed.is_set)
        await until(lambda: gated.calls[0].cancelled)
        gated.open_point("infer")
        await served.is_idle()


@pytest.mark.parametrize("leaves", [False, True])
async def test_what_ends_early_keeps_nothing(leaves: bool) -> None:
    """Not even until the garbage collector comes by: of answers in flight, and of the one that failed."""
    made: list[weakref.ref[Any]] = []

    def many(_: Arrays) -> Iterator[dict[str, Any]]:
        for value in range(10):
            answer = ints(*range(value, 1000))
            made.append(weakref.ref(answer))
            yield {"y": answer}

    def fail(inputs: Arrays) -> Any:
        if inputs["x"][0] == 3:
            raise triglot.NotFound("no such word")
        return {"y": inputs["x"]}

    models = {
        "e": ensemble(step("many", "x", "m"), step("fail", "m", "y")),
        "many": Function(many),
        "fail": Function(fail),
    }
    async with serving(models) as served:
        gc.collect()
        gc.disable()
        try:
            stream = answers(served, 0)
            await anext(stream)
            if leaves:
                await stream.aclose()
            else:
                with pytest.raises(ServingError):
                    _ = [response async for response in stream]
            del stream
            await until(lambda: all(array() is None for array in made))
        finally:
            gc.enable()


# --- bounds ---


@pytest.mark.parametrize("limit", [0, 1, 3])
async def test_the_decoupled_step_is_held_up(limit: int) -> None:
    """Its answers in flight are limited; nor are read before the reader has read."""
    asked, gate = 0, asyncio.Event()
    inside = 0
    most = 0

    async def endless(inputs: Arrays) -> AsyncGenerator[dict[str, Any], None]:
        nonlocal asked
        while True:
            asked += 1
            yield {"y": inputs["x"]}

    async def slow(inputs: Arrays) -> Any:
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        await gate.wait()
        inside -= 1
        return {"y": inputs["x"]}

    bound = limit or MAX_RUNS
    model = ensemble(step("endless", "x", "m"), step("slow", "m", "y"), max_inflight_requests=limit)
    async with serving({"e": model, "endless": Function(endless), "slow": Function(slow)}) as served:
        async with aclosing(answers(served, 1)) as stream:
            first = asyncio.ensure_future(anext(stream))
            await until(lambda: inside == bound)
            assert asked == bound
            gate.set()
            await first
            for _ in range(2 * bound):
                await anext(stream)
            assert most == bound
            await until(lambda: inside == 0)
            assert asked <= 3 * bound + 1
        await served.is_idle()


async def test_the_queue_of_a_step_is_full() -> None:
    gated = Gated()
    gated.max_queue_size = 2
    models = {
        "e": ensemble(step("each", "x", "m"), step("gated", "m", "y")),
        "each": Function(each),
        "gated": gated,
    }
    async with serving(models) as served:
        stream = answers(served, *range(10))
        first = asyncio.ensure_future(anext(stream))
        await gated.until_at("infer")
        await until(lambda: not served.leases()["each"])
        gated.open_point("infer")
        assert (await first).outputs[0].array.tolist() == [0]
        with pytest.raises(ServingError) as caught:
            _ = [response async for response in stream]
        assert caught.value.code is Code.RESOURCE_EXHAUSTED
        assert caught.value.message.startswith("in ensemble 'e', model 'gated': Exceeds maximum queue size: ")
        await served.is_idle()
