"""Models that call other models of the same server: `call.infer`, from threads and from the loop."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

import triglot
from tests.served_models import SECONDS, Arrays, Function, both, calling, ints, serving, twice, twice_on_loop
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.request_scheduling import Scheduling


@both
@pytest.mark.parametrize("callee", [twice, twice_on_loop], ids=["thread", "loop"])
async def test_one_model_calls_another(on_loop: bool, callee: Any) -> None:
    models = {"twice": Function(callee), "outer": calling("twice", on_loop=on_loop)}
    async with serving(models) as served:
        assert (await served.infer("outer", ints(1, 2, 3))).tolist() == [2, 4, 6]
        await served.is_idle()


@both
async def test_nothing_is_copied(on_loop: bool) -> None:
    """The callee works on the caller's array, and the caller gets the callee's; neither can change the other's."""
    seen: list[Any] = []
    made: list[Any] = []

    def callee(inputs: Arrays) -> Any:
        seen.append(inputs["x"])
        made.append(inputs["x"] + 1)
        return {"y": made[-1]}

    async with serving({"inner": Function(callee), "outer": calling("inner", on_loop=on_loop)}) as served:
        x = ints(*range(1000))
        answer = await served.infer("outer", x)
        assert np.shares_memory(seen[0], x)
        assert not seen[0].flags.writeable
        assert x.flags.writeable
        assert np.shares_memory(answer, made[0])


@both
async def test_the_call_is_made_on_the_callers_behalf(on_loop: bool) -> None:
    """The deadline, the request's id, its scheduling and its parameters are those of the client's call."""
    calls: list[Call] = []

    def callee(inputs: Arrays, call: Call) -> Any:
        calls.append(call)
        return {"y": inputs["x"]}

    models = {
        "inner": Function(callee),
        "same": calling("inner", on_loop=on_loop),
        "own": calling("inner", on_loop=on_loop, parameters={"color": "red"}),
    }
    parameters = {"priority": 3, "sequence_id": 7, "sequence_start": True, "size": "large"}
    scheduling = Scheduling(priority=3, sequence_id=7, sequence_start=True)
    async with serving(models) as served:
        deadline = time.monotonic() + SECONDS
        for model, expected in (("same", parameters), ("own", {"color": "red"})):
            await served.infer(model, ints(1), Call(deadline), id="seven", parameters=dict(parameters))
            inner = calls.pop()
            assert (inner.deadline, inner.request_id) == (deadline, "seven")
            assert (inner.scheduling, inner.parameters) == (scheduling, expected)
            assert (inner.model_name, inner.model_version) == ("inner", 1)


async def test_versions_outputs_and_signatures() -> None:
    asked: list[tuple[str, ...]] = []

    def two(inputs: Arrays, call: Call) -> Any:
        asked.append((call.signature_name,))
        return {"y": inputs["x"] + 1, "z": inputs["x"] + 2}

    async def outer(inputs: Arrays, call: Call) -> Any:
        every = await call.infer("two", inputs, version="1")
        only_z = await call.infer("two", inputs, outputs=["z"], signature_name="other")
        return {"y": np.array([len(every), len(only_z), only_z["z"][0]], np.int32)}

    both_outputs = [triglot.TensorSpec(name, "INT32", [-1]) for name in ("y", "z")]
    other = triglot.Signature([triglot.TensorSpec("x", "INT32", [-1])], both_outputs)
    models = {"two": Function(two, outputs=both_outputs, signatures={"other": other}), "outer": Function(outer)}
    async with serving(models) as served:
        assert (await served.infer("outer", ints(1))).tolist() == [2, 1, 3]
        assert asked == [("serving_default",), ("other",)]


TEXTS = ["über", "", "c"]


@pytest.mark.parametrize(
    "value",
    [
        TEXTS,
        [text.encode() for text in TEXTS],
        np.array(TEXTS),
        np.array([text.encode() for text in TEXTS]),
        np.array(TEXTS, object),
        np.array([TEXTS[0], TEXTS[1].encode(), TEXTS[2]], object),
    ],
    ids=["texts", "bytes", "U", "S", "objects", "mixed objects"],
)
@both
async def test_texts(value: Any, on_loop: bool) -> None:
    seen: list[Any] = []

    def callee(inputs: Arrays) -> Any:
        seen.append(inputs["text"].tolist())
        return {"y": ints(1)}

    text = [triglot.TensorSpec("text", "BYTES", [-1])]

    async def async_outer(_: Arrays, call: Call) -> Any:
        return await call.infer("inner", {"text": value})

    def outer(_: Arrays, call: Call) -> Any:
        return call.infer("inner", {"text": value})

    models = {"inner": Function(callee, inputs=text), "outer": Function(async_outer if on_loop else outer)}
    async with serving(models) as served:
        assert (await served.infer("outer", ints(1))).tolist() == [1]
    assert seen == [[item.encode() for item in TEXTS]]


async def test_bytes_are_not_copied_and_many_texts_are_taken() -> None:
    seen: list[Any] = []

    def callee(inputs: Arrays) -> Any:
        seen.append(inputs["text"])
        return {"y": ints(1)}

    given = [np.array([b"a"] * 10_000, object), np.array(["b"] * 10_000).reshape(100, 100)]

    async def outer(_: Arrays, call: Call) -> Any:
        for texts in given:
            await call.infer("inner", {"text": texts})
        return {"y": ints(2)}

    inputs = [triglot.TensorSpec("text", "BYTES", None)]
    async with serving({"inner": Function(callee, inputs=inputs), "outer": Function(outer)}) as served:
        assert (await served.infer("outer", ints(1))).tolist() == [2]
    assert np.shares_memory(seen[0], given[0])
    assert (seen[1] == b"b").all()
    assert seen[1].shape == (100, 100)


@pytest.mark.parametrize(
    "array",
    [np.arange(12, dtype=np.int32)[::2], np.arange(6, dtype=">i4"), np.asfortranarray(np.ones((2, 3), np.int32))],
    ids=["strided", "big-endian", "column-major"],
)
async def test_arrays_that_lie_otherwise_than_a_clients(array: Any) -> None:
    """They are put into the order that every model expects."""
    seen: list[Any] = []

    def callee(inputs: Arrays) -> Any:
        seen.append(inputs["x"])
        return {"y": ints(1)}

    async def outer(_: Arrays, call: Call) -> Any:
        return await call.infer("inner", {"x": array})

    inputs = [triglot.TensorSpec("x", "INT32", None)]
    async with serving({"inner": Function(callee, inputs=inputs), "outer": Function(outer)}) as served:
        await served.infer("outer", ints(1))
    assert seen[0].flags.c_contiguous
    assert seen[0].dtype.isnative
    assert np.array_equal(seen[0], array)


# --- errors ---


def failing(_: Arrays) -> Any:
    raise triglot.NotFound("no such word")


def broken(_: Arrays) -> Any:
    raise ZeroDivisionError


async def stream(inputs: Arrays) -> Any:
    for value in inputs["x"]:
        yield {"y": np.array([value], np.int32)}


WRONG: dict[str, tuple[str, dict[str, Any], Any, Code, str]] = {
    "unknown": ("other", {}, None, Code.NOT_FOUND, "unknown model: 'other' is not found"),
    "version": ("twice", {"version": "3"}, None, Code.NOT_FOUND, "'twice' version 3 is not found"),
    "datatype": ("twice", {}, {"x": np.ones(1, np.float32)}, Code.INVALID_ARGUMENT, "data-type is 'FP32', but"),
    "shape": ("twice", {}, {"x": ints(1).reshape(1, 1)}, Code.INVALID_ARGUMENT, "unexpected shape for input 'x'"),
    "missing": ("twice", {}, {}, Code.INVALID_ARGUMENT, "expected 1 inputs but got 0 inputs for model 'twice'"),
    "no dict": ("twice", {}, [1], Code.INVALID_ARGUMENT, "expected a dict of arrays by name, got list"),
    "no array": ("twice", {}, {"x": [[1], [1, 2]]}, Code.INVALID_ARGUMENT, "'x': expected an array: "),
    "no datatype": ("twice", {}, {"x": np.ones(1, "M8[s]")}, Code.INVALID_ARGUMENT, "dtype datetime64[s] has no"),
    "output": ("twice", {"outputs": ["z"]}, None, Code.INVALID_ARGUMENT, "unexpected inference output 'z'"),
    "signature": ("twice", {"signature_name": "z"}, None, Code.INVALID_ARGUMENT, "'twice' has no signature 'z'"),
    "own": ("failing", {}, None, Code.NOT_FOUND, "model 'failing': no such word"),
    "crash": ("broken", {}, None, Code.INTERNAL, "broken version 1 failed, error "),
    "decoupled": ("stream", {}, None, Code.UNIMPLEMENTED, "model 'stream': the model returns a stream"),
    "priority": ("twice", {"parameters": {"priority": -1}}, None, Code.INVALID_ARGUMENT, "'twice': parameter"),
}  # fmt: skip


@both
@pytest.mark.parametrize(("name", "options", "inputs", "code", "text"), WRONG.values(), ids=WRONG)
async def test_errors_are_a_clients(
    name: str, options: dict[str, Any], inputs: Any, code: Code, text: str, on_loop: bool
) -> None:
    """They name the model, and the caller may catch them; then the next call goes well."""
    caught: list[triglot.ServingError] = []

    def wanted(own: Arrays) -> Any:
        return own if inputs is None else inputs

    async def async_outer(own: Arrays, call: Call) -> Any:
        try:
            return await call.infer(name, wanted(own), **options)
        except triglot.ServingError as error:
            caught.append(error)
        return await call.infer("twice", own)

    def outer(own: Arrays, call: Call) -> Any:
        try:
            return call.infer(name, wanted(own), **options)
        except triglot.ServingError as error:
            caught.append(error)
        return call.infer("twice", own)

    models = {
        "twice": Function(twice),
        "failing": Function(failing),
        "broken": Function(broken),
        "stream": Function(stream),
        "outer": Function(async_outer if on_loop else outer),
    }
    async with serving(models) as served:
        assert (await served.infer("outer", ints(4))).tolist() == [8]
        (error,) = caught
        assert error.code is code
        assert text in error.message
        await served.is_idle()


@both
async def test_an_error_that_is_not_caught_is_the_callers(on_loop: bool) -> None:
    models = {"failing": Function(failing), "outer": calling("failing", on_loop=on_loop)}
    async with serving(models) as served:
        error = await served.error("outer", ints(1))
        assert (error.code, error.message) == (Code.NOT_FOUND, "model 'failing': no such word")


async def test_a_call_without_a_server() -> None:
    with pytest.raises(RuntimeError, match="cannot call other models"):
        Call().infer("twice", {"x": ints(1)})
