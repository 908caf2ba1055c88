"""Sequences on an instance's threads: state, controls, errors, and what becomes of abandoned sequences."""

from __future__ import annotations

import asyncio
import gc
import logging
import threading
import weakref
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_infer
from tests.scheduling.scripted_models import Inputs, servable
from tests.scheduling.sequence_models import (
    CONTROLS,
    HOUR,
    LONG,
    SUM,
    Summing,
    reading,
    refusal,
    send,
    sequence_call,
)
from tests.waiting import until
from triglot import Call, InvalidArgument, Model, ModelLoadError
from triglot.core.errors import Code, Internal, Unavailable
from triglot.model.config import WarmUpInput, WarmUpRequest
from triglot.model.scheduling import OldestStrategy, SequenceBatching
from triglot.repository.manager.warm_up import warm_up
from triglot.scheduling.servable import Servable


class Held(Summing):
    """Waits in `infer` until the test opens the gate."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.gate, self.entered = threading.Event(), threading.Event()

    def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
        self.entered.set()
        assert self.gate.wait(30)
        return super().infer(inputs, call)


# --- one after the other ---


@pytest.mark.parametrize("rows", [0, 1, 4])
@pytest.mark.parametrize("instances", [1, 3])
async def test_each_sequence_has_its_own_state(rows: int, instances: int) -> None:
    model = Summing(LONG, rows=rows, instances=instances)
    served = servable(model)
    ids = [*range(1, 20)]

    async def run(sequence_id: int) -> list[float]:
        return [await send(served, sequence_id + at, sequence_id, start=at == 0, end=at == 4) for at in range(5)]

    sums = await asyncio.gather(*map(run, ids))
    assert sums == [np.cumsum(np.arange(number, number + 5)).tolist() for number in ids]
    assert (reading(served, "sequences_ended", reason="end"), served.leases, served.queue_depth) == (19, 0, 0)
    await served.close()


async def test_requests_need_not_wait_for_each_other() -> None:
    served = servable(Summing(LONG))
    requests = [send(served, 1, number, start=at == 0, end=at == 9) for at in range(10) for number in (1, 2, 3)]
    assert await asyncio.gather(*requests) == [at + 1 for at in range(10) for _ in range(3)]
    await served.close()


@pytest.mark.parametrize("rows", [0, 2])
async def test_a_sequence_stays_on_its_instance(rows: int) -> None:
    threads: dict[int, set[int]] = {1: set(), 2: set(), 3: set()}

    class Noting(Summing):
        def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
            for number, ready in zip(inputs["id"].ravel(), inputs["ready"].ravel(), strict=True):
                if ready:
                    threads[int(number)].add(threading.get_ident())
            return super().infer(inputs, call)

    served = servable(Noting(LONG, rows=rows, instances=3))
    for at in range(4):
        await asyncio.gather(*[send(served, 1, number, start=at == 0) for number in threads])
    used = [number for numbers in threads.values() for number in numbers]
    assert len(used) == len(set(used)) == 3
    await served.close()


async def test_ids_of_both_kinds_are_different_sequences() -> None:
    served = servable(Summing(SequenceBatching(max_idle=HOUR, controls=CONTROLS[:3], states=[SUM])))
    assert await send(served, 1, 1, start=True) == 1
    assert await send(served, 10, "1", start=True) == 10
    assert await send(served, 1, 1) == 2
    assert await send(served, 1, "1") == 11
    assert await send(served, 1, 2**64 - 1, start=True, end=True) == 1
    await served.close()


async def test_all_instances_serve_sequences_on_demand() -> None:
    inside = threading.Barrier(3)

    class Meeting(Summing):
        def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
            inside.wait(30)
            return super().infer(inputs, call)

    served = servable(Meeting(LONG, rows=1, instances=3))
    assert await asyncio.gather(*[send(served, 1, number, start=True, end=True) for number in (1, 2, 3)]) == [
        1,
        1,
        1,
    ]
    await served.close()


# --- what is refused ---


async def test_what_is_no_request_of_a_sequence_is_refused() -> None:
    served = servable(Summing(LONG))
    for no_id in (0, ""):
        error = await refusal(served, no_id, start=True)
        assert error.message == (
            "inference request to model 'summing' must specify a non-zero or non-empty correlation ID"
        )
    for unknown in (7, 2**63):
        error = await refusal(served, unknown)
        assert error.message == (
            f"inference request for sequence {unknown} to model 'summing' must specify the START flag on the "
            "first request of the sequence"
        )
    with pytest.raises(InvalidArgument, match="must specify batch-size 1 due to requirements of sequence batcher"):
        await direct_infer(served, {"x": np.ones((2, 1), np.float32)}, sequence_call(1, start=True))
    assert (reading(served, "sequences"), served.leases) == (0, 0)
    await served.close()


async def test_a_sequence_that_has_ended_is_not_known() -> None:
    served = servable(Summing(LONG))
    assert await send(served, 1, 5, start=True) == 1
    assert await send(served, 1, 5, end=True) == 2
    assert (await refusal(served, 5)).code is Code.INVALID_ARGUMENT
    assert await send(served, 4, 5, start=True, end=True) == 4
    await served.close()


async def test_full_queue_refuses_and_the_sequence_continues() -> None:
    model = Held(LONG)
    served = servable(model, max_queue_size=1)
    calls = [asyncio.ensure_future(send(served, 1, 5, start=True))]
    assert await asyncio.to_thread(model.entered.wait, 30)
    calls.append(asyncio.ensure_future(send(served, 1, 5)))
    await until(lambda: served.queue_depth == 1)
    refused = await refusal(served, 5, end=True)
    assert (refused.code, refused.retry_after) == (Code.RESOURCE_EXHAUSTED, 1.0)
    model.gate.set()
    assert await asyncio.gather(*calls) == [1, 2]
    assert await send(served, 1, 5, end=True) == 3
    await served.close()


def model_of(**attributes: Any) -> Model:
    model = Summing()
    vars(model).update(attributes)
    return model


def _yielding(inputs: Inputs) -> Iterator[Any]:
    yield inputs


@pytest.mark.parametrize(
    ("attributes", "text"),
    [
        (
            {"takes_messages": True},
            "sequence_batching: expected a model with tensor inputs, got one that takes messages",
        ),
        ({"infer": _yielding}, "sequence_batching.states: expected none for a model that yields responses"),
    ],
)
async def test_what_a_model_cannot_have(attributes: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        servable(model_of(**attributes))


async def test_a_model_that_cannot_be_leaves_no_threads() -> None:
    before = threading.enumerate()
    model = Summing(instances=3)
    model.takes_messages = True
    with pytest.raises(ValueError, match="expected a model with tensor inputs"):
        servable(model)
    assert [thread for thread in threading.enumerate() if thread not in before] == []


# --- a sequence begins again ---


async def test_a_start_of_a_live_sequence_begins_it_anew(caplog: pytest.LogCaptureFixture) -> None:
    served = servable(Summing(LONG))
    assert await send(served, 1, 5, start=True) == 1
    assert not caplog.records
    with caplog.at_level(logging.WARNING):
        assert await send(served, 10, 5, start=True) == 10
    assert "sequence 5 of model 'summing' was restarted before it ended" in caplog.text
    assert await send(served, 1, 5, end=True) == 11
    ended_counts = {reason: reading(served, "sequences_ended", reason=reason) for reason in ("replaced", "end")}
    assert (ended_counts, reading(served, "sequences_started")) == ({"replaced": 1, "end": 1}, 2)
    await served.close()


# --- errors ---


@pytest.mark.parametrize("strategy", [None, OldestStrategy()])
async def test_an_error_is_its_batch_members_own_and_their_sequences_live_on(strategy: Any) -> None:
    class Failing(Summing):
        def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
            if inputs["x"].max() == 13:
                raise InvalidArgument("13")
            return super().infer(inputs, call)

    served = servable(Failing(LONG if strategy is None else replace(LONG, strategy=strategy)))
    await asyncio.gather(*[send(served, number, number, start=True) for number in (1, 2, 3)])
    failed = await asyncio.gather(*[send(served, 13, number) for number in (1, 2, 3)], return_exceptions=True)
    assert [str(error) for error in failed] == ["13"] * 3
    assert len({id(error) for error in failed}) == 3
    sums = await asyncio.gather(*[send(served, 1, number, end=True) for number in (1, 2, 3)])
    assert sums == [2, 3, 4]
    await served.close()


async def test_an_answer_with_other_rows_is_the_models_error(caplog: pytest.LogCaptureFixture) -> None:
    class Short(Summing):
        def infer(self, inputs: Inputs, call: Call) -> dict[str, Any]:
            return {"y": inputs["x"][:1], "after": inputs["x"]}

    served = servable(Short(LONG))
    failed = await asyncio.gather(
        *[send(served, 1, number, start=True) for number in (1, 2)], return_exceptions=True
    )
    assert [type(error) for error in failed] == [Internal] * 2
    assert "the model returned output 'y' with shape [1,1] for a batch of 2 rows" in caplog.text
    await served.close()


# --- before, and after ---


@pytest.mark.parametrize("rows", [0, 4])
async def test_a_warm_up_is_a_sequence_on_every_instance(rows: int) -> None:
    model = Summing(LONG, rows=rows, instances=3)
    model.example = {"x": np.ones((2, 1) if rows else (1,), np.float32)}
    served = servable(model)
    await warm_up(served)
    count, shape = (2, (2, 1)) if rows else (1, (1,))
    assert len(model.seen) == 3
    for seen in model.seen:
        assert {name: array.shape for name, array in seen.items()} == dict.fromkeys(
            ["x", "before", "start", "ready", "end", "id"], shape
        )
        assert [seen[name].ravel().tolist() for name in ("start", "ready", "end", "before")] == [
            [1] * count,
            [True] * count,
            [1] * count,
            [0] * count,
        ]
    assert (reading(served, "sequences_started"), served.leases) == (0, 0)
    await served.close()


@pytest.mark.parametrize("rows", [0, 4])
async def test_a_warm_up_may_bring_controls_and_states(rows: int) -> None:
    """Triton wants it to: what it brings is what the model gets."""
    served = servable(model := Summing(LONG, rows=rows))
    types = {"x": "FP32", "start": "INT32", "end": "FP32"}
    zeros = {name: WarmUpInput(datatype, [1]) for name, datatype in types.items()}
    given = {**zeros, "before": WarmUpInput("FP32", [1], random=True)}
    await warm_up(served, [WarmUpRequest("w", given, batch_size=2 if rows else 0)])
    (seen,) = model.seen
    count = 2 if rows else 1
    assert [seen[name].ravel().tolist() for name in ("x", "start", "ready", "end")] == [
        [0] * count,
        [0] * count,
        [True] * count,
        [0] * count,
    ]
    assert seen["before"].any()
    for wrong, text in (
        (WarmUpInput("INT64", [1]), "input 'start': expected INT32 of shape"),
        (WarmUpInput("INT32", [2]), "input 'start': expected INT32 of shape"),
    ):
        with pytest.raises(ModelLoadError, match=text):
            await warm_up(served, [WarmUpRequest("w", {**given, "start": wrong}, batch_size=2 if rows else 0)])
    await served.close()


async def test_an_idle_sequence_is_over() -> None:
    served = servable(Summing(replace(LONG, max_idle=0.02)))
    assert await send(served, 1, 5, start=True) == 1
    with served:
        drained = asyncio.ensure_future(served.drained())
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await drained
    assert (await refusal(served, 5)).code is Code.INVALID_ARGUMENT
    assert reading(served, "sequences_ended", reason="idle") == 1
    await served.close()


async def test_a_live_sequence_holds_the_version() -> None:
    served = servable(Summing(LONG))
    await send(served, 1, 5, start=True)
    await send(served, 1, 6, start=True)
    drained = asyncio.ensure_future(served.drained())
    await send(served, 1, 5, end=True)
    assert (served.leases, drained.done()) == (1, False)
    assert await send(served, 1, 6, end=True) == 2
    async with asyncio.timeout(30):
        await drained
    await served.close()


async def test_closing_ends_the_sequences_and_runs_what_waits() -> None:
    model = Held(LONG, rows=1)
    servable = Servable("closing", 1, model, max_queue_size=10)
    calls = [
        asyncio.ensure_future(send(servable, 1, number, start=at == 0)) for number in (1, 2, 3) for at in range(2)
    ]
    assert await asyncio.to_thread(model.entered.wait, 30)
    closing = asyncio.ensure_future(servable.close())
    await asyncio.sleep(0)
    with pytest.raises(Unavailable, match="the model was unloaded"):
        await send(servable, 1, 1)
    model.gate.set()
    # Those in the backlog, too.
    assert await asyncio.gather(*calls) == [1, 2] * 3
    await closing
    assert (servable.leases, reading(servable, "sequences_ended", reason="unloaded")) == (0, 3)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("closing/1#")]


async def test_nothing_is_left_of_a_version_that_is_closed() -> None:
    served = servable(Summing(LONG))
    await send(served, 1, 5, start=True)
    await served.close()
    left = weakref.ref(served)
    gc.disable()
    try:
        del served
        await until(lambda: left() is None)  # The thread that closed it has to end, too.
    finally:
        gc.enable()
