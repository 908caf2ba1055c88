"""What runs before a version takes calls: on which threads and how often, and what becomes of a failure."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_infer
from tests.repository.warmed_models import (
    NAME,
    SECONDS,
    raises,
    raises_on_loop,
    refusal,
    runs_on_every_instance,
    warmed,
    zeros,
)
from tests.scheduling.scripted_models import Inputs, Plain, Scripted, number, servable
from tests.waiting import until
from triglot import Call, InvalidArgument, ModelLoadError
from triglot.core.errors import Code
from triglot.repository.manager.warm_up import warm_up

# --- where it runs ---


async def test_every_instance_runs_every_request_as_often_as_it_is_to() -> None:
    runs: dict[int, list[float]] = {}

    class Recording(Scripted):
        def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
            runs.setdefault(threading.get_ident(), []).append(float(inputs["x"].sum()))
            assert (call.deadline, call.remaining, call.cancelled) == (None, None, False)
            assert (call.signature_name, call.model_name) == ("serving_default", "")
            return {"y": inputs["x"]}

    examples = [{"x": [7]}, {"x": [8, 1]}]
    await warmed(Recording(instances=3), zeros("two", count=2), zeros("one", 2, count=0), example=examples)
    assert list(runs.values()) == [[0, 0, 0, 7, 9]] * 3
    assert threading.get_ident() not in runs


async def test_hundreds_of_instances_and_a_short_queue() -> None:
    model = Scripted(instances=300)
    model.example = {"x": [1, 2]}
    served = servable(model, max_queue_size=1)
    await warm_up(served)
    assert len(model.started) == len(model.threads) == 300
    await model.until_at("infer", 300)
    # The queue is as short as before.
    model.close_point("infer")
    running = []
    for _ in range(300):
        running.append(asyncio.ensure_future(direct_infer(served, number(0), Call())))
        await model.until_at("infer")
    waiting, refused = (asyncio.ensure_future(direct_infer(served, number(0), Call())) for _ in range(2))
    with pytest.raises(Exception, match="Exceeds maximum queue size: 1 requests are queued"):
        await refused
    model.open_point("infer")
    await asyncio.gather(waiting, *running)
    await served.close()
    assert not any(thread.name.startswith("scripted/1#") for thread in threading.enumerate())


async def test_without_requests_no_instance_is_started() -> None:
    before = threading.enumerate()  # Other tests' models may run still.
    served = servable(Scripted(instances=5))
    await warm_up(served)
    started = [thread for thread in threading.enumerate() if thread not in before]
    assert sum(thread.name.startswith("scripted/1#") for thread in started) == 1
    await served.close()


async def test_async_code_runs_on_the_loop_and_once() -> None:
    seen: list[list[float]] = []

    async def infer(inputs: Inputs, call: Call) -> dict[str, Any]:
        assert threading.get_ident() == here
        assert call.signature_name == "serving_default"
        await asyncio.sleep(0)
        seen.append(inputs["x"].tolist())
        return {"y": inputs["x"]}

    here = threading.get_ident()
    model = Plain(infer)
    model.instances = 4
    await warmed(model, zeros(count=2), example={"x": [3.5]})
    assert seen == [[0], [0], [3.5]]


async def test_the_version_is_held_meanwhile() -> None:
    model = Scripted(open_gate=False)
    model.example = number(0)
    served = servable(model)
    warming = asyncio.ensure_future(warm_up(served))
    await model.until_at("infer")
    assert served.leases == 1
    model.open_point("infer")
    await warming
    assert served.leases == 0
    await served.close()


# --- failures ---


@pytest.mark.parametrize("kind", [raises, raises_on_loop])
@pytest.mark.parametrize(
    ("error", "text", "code"),
    [
        (InvalidArgument("too dark"), "too dark", Code.INVALID_ARGUMENT),
        (KeyError("x"), "KeyError: 'x'", Code.INTERNAL),
        (StopIteration(), "StopIteration: ", Code.INTERNAL),
        (SystemExit(3), "SystemExit: 3", Code.INTERNAL),
        (asyncio.CancelledError("mine"), "CancelledError: mine", Code.INTERNAL),
    ],
)
async def test_a_model_that_raises(
    kind: Callable[[BaseException], Any], error: BaseException, text: str, code: Code
) -> None:
    if kind is raises_on_loop and isinstance(error, StopIteration):
        text = "RuntimeError: coroutine raised StopIteration"
    with pytest.raises(ModelLoadError) as caught:
        await warmed(Plain(kind(error)), example=number(1))
    assert str(caught.value) == f"{NAME}: example: {text}"
    assert caught.value.code is code


async def test_the_trace_of_a_failure_is_in_the_log_once(caplog: pytest.LogCaptureFixture) -> None:
    model = Plain(raises(KeyError("x")))
    model.instances = 20
    await refusal(model, zeros())
    assert [(record.levelno, record.message) for record in caplog.records] == [
        (logging.ERROR, f"{NAME} failed during warm-up")
    ]
    assert "raise error" in caplog.text


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (None, "returned NoneType, expected a dict of outputs by name"),
        ({"z": 1}, "returned no output 'y', only ['z']"),
        (
            {"y": np.zeros(1)},
            "returned output 'y' as FP64, its signature says FP32: return it as .astype(np.float32)",
        ),
        ({"y": np.float32(0)}, "returned output 'y' with shape [], its signature says [-1]"),
    ],
)
async def test_an_answer_that_does_not_fit(answer: Any, text: str) -> None:
    async def infer_on_loop(inputs: Inputs) -> Any:
        return answer

    for model in (Plain(lambda inputs: answer), Plain(infer_on_loop)):
        assert await refusal(model, zeros()) == f"model_warmup 'one': model 'scripted' {text}"


async def test_what_fails_is_the_last_that_runs() -> None:
    seen = []

    def infer(inputs: Inputs) -> Mapping[str, Any]:
        seen.append(inputs["x"].tolist())
        if len(seen) == 2:
            raise InvalidArgument("the second")
        return {"y": inputs["x"]}

    text = await refusal(Plain(infer), zeros("a"), zeros("b", 2, count=3), example=number(1))
    assert text == "model_warmup 'b': the second"
    assert seen == [[0], [0, 0]]


async def test_one_of_three_instances_fails() -> None:
    class FirstFails(Scripted):
        failing = True

        def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
            with turn:
                fails, self.failing = self.failing, False
            if fails:
                assert others.wait(SECONDS)
                raise InvalidArgument("no device")
            return super().infer(inputs, call)

    turn, others = threading.Lock(), threading.Event()
    model = FirstFails(instances=3, open_gate=False)
    model.example = number(0)
    served = servable(model)
    warming = asyncio.ensure_future(warm_up(served))
    await model.until_at("infer", 2)
    others.set()
    # The others still run: nobody waits for them.
    with pytest.raises(ModelLoadError, match=r"example: no device$"):
        await asyncio.wait_for(warming, SECONDS)
    assert [call.cancelled for call in model.calls] == [True, True]
    assert (served.leases, served.queue_depth) == (0, 0)
    model.open_point("infer")
    await runs_on_every_instance(model, served)
    await served.close()


async def test_a_cancelled_warm_up() -> None:
    model = Scripted(instances=3, open_gate=False)
    served = servable(model)
    warming = asyncio.ensure_future(warm_up(served, [zeros(count=5)]))
    await model.until_at("infer", 3)
    warming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await warming
    assert [call.cancelled for call in model.calls] == [True] * 3
    assert (served.leases, served.queue_depth) == (0, 0)
    model.open_point("infer")
    await runs_on_every_instance(model, served)
    assert len(model.calls) == 6
    await served.close()


async def test_warm_up_is_cancelled_before_every_instance_exists() -> None:
    model = Scripted(instances=3, open_gate=False)
    model.example = number(7)
    served = servable(model)
    busy = asyncio.ensure_future(direct_infer(served, number(1), Call()))
    await model.until_at("infer")
    warming = asyncio.ensure_future(warm_up(served))
    # Two have taken theirs and wait for the third.
    await until(lambda: served.leases == 1 and served.queue_depth == 1)
    warming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await warming
    assert served.queue_depth == 0
    model.open_point("infer")
    await busy
    assert model.started == [1]
    await runs_on_every_instance(model, served)
    await served.close()


async def test_a_warm_up_on_the_loop_is_cancelled() -> None:
    begun, finished = asyncio.Event(), []

    async def infer(inputs: Inputs, call: Call) -> dict[str, Any]:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            finished.append(call)
        return {}

    model = Plain(infer)
    model.example = number(1)
    served = servable(model)
    warming = asyncio.ensure_future(warm_up(served))
    await begun.wait()
    warming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await warming
    assert [call.cancelled for call in finished] == [True]
    assert served.leases == 0
    await served.close()


async def test_a_servable_that_is_closed_meanwhile() -> None:
    """Each instance has its run already, and none hangs."""
    model = Scripted(instances=3, open_gate=False)
    model.example = number(1)
    served = servable(model)
    warming = asyncio.ensure_future(warm_up(served))
    await model.until_at("infer", 3)
    closing = asyncio.ensure_future(served.close())
    model.open_point("infer")
    await asyncio.wait_for(asyncio.gather(warming, closing), SECONDS)
    assert model.started == [1, 1, 1]
    with pytest.raises(ModelLoadError, match="the model was unloaded"):
        await warm_up(served)
