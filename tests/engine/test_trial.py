"""Two settings in turn: which is better, and whether one of them is too late."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from triglot.engine.trial import Lateness, Setting, Trial


def _batches(trial: Trial, mine: float, other: float) -> Iterator[float | None]:
    now = 0.0
    while True:
        latency = other if trial.on_other else mine
        now += latency
        trial.add(now, 8, [latency] * 8)
        yield trial.verdict


@pytest.mark.parametrize(("other", "sign"), [(0.5, 1), (0.9, 1), (1.0, 0), (1.01, 0), (1.1, -1), (2.0, -1)])
def test_a_trial_tells_which_is_better(other: float, sign: int) -> None:
    verdict = next(one for one in _batches(Trial(Setting(1.0), 10.0), 1.0, other) if one is not None)
    assert (verdict > 0) - (verdict < 0) == sign


@pytest.mark.parametrize(("late", "violated"), [(0, False), (10, False), (40, True), (1000, True)])
def test_one_in_a_hundred_may_be_late(late: int, violated: bool) -> None:
    lateness = Lateness(0.01)
    for number in range(1000):
        lateness.add([0.02 if number < late else 0.005])
    assert lateness.doubtful is lateness.violated is violated


def test_the_requests_of_a_batch_are_late_together() -> None:
    lateness = Lateness(0.01)
    for number in range(20):
        lateness.add([0.02 if number in (3, 4) else 0.005] * 128)
        assert lateness.doubtful is (number >= 3)
        assert not lateness.violated  # Somebody else had the processor.
    more = 0
    while not lateness.violated:
        lateness.add([0.02] * 128)
        more += 1
    assert more <= 3
