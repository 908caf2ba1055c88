"""What a schedule of sequences runs, and when: rows, batches, the backlog, and cancelled requests. No threads."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

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
from triglot.model.scheduling import DirectStrategy, OldestStrategy, SequenceBatching


def direct(**options: Any) -> SequenceBatching:
    return replace(DIRECT, strategy=DirectStrategy(**options))


def oldest(**options: Any) -> SequenceBatching:
    return replace(DIRECT, strategy=OldestStrategy(**options))


SLOTS = direct(max_queue_delay=2, minimum_slot_utilization=0.5)
SIZES = oldest(max_candidate_sequences=4, preferred_sizes=[2], max_queue_delay=2)


@pytest.mark.parametrize(
    ("batching", "sent", "seconds", "reason"),
    [
        (direct(), (1,), 0, "no_delay"),
        (direct(), (1, 2, 3, 4), 0, "full"),
        (SLOTS, (1, 2), 0, "preferred"),
        (SLOTS, (1,), 2, "delay"),
        (SLOTS, (1,), None, "drained"),
        (direct(), (1,), None, "drained"),
        (oldest(max_candidate_sequences=4), (1,), 0, "no_delay"),
        (SIZES, (1, 2, 3), 0, "preferred"),
        (SIZES, (1,), 2, "delay"),
        (SIZES, (1,), None, "drained"),
        (oldest(max_candidate_sequences=4, max_queue_delay=2), (1, 2, 3, 4), 0, "full"),
    ],
)
async def test_why_a_batch_was_closed_is_counted(
    batching: SequenceBatching, sent: tuple[int, ...], seconds: float | None, reason: str
) -> None:
    driver = started(batching, 4)
    readings = [reading for reading in driver.schedule.readings() if reading.name == "batches_closed"]
    before = {reading.labels["reason"]: reading.value for reading in readings}
    requests = driver.reading("batched_requests")
    for number in sent:
        driver.send(1, number)
    if seconds is None:
        driver.schedule.close()
    else:
        driver.wait(seconds)
    batch = driver.take()
    assert batch is not None
    assert driver.reading("batches_closed", reason=reason) == before.get(reason, 0) + 1
    assert driver.reading("batched_requests") == requests + len(batch.members)


# --- direct ---


async def test_each_sequence_keeps_its_row_and_the_batch_ends_with_the_last_that_is_ready() -> None:
    driver = started(DIRECT, 4)
    for sent, rows in (((3,), [0, 0, 3]), ((4, 1), [1, 0, 0, 4]), ((2, 1, 3), [1, 2, 3]), ((1,), [1])):
        for number in sent:
            driver.send(1, number)
        batch = driver.take()
        assert rows_of(batch) == rows
        assert batch is not None
        driver.finish(batch)


async def test_rows_without_a_request_are_not_ready_and_zero() -> None:
    driver = started(DIRECT, 3)
    driver.send(7, 3, end=True)
    assert driver.run()
    seen = driver._model.seen[-1]  # type: ignore[attr-defined]
    assert {name: array.ravel().tolist() for name, array in seen.items()} == {
        "x": [0, 0, 7],
        "start": [0, 0, 0],
        "ready": [False, False, True],
        "end": [0, 0, 1],
        "id": [0, 0, 3],
        "before": [0, 0, 0],
    }


async def test_only_one_request_of_a_sequence_is_in_a_batch() -> None:
    driver = started(DIRECT, 1)
    sent = [driver.send(1, 1, end=at == 2) for at in range(3)]
    for at in range(3):
        batch = driver.take()
        assert rows_of(batch) == [1]
        assert driver.take() is None
        assert batch is not None
        driver.finish(batch)
        assert [request.future.done() for request in sent] == [True] * (at + 1) + [False] * (2 - at)


async def test_slots_are_given_away_over_all_instances() -> None:
    driver = Driver(Summing(DIRECT, rows=2, instances=3))
    for number in range(1, 7):
        driver.send(0, number, start=True)
    assert [rows_of(driver.take(instance)) for instance in range(3)] == [[1, 4], [2, 5], [3, 6]]


async def test_requests_of_unlike_shape_are_in_batches_of_their_own() -> None:
    driver = started(DIRECT, 2)
    wide = [
        driver.put_inputs({"x": np.zeros((1, width), np.float32)}, sequence_call(number))
        for number, width in ((1, 2), (2, 3))
    ]
    batches = []
    while (batch := driver.take()) is not None:
        batches.append(rows_of(batch))
        driver.finish(batch, lambda inputs, _: {"y": inputs["x"], "after": inputs["before"]})
    assert batches == [[1], [0, 2]]
    assert [request.future.done() for request in wide] == [True, True]


async def test_a_batch_waits_for_enough_rows() -> None:
    driver = started(direct(max_queue_delay=2, minimum_slot_utilization=0.5), 3)
    driver.send(1, 1)
    assert driver.take() is None
    driver.wait(1.5)
    assert driver.take() is None
    driver.send(1, 3)
    assert rows_of(driver.take()) == [1, 0, 3]


async def test_a_batch_does_not_wait_longer_than_the_delay() -> None:
    driver = started(direct(max_queue_delay=2, minimum_slot_utilization=0.5), 2)
    driver.send(1, 2)
    driver.wait(2)
    assert rows_of(driver.take()) == [0, 2]


async def test_a_delay_alone_has_no_effect() -> None:
    driver = started(direct(max_queue_delay=2), 2)
    driver.send(1, 1)
    assert rows_of(driver.take()) == [1]


async def test_without_a_batch_dim_an_instance_has_one_sequence() -> None:
    driver = Driver(Summing(DIRECT, rows=0, instances=2))
    for number in (1, 2, 3):
        driver.send(number, number, start=True, end=True)
    assert [rows_of(driver.take(instance)) for instance in range(2)] == [[1], [2]]
    assert (driver.reading("sequence_slots"), driver.reading("sequence_backlog")) == (2, 1)


# --- oldest ---


async def test_the_oldest_requests_come_first_one_of_each_sequence() -> None:
    driver = started(oldest(max_candidate_sequences=6), 6, rows=3)
    for number in (6, 6, 2, 5, 1):
        driver.send(1, number)
        driver.wait(0.1)
    taken = []
    while (batch := driver.take()) is not None:
        taken.append(rows_of(batch))
        driver.finish(batch)
    assert taken == [[6, 2, 5], [6, 1]]


@pytest.mark.parametrize("ordered", [False, True])
async def test_answers_leave_as_their_requests_began_if_they_are_to(ordered: bool) -> None:
    strategy = oldest(max_candidate_sequences=1, preserve_ordering=ordered)
    driver = started(strategy, 3, instances=3)
    sent = [driver.send(1, number) for number in (1, 2, 3)]
    cancelled = driver.send(1, 3)
    taken = [driver.take(instance) for instance in range(3)]
    done_so_far = []
    driver.schedule.discard(cancelled)
    for at in (1, 0, 2):
        batch = taken[at]
        assert batch is not None
        driver.finish(batch)
        done_so_far.append([request.future.done() for request in sent])
    early = [False, not ordered, False]
    assert done_so_far == [early, [True, True, False], [True, True, True]]
    # The next one of a sequence runs when its turn comes, whoever has been told of the one before.
    later = [driver.send(1, number) for number in (2, 1)]
    assert driver.run(1)
    assert driver.run(0)
    assert [value_of(request) for request in later] == [2, 2]


async def test_while_a_request_runs_the_next_of_its_sequence_waits() -> None:
    driver = started(oldest(), 2)
    for number in (1, 1, 2):
        driver.send(1, number)
    first = driver.take()
    assert rows_of(first) == [1, 2]
    assert driver.take() is None
    assert first is not None
    driver.finish(first)
    assert rows_of(driver.take()) == [1]


@pytest.mark.parametrize(("waiting", "taken"), [(1, []), (2, [2]), (3, [2]), (4, [4]), (5, [4])])
async def test_preferred_sizes(waiting: int, taken: list[int]) -> None:
    driver = started(oldest(max_candidate_sequences=6, preferred_sizes=[2, 4], max_queue_delay=3), 6, rows=5)
    for number in range(1, waiting + 1):
        driver.send(1, number)
    batch = driver.take()
    assert ([] if batch is None else [len(batch.members)]) == taken
    if batch is None:
        driver.wait(3)
        assert len(rows_of(driver.take())) == waiting


async def test_nothing_waits_when_all_sequences_are_present() -> None:
    driver = started(oldest(max_candidate_sequences=2, max_queue_delay=3), 2)
    driver.send(1, 1)
    assert driver.take() is None
    driver.send(1, 2)
    assert rows_of(driver.take()) == [1, 2]


async def test_as_many_sequences_as_are_candidates() -> None:
    driver = Driver(Summing(oldest(max_candidate_sequences=3), instances=2))
    for number in range(1, 9):
        driver.send(1, number, start=True)
    assert (driver.reading("sequence_slots_used"), driver.reading("sequence_backlog")) == (6, 2)


# --- what an instance has forgotten ---


async def test_sequences_of_an_instance_that_has_lost_them_are_over() -> None:
    driver = started(DIRECT, 4, rows=2, instances=2)
    # 1 and 3 are on the first instance: one runs, with what follows it and a new start; the other only waits.
    driver.send(1, 1)
    batch = driver.take()
    assert rows_of(batch) == [1]
    assert batch is not None
    refused = [driver.send(1, 1), driver.send(1, 1, end=True), driver.send(1, 3)]
    kept = [driver.send(7, 1, start=True), driver.send(1, 1), driver.send(1, 2)]
    for _ in range(3):
        driver.schedule._lose(0, 1, "instance 0")
    driver.turn()
    assert ["must specify the START" in error_of(request).message for request in refused] == [True] * 3
    assert driver.reading("sequences_ended", reason="lost") == 2
    assert [driver.schedule.holds(number) for number in (1, 2, 3, 4)] == [True, True, False, True]
    assert (len(driver.schedule), driver.lease.held) == (2, 3)  # One has begun on the other instance.
    driver.finish(batch)
    while driver.run(0) or driver.run(1):
        pass
    assert [value_of(request) for request in kept] == [7, 8, 1]
    assert [driver.reading("sequences_ended", reason=reason) for reason in ("lost", "end", "cancelled")] == [
        2,
        0,
        0,
    ]
    driver.send(1, 1, end=True)
    assert driver.run(0)
    assert driver.lease.held == 2


async def test_a_sequence_whose_last_request_runs_ends_with_it() -> None:
    driver = started(DIRECT, 1)
    driver.send(1, 1, end=True)
    batch = driver.take()
    assert batch is not None
    driver.schedule._lose(0, 1, "instance 0")
    driver.finish(batch)
    assert [driver.reading("sequences_ended", reason=reason) for reason in ("lost", "end")] == [0, 1]
    assert driver.lease.held == 0
