"""Sequences that wait for a slot, are idle, or are left by who called: when they are over. No threads."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.direct_work import FutureWork
from tests.scheduling.scripted_models import Inputs
from tests.scheduling.sequence_models import (
    DIRECT,
    Driver,
    Summing,
    error_of,
    rows_of,
    sequence_call,
    started,
    value_of,
)
from triglot import Call
from triglot.core.errors import Cancelled, Code, DeadlineExceeded, InvalidArgument, Unavailable
from triglot.core.request_scheduling import Scheduling
from triglot.model.scheduling import OldestStrategy, SequenceBatching
from triglot.scheduling.sequences.table import SequenceTable

# --- slots ---


def test_slots_are_made_when_they_are_used() -> None:
    """A configuration may name any number of them: none costs anything before a sequence has it."""
    table = SequenceTable(instances=2, rows=10**12, max_idle=1)
    assert (table.slots, table.used_slots) == (2 * 10**12, 0)
    work: Any = SimpleNamespace(call=Call())
    for number in range(5):
        table.add(work, Scheduling(sequence_id=number, sequence_start=True), {}, None, 0.0)
    assert [run.slot for run in table.live.values()] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert (table.slots, table.used_slots) == (2 * 10**12, 5)
    assert table.retire() == 1
    assert table.slots == 10**12 + 2


# --- the backlog ---


def full(**options: Any) -> tuple[Driver, FutureWork]:
    """One slot, which sequence 1 has."""
    driver = Driver(Summing(DIRECT, rows=1, **options))
    return driver, driver.send(1, 1, start=True)


async def test_the_backlog_is_in_order() -> None:
    driver, _ = full()
    sent = [driver.send(number, number, start=at == 0, end=at == 1) for at in range(2) for number in (2, 3, 4)]
    assert driver.run()
    assert not driver.run()
    driver.send(1, 1, end=True)
    order = []
    while (batch := driver.take()) is not None:
        order += rows_of(batch)
        driver.finish(batch)
    assert order == [1, 2, 2, 3, 3, 4, 4]
    assert [value_of(request) for request in sent] == [2, 3, 4, 4, 6, 8]
    assert (driver.lease.held, driver.timers) == (0, 0)


async def test_a_sequence_of_the_same_id_queues_up_behind_the_others() -> None:
    driver, _ = full()
    driver.send(1, 1, end=True)
    again = driver.send(5, 1, start=True, end=True)
    driver.send(1, 2, start=True, end=True)
    order = []
    while (batch := driver.take()) is not None:
        order += rows_of(batch)
        driver.finish(batch)
    assert order == [1, 1, 2, 1]
    assert value_of(again) == 5


async def test_a_timeout_in_the_backlog_ends_the_whole_sequence() -> None:
    driver, _ = full()
    sent = [
        driver.send(1, 2, start=True, timeout=9),
        driver.send(1, 2, timeout=5),
        driver.send(1, 3, start=True),
        driver.send(1, 2),
    ]
    driver.wait(4.9)
    assert not any(request.future.done() for request in sent)
    driver.wait(0.2)
    assert [request.future.done() for request in sent] == [True, True, False, True]
    for request in (sent[0], sent[1], sent[3]):
        error = error_of(request)
        assert isinstance(error, Unavailable)
        assert error.message == "timeout of the corresponding sequence has been expired"
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        driver.send(1, 2)
    assert driver.reading("sequences_ended", reason="timeout") == 1
    assert len(driver.schedule) == 1


async def test_a_timeout_is_for_the_backlog_only() -> None:
    driver, first = full()
    second = driver.send(2, 2, start=True, timeout=5)
    ending = driver.send(1, 1, end=True, timeout=5)
    driver.wait(4)
    assert [driver.run() for _ in range(2)] == [True, True]
    driver.wait(4)
    assert driver.run()
    assert [value_of(request) for request in (first, ending, second)] == [1, 2, 2]


# --- idle ---


async def test_a_sequence_is_idle_when_nothing_of_it_waits_or_runs() -> None:
    driver, _ = full()
    driver.wait(150)
    batch = driver.take()
    assert batch is not None
    driver.wait(150)
    driver.finish(batch)
    driver.wait(99)
    assert driver.schedule.holds(1)
    later = driver.send(1, 1)
    driver.wait(50)
    assert driver.run()
    assert value_of(later) == 2
    driver.wait(101)
    assert not driver.schedule.holds(1)
    assert (driver.lease.held, driver.timers, driver.reading("sequence_slots_used")) == (0, 0, 0)


async def test_who_waits_gets_the_slot_of_an_idle_sequence() -> None:
    driver, _ = full()
    assert driver.run()
    waiting = driver.send(5, 2, start=True)
    driver.wait(99)
    assert driver.take() is None
    driver.wait(2)
    assert driver.run()
    assert value_of(waiting) == 5
    assert driver.reading("sequences_ended", reason="idle") == 1


async def test_timers_are_not_set_for_every_request() -> None:
    driver, _ = full()
    for _ in range(1000):
        driver.run()
        driver.send(1, 1)
        driver.wait(0.01)
    assert driver.timers_fired + driver.timers < 5


# --- who leaves ---


def leave(driver: Driver, execution: FutureWork) -> None:
    """As a call does that is cancelled."""
    execution.call.cancel()
    assert driver.schedule.discard(execution)
    execution.future.cancel()
    driver.turn()


def assert_cancelled(*executions: FutureWork, sequence_id: int = 1) -> None:
    for execution in executions:
        assert isinstance(error_of(execution), Cancelled)
        expected = f"sequence {sequence_id} was cancelled with another queued request of the same sequence"
        assert error_of(execution).message == expected


OLDEST = replace(DIRECT, strategy=OldestStrategy(max_candidate_sequences=1))


@pytest.mark.parametrize("batching", [DIRECT, OLDEST])
@pytest.mark.parametrize("end", [True, False])
async def test_a_request_that_is_cancelled_ends_its_sequence(batching: SequenceBatching, *, end: bool) -> None:
    driver = started(batching, 1, rows=1)
    second, third, other = driver.send(10, 1), driver.send(3, 1, end=end), driver.send(7, 2, start=True, end=True)
    leave(driver, second)
    assert_cancelled(third)
    assert driver.run()
    assert value_of(other) == 7  # It has the slot now.
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        driver.send(1, 1)
    again = driver.send(4, 1, start=True)
    assert driver.run()
    assert value_of(again) == 4  # Its state is its own.
    assert driver.reading("sequences_ended", reason="cancelled") == 1


async def test_what_comes_before_a_cancelled_request_is_executed() -> None:
    driver, first = full()
    second, third, fourth = driver.send(10, 1), driver.send(3, 1), driver.send(4, 1)
    leave(driver, third)
    assert_cancelled(fourth)
    while driver.run():
        pass
    assert [value_of(request) for request in (first, second)] == [1, 11]
    assert not driver.schedule.holds(1)


@pytest.mark.parametrize("which", [0, 1, 2])
async def test_a_sequence_in_the_backlog_is_cancelled_as_a_whole(which: int) -> None:
    driver, _ = full()
    waiting = [driver.send(1, 2, start=True), driver.send(2, 2), driver.send(3, 2)]
    again = driver.send(5, 2, start=True, end=True)
    leave(driver, waiting.pop(which))
    assert_cancelled(*waiting, sequence_id=2)
    driver.send(1, 1, end=True)
    while driver.run():
        pass
    assert value_of(again) == 5


async def test_a_start_that_was_cancelled_takes_with_it_what_follows() -> None:
    driver, first = full()
    followers = [driver.send(1, 1), driver.send(1, 1, end=True)]
    again = driver.send(5, 1, start=True)
    leave(driver, first)
    assert_cancelled(*followers)
    while driver.run():
        pass
    assert value_of(again) == 5
    assert driver.reading("sequences_ended", reason="cancelled") == 1


@pytest.mark.parametrize("waits", [True, False])
async def test_an_end_that_was_cancelled_still_ends(*, waits: bool) -> None:
    driver, first = full()
    if not waits:
        driver.run()
    ending = driver.send(1, 1, end=True)
    other = driver.send(7, 2, start=True)
    leave(driver, ending)
    while driver.run():
        pass
    assert [value_of(request) for request in (first, other)] == [1, 7]
    assert not driver.schedule.holds(1)
    assert driver.reading("sequences_ended", reason="cancelled") == 1


async def test_a_running_request_cannot_be_taken_back() -> None:
    driver, first = full()
    batch = driver.take()
    assert batch is not None
    assert not driver.schedule.discard(first)

    def infer(inputs: Inputs, call: Call) -> dict[str, Any]:
        first.call.cancel()
        return {"y": inputs["x"], "after": inputs["x"]}

    driver.finish(batch, infer)
    assert value_of(first) == 1
    later = driver.send(1, 1)
    assert driver.run()
    assert value_of(later) == 2


async def test_a_request_that_was_taken_and_is_cancelled_before_it_runs_is_left_out() -> None:
    driver, first = full()
    follower = driver.send(1, 1)
    batch = driver.take()
    assert batch is not None
    first.call.cancel()
    driver.finish(batch)
    assert isinstance(error_of(first), Cancelled)
    assert_cancelled(follower)
    assert (driver.schedule.holds(1), driver.lease.held, len(driver.schedule)) == (False, 0, 0)


async def test_a_deadline_that_passed_is_found_when_it_is_its_turn() -> None:
    driver = started(DIRECT, 2)
    call = Call(deadline=-math.inf)
    call.model_name, call.scheduling = "summing", sequence_call(1).scheduling
    late, other = driver.put(100, call), driver.send(3, 2)
    assert driver.run()
    assert isinstance(error_of(late), DeadlineExceeded)
    assert value_of(other) == 3
    with pytest.raises(InvalidArgument, match="must specify the START flag"):
        driver.send(4, 1)


async def test_cancelled_call_still_in_the_backlog() -> None:
    driver, first = full()
    first.call.cancel()
    assert not driver.run()
    assert error_of(first).code is Code.CANCELLED
    assert isinstance(error_of(first), Cancelled)
    assert (driver.lease.held, len(driver.schedule), driver.timers) == (0, 0, 0)


# --- elsewhere ---


async def test_sequence_that_restarts_in_another_instance_has_ended() -> None:
    driver, first = full()
    driver.schedule.end(1)
    assert not driver.schedule.holds(1)
    driver.schedule.end(1)
    driver.schedule.end("unknown")
    assert driver.run()
    assert value_of(first) == 1
    assert (driver.lease.held, driver.reading("sequences_ended", reason="replaced")) == (0, 1)
