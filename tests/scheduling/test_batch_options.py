"""What can be had besides joining: parts, padding, lists of requests, streams (spec 5.1, tfs 6.5)."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_stream
from tests.scheduling.batched_models import FOREVER, Array, Batched, Inputs, Site, call, first_values, rows
from triglot import Call, InvalidArgument, Model, TensorSpec
from triglot.core.errors import Internal, Unavailable
from triglot.core.request_scheduling import Scheduling
from triglot.model.scheduling import DynamicBatching, QueuePolicy
from triglot.scheduling.batch_keys import MAX_PADDED_BYTES
from triglot.version import build

OWN_TIMEOUTS = QueuePolicy(timeout=FOREVER, allow_timeout_override=True)

# --- parts ---


async def test_a_large_request_is_executed_in_parts_and_answered_as_a_whole() -> None:
    model = Batched(DynamicBatching(max_execution_size=3), max_batch_size=9, open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    own = Call()
    large = site.ask(rows(1, 2, 3, 4, 5, 6, 7), own)
    small = site.ask(rows(8))
    await site.until(4)
    model.open_point("infer")
    answers = await asyncio.gather(busy, large, small)
    assert model.batches == [[0], [1, 2, 3], [4, 5, 6], [7, 8]]
    assert [first_values(answer) for answer in answers[1:]] == [[2, 4, 6, 8, 10, 12, 14], [16]]
    assert own.batch_size > 0
    assert own.compute_seconds > 0
    await site.servable.close()


async def test_parts_run_on_several_instances() -> None:
    model = Batched(DynamicBatching(max_execution_size=1), max_batch_size=4, instances=4, open_gate=False)
    site = Site(model)
    large = site.ask(rows(1, 2, 3, 4))
    await model.until_at("infer", 4)
    model.open_point("infer")
    assert first_values(await large) == [2, 4, 6, 8]
    await site.servable.close()


async def test_a_part_that_fails_fails_its_request_and_no_other() -> None:
    def answer(inputs: Inputs) -> Any:
        if 2 in inputs["x"]:
            raise InvalidArgument("two")
        return {"y": inputs["x"]}

    model = Batched(DynamicBatching(max_execution_size=1), max_batch_size=4, answer=answer)
    site = Site(model)
    results: Sequence[Any] = await asyncio.gather(
        site.ask(rows(1, 2, 3, 4)), site.ask(rows(5)), return_exceptions=True
    )
    assert isinstance(results[0], InvalidArgument)
    assert first_values(results[1]) == [5]
    assert site.servable.queue_depth == 0
    await site.servable.close()


async def test_cancelled_large_request_leaves_no_part_queued() -> None:
    model = Batched(DynamicBatching(max_execution_size=1), max_batch_size=4, open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    large = site.ask(rows(1, 2, 3, 4))
    await site.until(4)
    large.cancel()
    await asyncio.wait([large])
    assert site.servable.queue_depth == 0
    model.open_point("infer")
    await busy
    assert model.batches == [[0]]
    await site.servable.close()


async def test_a_large_request_that_waits_too_long_is_refused_once() -> None:
    batching = DynamicBatching(max_execution_size=1, policy=OWN_TIMEOUTS, preserve_ordering=True)
    model = Batched(batching, max_batch_size=4, open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    large = site.ask(rows(1, 2, 3, 4), call(Scheduling(timeout=0.01)))
    await site.until(4)
    await site.until(0)
    model.open_point("infer")
    with pytest.raises(Unavailable, match="Request timeout expired"):
        await large
    await busy
    await site.servable.close()


# --- padding ---


async def test_a_batch_is_padded_to_an_allowed_size_and_cut_again() -> None:
    model = Batched(DynamicBatching(allowed_sizes=[2, 4, 8]), open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    tasks = await site.ask_and_wait(rows(1), rows(2, 3, 4, 5))
    model.open_point("infer")
    answers = await asyncio.gather(busy, *tasks)
    assert model.batches == [[0, 0], [1, 2, 3, 4, 5, 1, 1, 1]]
    assert [first_values(answer) for answer in answers] == [[0], [2], [4, 6, 8, 10]]
    assert first_values(await site.ask(rows(6, 7))) == [12, 14]
    assert model.batches[2] == [6, 7]
    await site.servable.close()


async def test_inputs_of_unlike_lengths_are_padded_where_that_is_asked_for() -> None:
    model = Batched(DynamicBatching(pad_variable_lengths=True), open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    tasks = await site.ask_and_wait(rows(1, width=1), rows(2, width=3))
    model.open_point("infer")
    answers = await asyncio.gather(busy, *tasks)
    assert model.seen[1].tolist() == [[1, 0, 0], [2, 2, 2]]
    assert [answer["y"].tolist() for answer in answers[1:]] == [[[2, 0, 0]], [[4, 4, 4]]]
    await site.servable.close()


async def test_requests_with_excessive_padding_run_separately() -> None:
    model = Batched(DynamicBatching(pad_variable_lengths=True), open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    long = MAX_PADDED_BYTES // (4 * model.max_batch_size) + 1
    tasks = await site.ask_and_wait(rows(1, width=1), rows(2, width=long), rows(3, width=long))
    model.open_point("infer")
    await asyncio.gather(busy, *tasks)
    assert [batch.shape for batch in model.seen[1:]] == [(1, 1), (2, long)]
    await site.servable.close()


async def test_only_the_named_signatures_are_joined() -> None:
    model = Batched(DynamicBatching(signatures=["joined"]), open_gate=False)
    site = Site(model)
    calls = [Call() for _ in range(4)]
    for own, name in zip(calls, ("joined", "joined", "other", "other"), strict=True):
        own.signature_name = name
    tasks = [await site.busy(model), *(site.ask(rows(1), own) for own in calls)]
    await site.until(4)
    model.open_point("infer")
    await asyncio.gather(*tasks)
    assert [len(batch) for batch in model.batches] == [1, 2, 1, 1]
    await site.servable.close()


# --- what cannot be joined ---


class Anything(Model):
    """Takes whatever comes."""

    any_tensors = True
    max_batch_size = 8
    dynamic_batching = DynamicBatching(max_queue_delay=FOREVER)

    def __init__(self) -> None:
        self.calls: list[dict[str, tuple[int, ...]]] = []

    def infer(self, inputs: Inputs) -> dict[str, Any]:
        self.calls.append({name: array.shape for name, array in inputs.items()})
        return dict(inputs)


@pytest.mark.parametrize(
    "inputs",
    [
        {"x": np.float32(1)},
        {"x": np.zeros((2, 1)), "y": np.zeros((3, 1))},
        {"x": np.zeros((2, 1)), "y": np.float32(1)},
        {"x": np.zeros((0, 1))},
        {"x": np.zeros((9, 1))},
        {},
    ],
)
async def test_inputs_without_a_common_batch_dim_are_executed_alone(inputs: dict[str, Array]) -> None:
    model = Anything()
    site = Site(model)
    own = Call()
    answer = await site.ask(inputs, own)
    assert answer == inputs
    assert own.batch_size == 1
    assert site.closed() == {"alone": 1}
    await site.servable.close()


async def test_inputs_in_another_order_are_the_same() -> None:
    site = Site(Anything())
    many = np.arange(4.0)
    first = site.ask({"x": many, "y": -many})
    second = site.ask({"y": -many, "x": many})
    for answer in await asyncio.gather(first, second):
        assert answer["x"].tolist() == (-answer["y"]).tolist() == [0, 1, 2, 3]
    assert site.closed() == {"full": 1}
    await site.servable.close()


# --- lists of requests ---


class Listing(Model):
    """Takes its requests as a list; answers a negative one with an error of its own."""

    inputs = [TensorSpec("x", "FP32", [-1, -1])]
    outputs = [TensorSpec("y", "FP32", [-1, -1])]
    max_batch_size = 4
    dynamic_batching = DynamicBatching(max_queue_delay=FOREVER)

    def __init__(self) -> None:
        self.lists: list[list[tuple[int, ...]]] = []

    def infer(self, inputs: Inputs, call: Call) -> Any:
        raise AssertionError("infer_batch is there")

    def infer_batch(self, inputs: Sequence[Inputs], calls: Sequence[Call]) -> list[Any]:
        self.lists.append([member_inputs["x"].shape for member_inputs in inputs])
        answers: list[Any] = []
        for member_inputs, own in zip(inputs, calls, strict=True):
            value = member_inputs["x"].flat[0]
            if own.parameters.get("streamed"):
                own.respond({"y": member_inputs["x"]})
                own.finish()
                answers.append(None)
            elif value < 0:
                answers.append(InvalidArgument("below zero") if value > -10 else ValueError("far below"))
            else:
                answers.append({"y": member_inputs["x"] * 2})
        return answers if len(inputs) > 1 else answers * 2


async def test_a_model_may_take_unlike_requests_as_a_list_and_answer_each() -> None:
    model = Listing()
    site = Site(model)
    results: Sequence[Any] = await asyncio.gather(
        *[site.ask(inputs) for inputs in (rows(1), rows(2, width=3), rows(-3, width=2), rows(-20))],
        return_exceptions=True,
    )
    assert model.lists == [[(1, 1), (1, 3), (1, 2), (1, 1)]]
    assert [first_values(result) for result in results[:2]] == [[2], [4]]
    assert isinstance(results[2], InvalidArgument)
    assert isinstance(results[3], Internal)
    await site.servable.close()


async def test_a_list_of_another_length_fails_everybody() -> None:
    site = Site(Listing())
    with pytest.raises(Internal, match="infer_batch returned 2, expected a list of 1 results"):
        await site.ask(rows(1, 2, 3, 4))
    await site.servable.close()


async def test_streams_are_members_of_a_list_too() -> None:
    model = Listing()
    site = Site(model)

    async def stream(value: float, **parameters: Any) -> list[float]:
        own = Call()
        own.parameters = parameters
        return [first_values(answer)[0] async for answer in direct_stream(site.servable, rows(value), own)]

    results: Sequence[Any] = await asyncio.gather(
        site.ask(rows(1)), stream(2), stream(3, streamed=True), stream(-4), return_exceptions=True
    )
    assert len(model.lists) == 1
    assert first_values(results[0]) == [2]
    assert [*results[1:3]] == [[4], [3]]
    assert isinstance(results[3], InvalidArgument)
    await site.servable.close()


# --- streams of one answer ---


class Plain(Batched):
    """Does not take the call, so it gives one answer."""

    def infer(self, inputs: Inputs) -> Any:  # type: ignore[override]
        return super().infer(inputs, Call())


async def test_streams_of_a_model_that_gives_one_answer_are_joined() -> None:
    model = Plain(DynamicBatching(max_queue_delay=FOREVER), max_batch_size=3)
    site = Site(model)

    async def stream(value: float) -> list[list[float]]:
        return [first_values(answer) async for answer in direct_stream(site.servable, rows(value), Call())]

    assert await asyncio.gather(stream(1), stream(2), site.ask(rows(3)))
    assert [sorted(batch) for batch in model.batches] == [[1, 2, 3]]
    await site.servable.close()


async def test_streams_of_a_model_that_may_give_more_run_alone() -> None:
    model = Batched(DynamicBatching(max_queue_delay=FOREVER))
    site = Site(model)
    answers = [first_values(answer) async for answer in direct_stream(site.servable, rows(1), Call())]
    assert answers == [[2]]
    assert site.closed() == {"alone": 1}
    await site.servable.close()


async def test_a_stream_that_waits_too_long_is_refused() -> None:
    model = Batched(DynamicBatching(policy=OWN_TIMEOUTS), open_gate=False)
    site = Site(model)
    busy = await site.busy(model)
    stream = direct_stream(site.servable, rows(1), call(Scheduling(timeout=0.01)))
    with pytest.raises(Unavailable, match="Request timeout expired"):
        await anext(stream)
    model.open_point("infer")
    await busy
    await site.servable.close()


# --- models that do not ask for it ---


async def test_a_model_that_joins_nothing_pays_nothing() -> None:
    """No function of the batcher is called for its requests, on the loop or on its threads."""
    entered: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call":
            entered.add(frame.f_code.co_filename.rpartition("/")[2])

    model = Batched()
    model.dynamic_batching = None
    threading.setprofile(note)
    site = Site(model)
    try:
        sys.setprofile(note)
        await site.ask(rows(1))
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
    assert build() == "compiled" or {"loaded_version.py", "work.py", "thread.py"} <= entered
    ours = ("batch", "batch_schedule", "batcher", "forming", "waiting", "kinds", "joining", "buffers")
    assert not entered & {f"{name}.py" for name in ours}
    await site.servable.close()
