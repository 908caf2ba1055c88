"""Instances that are actors: what a call is to a model in a process of its own it is there, too."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.executors import reporting_models, test_process_scheduling, test_process_sequences
from tests.executors.reporting_models import Kept, reporting
from tests.executors.test_process_at_once import (
    test_a_call_ends_at_its_deadline_wherever_it_is,
    test_a_call_that_leaves_leaves_the_others,
    test_all_calls_end_with_their_process,
    test_async_code_runs_many_calls_at_once,
    test_one_call_asks_several_models_at_once,
)
from tests.executors.test_process_calls import (
    test_a_model_calls_another,
    test_a_model_reads_anothers_stream,
    test_a_model_sees_that_its_call_is_cancelled,
    test_a_plain_function_pushes_its_answers,
    test_a_serving_error_arrives_as_it_is,
    test_a_slow_reader_holds_the_model_up,
    test_a_stream,
    test_any_other_exception_is_internal_and_the_process_continues,
    test_async_code_calls_others,
    test_async_code_is_cancelled_with_its_call,
    test_closing_a_stream_closes_the_models_generator,
    test_mapped_weights_are_in_memory_once,
    test_members_of_a_batch,
    test_the_configuration_arrives,
    test_what_a_model_may_ask_of_its_call,
)
from tests.executors.test_process_lists import (
    test_each_request_of_a_list_has_its_own_error,
    test_each_request_of_a_list_has_its_own_inputs_call_and_answer,
)
from tests.executors.test_process_scheduling import (
    test_a_replacement_is_warmed_up_before_it_is_called,
    test_a_sequence_stays_with_its_process,
)
from tests.executors.test_process_sequences import (
    test_what_waits_of_a_lost_sequence_is_refused_and_what_starts_anew_is_run,
)
from tests.executors.test_process_tensors import (
    echoing,
    test_answers_stay_as_they_are_while_others_come,
    test_any_tensors_round_trip,
    test_inputs_are_read_only,
    test_large_tensors,
    test_outputs_of_any_layout_and_kind,
)
from tests.waiting import until
from triglot import ModelLoadError

pytest.importorskip("ray", reason="the ray environment has it")

LEAVING_NOTHING = [
    test_a_call_ends_at_its_deadline_wherever_it_is,
    test_a_call_that_leaves_leaves_the_others,
    test_async_code_runs_many_calls_at_once,
    test_one_call_asks_several_models_at_once,
    test_a_model_calls_another,
    test_a_model_reads_anothers_stream,
    test_a_model_sees_that_its_call_is_cancelled,
    test_a_plain_function_pushes_its_answers,
    test_a_serving_error_arrives_as_it_is,
    test_a_slow_reader_holds_the_model_up,
    test_a_stream,
    test_any_other_exception_is_internal_and_the_process_continues,
    test_async_code_calls_others,
    test_async_code_is_cancelled_with_its_call,
    test_closing_a_stream_closes_the_models_generator,
    test_members_of_a_batch,
    test_what_a_model_may_ask_of_its_call,
    test_each_request_of_a_list_has_its_own_error,
    test_each_request_of_a_list_has_its_own_inputs_call_and_answer,
    test_inputs_are_read_only,
    test_outputs_of_any_layout_and_kind,
]
"""Tests of processes that run here once more, one after the other with the same instances."""
SHARED = [
    test_all_calls_end_with_their_process,
    test_mapped_weights_are_in_memory_once,
    test_the_configuration_arrives,
    test_a_replacement_is_warmed_up_before_it_is_called,
    test_a_sequence_stays_with_its_process,
    test_what_waits_of_a_lost_sequence_is_refused_and_what_starts_anew_is_run,
    echoing,
    test_answers_stay_as_they_are_while_others_come,
    test_any_tensors_round_trip,
    test_large_tensors,
]
"""Tests of processes that run here once more, each with instances of its own."""
TWO_INSTANCES = "\nReporting.instances = 2\n"
pytestmark = pytest.mark.usefixtures("reporting_on_ray")


@pytest.fixture(name="kept", scope="module")
def all_kept(tmp_path_factory: pytest.TempPathFactory, reporting_on_ray: None) -> Iterator[Kept]:
    kept = Kept(tmp_path_factory.mktemp("kept"))
    yield kept
    kept.close()


@pytest.fixture(autouse=True)
def _kept(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, kept: Kept) -> None:
    if request.function in (*LEAVING_NOTHING, *OWN_LEAVING_NOTHING):
        monkeypatch.setattr(reporting_models, "KEPT", [kept])


async def test_instances_are_spread_over_the_nodes(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=TWO_INSTANCES) as served:
        assert sum(name.startswith("node_instances") for name in served.readings()) == 2
        gate = (
            "(folder / f'in-{os.getpid()}').touch()\nwhile len(list(folder.glob('in-*'))) < 2: time.sleep(0.005)"
        )
        answers = await asyncio.gather(*(served.ask(f"{gate}\nanswer = os.getpid()") for _ in range(2)))
        assert len({*answers, str(os.getpid())}) == 3
        assert served.servable.alive
    assert served.files("closed") == sorted(f"closed-{pid}" for pid in answers)


async def test_options_in_a_class_that_only_the_configuration_runs_on_ray(tmp_path: Path) -> None:
    """It is not imported before it is placed."""
    with pytest.raises(
        ModelLoadError, match=r"ray: expected no options in the class with parameters\[execution\]"
    ):
        async with reporting(tmp_path, more="Reporting.ray = triglot.RayOptions(num_cpus=2)\n"):
            pass


async def test_requests_are_joined_before_they_travel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # With room for one more on its way, that would not wait for others.
    monkeypatch.setattr(reporting_models, "MAX_INFLIGHT", 1)
    await test_process_scheduling.test_requests_are_joined_for_a_process(tmp_path / "joined", "")
    await test_process_scheduling.test_all_members_of_a_batch_are_unavailable_when_its_process_is_lost(
        tmp_path / "lost"
    )


async def test_no_request_of_a_sequence_is_run_by_the_next_actor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(test_process_sequences, "TURNS", 4)  # Each needs another actor.
    await test_process_sequences.test_no_request_of_a_sequence_is_run_by_the_next_process(tmp_path)


async def test_plain_code_runs_on_the_main_thread_one_call_at_a_time(tmp_path: Path) -> None:
    async with reporting(tmp_path) as served:
        text = """
assert threading.current_thread() is threading.main_thread()
self.state["running"] = self.state.get("running", 0) + 1
time.sleep(0.02)
answer, self.state["running"] = self.state["running"], self.state["running"] - 1
"""
        assert {*await asyncio.gather(*(served.ask(text) for _ in range(20)))} == {"1"}


async def test_the_next_call_travels_while_one_runs(tmp_path: Path) -> None:
    waits = "(folder / 'in').touch()\nwhile not (folder / 'go').exists(): time.sleep(0.005)"
    async with reporting(tmp_path) as served:
        (process,) = served.model._pool.ready()
        running = asyncio.ensure_future(served.run(waits))
        await served.entered("in")
        waiting = asyncio.ensure_future(served.ask("inputs['x'].sum()", x=np.ones(1 << 20)))
        await until(lambda: process.calls.count == 2)
        (tmp_path / "go").touch()
        await running
        assert await waiting == str(float(1 << 20))


async def test_a_cancelled_call_that_waits_in_the_actor_is_not_run(tmp_path: Path) -> None:
    waits = "(folder / 'in').touch()\nwhile not call.cancelled: time.sleep(0.005)"
    async with reporting(tmp_path) as served:
        (process,) = served.model._pool.ready()
        running = asyncio.ensure_future(served.run(waits))
        await served.entered("in")
        waiting = asyncio.ensure_future(served.run("(folder / 'run').touch()"))
        await until(lambda: process.calls.count == 2)
        first, second = (process.calls._states[number] for number in sorted(process.calls._states))
        # The actor learns of both over one connection, in this order.
        for state, call in ((second, waiting), (first, running)):
            call.cancel()
            await until(lambda state=state: state.cancelled)  # type: ignore[misc]
        await served.run("1")
        assert served.files("run") == []


OWN_LEAVING_NOTHING = [
    test_a_cancelled_call_that_waits_in_the_actor_is_not_run,
    test_plain_code_runs_on_the_main_thread_one_call_at_a_time,
    test_the_next_call_travels_while_one_runs,
]
"""As `LEAVING_NOTHING`."""
