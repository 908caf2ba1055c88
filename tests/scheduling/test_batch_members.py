"""Members of one batch on real threads: what happens to one leaves the others alone."""

from __future__ import annotations

import asyncio
import gc
import time
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from tests.scheduling.batched_models import FOREVER, Batched, Inputs, Site, first_values, rows
from triglot import Call, Cancelled, InvalidArgument
from triglot.core.call import BatchCall
from triglot.core.errors import DeadlineExceeded, Internal, ServingError
from triglot.model.scheduling import DynamicBatching


async def test_who_left_while_waiting_is_not_executed() -> None:
    model = Batched(open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    tasks = await site.ask_and_wait(rows(1), rows(2), rows(3))
    tasks[1].cancel()
    await asyncio.wait([tasks[1]])
    assert site.servable.queue_depth == 2
    model.open_point("infer")
    answers = await asyncio.gather(busy, tasks[0], tasks[2])
    assert model.batches == [[0], [1, 3]]
    assert [first_values(answer) for answer in answers] == [[0], [2], [6]]
    await site.servable.close()


async def test_who_leaves_while_the_batch_runs_leaves_the_others_alone() -> None:
    model = Batched(DynamicBatching(max_queue_delay=FOREVER), open_gate=False, max_batch_size=3)
    site = Site(model)
    tasks = [site.ask(rows(value)) for value in (1, 2, 3)]
    await model.until_at("infer")
    (running,) = model.calls
    assert isinstance(running, BatchCall)
    tasks[0].cancel()
    await asyncio.wait(tasks[:1])
    assert [member.cancelled for member in running.members] == [True, False, False]
    assert not running.cancelled
    model.open_point("infer")
    assert [first_values(answer) for answer in await asyncio.gather(*tasks[1:])] == [[4], [6]]
    await site.servable.close()


async def test_model_sees_when_all_members_are_cancelled() -> None:
    model = Batched(DynamicBatching(max_queue_delay=FOREVER), open_gate=False, max_batch_size=2)
    site = Site(model)
    tasks = [site.ask(rows(value)) for value in (1, 2)]
    await model.until_at("infer")
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
    assert model.calls[0].cancelled
    model.open_point("infer")
    assert first_values(await site.ask(rows(3, 4))) == [6, 8]
    await site.servable.close()


async def test_a_deadline_that_passes_in_the_queue_leaves_the_others_alone() -> None:
    model = Batched(open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    late = site.ask(rows(1), Call(time.monotonic() + 1))
    others = await site.ask_and_wait(rows(2), rows(3))
    with pytest.raises(DeadlineExceeded, match="while the request waited"):
        await late
    model.open_point("infer")
    await asyncio.gather(busy, *others)
    assert model.batches == [[0], [2, 3]]
    await site.servable.close()


async def test_cancelled_call_still_queued_is_skipped() -> None:
    model = Batched(open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    calls = [Call() for _ in range(3)]
    tasks = [site.ask(rows(at), own) for at, own in enumerate(calls)]
    await site.until(3)
    calls[1].cancel()
    model.open_point("infer")
    results: Sequence[Any] = await asyncio.gather(busy, *tasks, return_exceptions=True)
    assert isinstance(results[2], Cancelled)
    assert model.batches == [[0], [0, 2]]
    assert [own.batch_size for own in calls] == [2, 0, 2]
    await site.servable.close()


def failing(error: BaseException) -> Any:
    def answer(inputs: Inputs) -> Any:
        if (inputs["x"] < 0).any():
            raise error
        return {"y": inputs["x"] * 2}

    return answer


@pytest.mark.parametrize(
    ("error", "expected_error"),
    [
        (InvalidArgument("below zero", retry_after=3.0), InvalidArgument),
        (ValueError("below zero"), Internal),
        (SystemExit(1), Internal),
        (KeyboardInterrupt(), Internal),
        (asyncio.CancelledError(), Internal),
        (GeneratorExit(), Internal),
    ],
)
async def test_an_exception_fails_its_members_each_with_its_own_error(
    error: BaseException, expected_error: type[ServingError]
) -> None:
    model = Batched(open_gate=False, answer=failing(error))
    site = Site(model)
    busy = await site.busy(model)
    tasks = await site.ask_and_wait(rows(1), rows(-2), rows(3), rows(4, width=2))
    model.open_point("infer")
    results: Sequence[Any] = await asyncio.gather(busy, *tasks, return_exceptions=True)
    errors = results[1:4]
    assert [type(error) for error in errors] == [expected_error] * 3
    assert len({id(error) for error in errors}) == 3
    assert len({str(error) for error in errors}) == 1
    if isinstance(error, ServingError):
        assert [(error.message, error.retry_after) for error in errors] == [("below zero", 3.0)] * 3
        assert error not in errors
    assert first_values(results[4]) == [8]
    assert first_values(await site.ask(rows(5))) == [10]
    await site.servable.close()


async def test_a_members_error_holds_no_other_members_request() -> None:
    def answer(inputs: Inputs) -> Any:
        if inputs["x"][0, 0] < 0:
            raise InvalidArgument("below zero")
        return {"y": inputs["x"]}

    model = Batched(open_gate=False, answer=answer)
    site = Site(model)
    busy = await site.busy(model)
    inputs = [rows(-1), rows(-2)]
    kept = [weakref.ref(tensor["x"]) for tensor in inputs]
    tasks = await site.ask_and_wait(*inputs)
    del inputs
    model.open_point("infer")
    errors = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(error) for error in errors] == [InvalidArgument] * 2
    del tasks, errors[1]
    await busy
    await site.ask(rows(1))
    model.seen.clear()
    gc.collect()
    assert kept[1]() is None
    errors.clear()
    gc.collect()
    assert kept[0]() is None
    await site.servable.close()


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        (lambda inputs: None, "the model returned NoneType, expected a dict"),
        (lambda inputs: {"y": np.float32(1)}, "output 'y' without a batch dim"),
        (lambda inputs: {"y": inputs["x"][:1]}, r"output 'y' with shape \[1,1\] for a batch of 2 rows"),
        (lambda inputs: {"y": [[1.0], [1.0, 2.0]]}, "failed, error"),
    ],
)
async def test_outputs_that_are_no_batch_fail_every_member(answer: Any, text: str) -> None:
    model = Batched(DynamicBatching(max_queue_delay=FOREVER), max_batch_size=2, answer=answer)
    site = Site(model)
    results: Sequence[Any] = await asyncio.gather(site.ask(rows(1)), site.ask(rows(2)), return_exceptions=True)
    for error in results:
        assert isinstance(error, Internal)
        with pytest.raises(Internal, match=text):
            raise error
    assert results[0] is not results[1]
    model.answer = lambda inputs: {"y": inputs["x"] * 2}
    answers = await asyncio.gather(site.ask(rows(1)), site.ask(rows(2)))
    assert [first_values(answer) for answer in answers] == [[2], [4]]
    await site.servable.close()
