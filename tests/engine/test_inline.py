"""Models with `execution` "inline": plain functions that run on the event loop itself."""

from __future__ import annotations

import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest
from batched_models import Joining, Site, first_values, rows
from scripted_models import Inputs, Plain, number, servable

from triglot import Call, FailedPrecondition, InvalidArgument, ModelLoadError
from triglot.core.configure import configure
from triglot.core.errors import DeadlineExceeded, Internal
from triglot.core.model import Model
from triglot.core.model_config import InstanceGroup, ModelConfig
from triglot.core.scheduling import DynamicBatching, SequenceBatching
from triglot.engine.starting import start_instances
from triglot.engine.warm_up import warm_up


class Inline(Plain):
    """`infer` given by the test; nobody waits meanwhile."""

    execution = "inline"


def twice(inputs: Inputs) -> dict[str, Any]:
    return {"y": inputs["x"] * 2}


async def test_it_runs_on_the_loops_thread_at_once() -> None:
    threads: list[int] = []

    def infer(inputs: Inputs, call: Call) -> dict[str, Any]:
        threads.append(threading.get_ident())
        return {"y": inputs["x"] + 1}

    here = servable(Inline(infer))
    before = set(threading.enumerate())
    call = Call()
    call.statistics = here.statistics
    with pytest.raises(StopIteration) as done:
        here.infer(number(2), call).send(None)  # It waits for nothing.
    assert done.value.value["y"].tolist() == [3]
    assert threads == [threading.get_ident()]
    assert set(threading.enumerate()) <= before
    assert here.on_loop
    assert here.direct
    assert here.alive
    assert (call.batch_size, call.queued) == (1, False)
    assert call.compute_seconds > 0
    assert here.statistics.execution_count == 1
    await here.close()


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (InvalidArgument("not so"), InvalidArgument),
        (ValueError("secret"), Internal),
        (SystemExit(1), Internal),
        (GeneratorExit(), Internal),
        (asyncio.CancelledError(), Internal),
    ],
    ids=lambda one: type(one).__name__,
)
async def test_what_it_raises(error: BaseException, told: type[Exception]) -> None:
    def infer(inputs: Inputs) -> None:
        raise error

    here = servable(Inline(infer))
    call = Call()
    call.statistics = here.statistics
    with pytest.raises(told) as caught:
        await here.infer(number(1), call)
    assert "secret" not in str(caught.value)
    assert here.statistics.execution_count == 1
    await here.close()


async def test_a_deadline_is_looked_at_before_and_after() -> None:
    runs: list[float] = []

    def infer(inputs: Inputs, call: Call) -> dict[str, Any]:
        runs.append(float(inputs["x"][0]))
        while not call.cancelled:
            time.sleep(0.001)
        return twice(inputs)

    here = servable(Inline(infer))
    with pytest.raises(DeadlineExceeded, match="before the request was started"):
        await here.infer(number(1), Call(time.monotonic() - 1))
    with pytest.raises(DeadlineExceeded, match="while the model ran"):
        await here.infer(number(2), Call(time.monotonic() + 1))
    assert runs == [2]
    await here.close()


async def test_it_cannot_call_another_model() -> None:
    """Whoever waits on the loop waits for ever."""
    calls: list[Any] = []

    def infer(inputs: Inputs, call: Call) -> Any:
        return call.infer("other", inputs)

    call = Call()
    call.reach = lambda *wanted: calls.append(wanted)
    here = servable(Inline(infer))
    with pytest.raises(FailedPrecondition, match=r"^execution 'inline': the model calls another one"):
        await here.infer(number(1), call)
    assert calls == []
    await here.close()


async def test_a_streaming_call_gets_its_one_answer() -> None:
    here = servable(Inline(twice))
    assert [answer["y"].tolist() async for answer in here.stream(number(2), Call())] == [[4]]
    await here.close()


async def test_it_cannot_send_answers_before_it_has_ended() -> None:
    def infer(inputs: Inputs, call: Call) -> None:
        call.respond(inputs)

    here = servable(Inline(infer))
    with pytest.raises(FailedPrecondition, match=r"^execution 'inline': the model sends an answer before"):
        async for _ in here.stream(number(2), Call()):
            pass
    await here.close()


class InlineJoining(Joining):
    """Doubles what is joined."""

    execution = "inline"

    def infer(self, inputs: Inputs) -> Any:
        self.batches.append(inputs["x"][:, 0].tolist())
        if -1 in inputs["x"]:
            raise InvalidArgument("minus one")
        return {"y": inputs["x"] * 2}


async def test_requests_of_one_turn_of_the_loop_are_executed_together() -> None:
    model = InlineJoining(DynamicBatching())
    site = Site(model)
    before = set(threading.enumerate())
    calls = [Call() for _ in range(3)]
    answers = await asyncio.gather(*[site.ask(rows(at, at), own) for at, own in enumerate(calls)])
    assert model.batches == [[0, 0, 1, 1, 2, 2]]
    assert [first_values(answer) for answer in answers] == [[0, 0], [2, 2], [4, 4]]
    assert [own.batch_size for own in calls] == [3, 3, 3]
    assert set(threading.enumerate()) <= before
    with pytest.raises(InvalidArgument, match="minus one"):
        await site.ask(rows(-1))
    await site.servable.close()


class InlineLists(InlineJoining):
    """Takes requests as a list; the second one fails."""

    def infer_batch(self, inputs: Any, calls: Any) -> list[Any]:
        self.batches.append([float(one["x"][0, 0]) for one in inputs])
        return [InvalidArgument("second") if at == 1 else {"y": one["x"]} for at, one in enumerate(inputs)]


async def test_requests_come_as_a_list() -> None:
    model = InlineLists(DynamicBatching())
    site = Site(model)
    answers: Any = await asyncio.gather(site.ask(rows(1)), site.ask(rows(2)), return_exceptions=True)
    assert model.batches == [[1, 2]]
    assert first_values(answers[0]) == [1]
    assert isinstance(answers[1], InvalidArgument)
    await site.servable.close()


async def test_it_starts_and_is_warmed_up_before_it_serves() -> None:
    class Warm(Inline):
        example = {"x": [7.0]}
        started = 0

        def start_instance(self, call: Call) -> None:
            self.started += 1

    seen: list[float] = []

    def infer(inputs: Inputs) -> dict[str, Any]:
        seen.append(float(inputs["x"][0]))
        return twice(inputs)

    model = Warm(infer)
    here = servable(model)
    await start_instances(here, Call().reach)
    await warm_up(here)
    assert (model.started, seen) == (1, [7.0])
    assert here.statistics.execution_count == 0
    await here.close()


async def wait(inputs: Inputs) -> dict[str, Any]:
    await asyncio.sleep(0)
    return twice(inputs)


def each(inputs: Inputs) -> Any:
    yield twice(inputs)


SEQUENCES = SequenceBatching()


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (Inline(wait), "an async def infer, which runs on the event loop by itself"),
        (Inline(each), "an infer that yields its answers"),
        (type("Two", (Inline,), {"instances": 2})(twice), "2 instances"),
        (type("Told", (Inline,), {"sequence_batching": SEQUENCES})(twice), "a model with sequence_batching"),
    ],
)
async def test_what_cannot_run_so(model: Model, what: str) -> None:
    with pytest.raises(ValueError, match=r"^execution: ") as caught:
        servable(model)
    assert str(caught.value) == f"execution: expected another one than 'inline' for {what}"


async def test_the_configuration_has_a_model_run_so() -> None:
    model = Plain(twice)
    configure(model, ModelConfig(execution="inline"))
    here = servable(model)
    assert here.on_loop
    assert np.array_equal((await here.infer(number(4), Call()))["y"], [8])
    await here.close()


def test_the_configuration_contradicts_itself() -> None:
    config = ModelConfig(execution="inline", instance_groups=(InstanceGroup("CPU", 3),))
    with pytest.raises(ValueError, match="for 3 instances") as caught:
        configure(Plain(twice), config)
    assert str(caught.value).startswith("parameters[execution]: ")
    assert not isinstance(caught.value, ModelLoadError)
