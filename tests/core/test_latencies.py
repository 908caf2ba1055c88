"""Summaries over a window, and the times of first responses: pure values, on a clock of the test's."""

from __future__ import annotations

import math
from time import perf_counter

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.recorded_calls import unsent_spans
from triglot.core.statistics import SUMMARY_LIMITS, CallTimes, Latencies, Summary, rank
from triglot.telemetry.spans.recorder import CallSpan

NOW = 1.7e9 - 1.7e9 % 12
"""The start of a slot."""
SPAN = CallSpan(unsent_spans(), CallTimes(), "ab" * 16, "", 1, "")


@given(st.lists(st.floats(0, 9e8), min_size=1, max_size=300), st.integers(0, 10_000))
@example([0.0], 5000)
@example([1.0, 1.02], 5000)
@example([9e8], 10_000)
def test_quantiles_are_of_the_right_value_within_a_percent(values: list[float], share: int) -> None:
    summary = Summary()
    for value in values:
        summary.add(value, NOW)
    (found,) = summary.quantiles([share / 10_000], NOW)
    exact = rank(sorted(values), share)
    assert found == pytest.approx(exact, rel=0.0101, abs=1)
    assert summary.count == len(values)
    assert summary.sum == pytest.approx(sum(values))


def test_longer_times_than_any_limit_count_in_the_last_bucket() -> None:
    summary = Summary()
    summary.add(1e12, NOW)
    assert summary.quantiles([0.5, 1.0], NOW) == [SUMMARY_LIMITS[-1]] * 2
    assert summary.sum == 1e12


def test_quantiles_forget_what_is_older_than_a_minute_and_sums_do_not() -> None:
    summary = Summary()
    assert math.isnan(summary.quantiles([0.5], NOW)[0])
    summary.add(1000.0, NOW + 11.9)
    for seconds in (12, 48, 59.9):
        assert summary.quantiles([0.5], NOW + seconds) == [pytest.approx(1000, rel=0.01)]
    assert math.isnan(summary.quantiles([0.5], NOW + 60)[0])
    summary.add(10.0, NOW + 61)
    assert summary.quantiles([0.5, 1], NOW + 61) == [pytest.approx(10, rel=0.01)] * 2
    assert (summary.count, summary.sum) == (2, 1010.0)


@given(st.lists(st.tuples(st.floats(0, 300), st.floats(2, 1e6)), max_size=60), st.floats(0, 60))
def test_the_window_has_the_last_48_to_60_seconds(calls: list[tuple[float, float]], later: float) -> None:
    summary = Summary()
    calls.sort()
    for seconds, value in calls:
        summary.add(value, NOW + seconds)
    end = (calls[-1][0] if calls else 0) + later
    (most,) = summary.quantiles([1.0], NOW + end)
    sure = [value for seconds, value in calls if seconds > end - 48]
    maybe = [value for seconds, value in calls if seconds > end - 60]
    if sure:
        assert most >= max(sure) / 1.0101
    if maybe:
        assert math.isnan(most) or most <= max(maybe) * 1.0101
    else:
        assert math.isnan(most)


def latencies(*, decoupled: bool = False) -> Latencies:
    return Latencies([1.0, 100.0], [], decoupled=decoupled, cached=False)


def times(responded: float = 0.0) -> CallTimes:
    found = CallTimes()
    found.responded = responded
    return found


def test_one_response_comes_with_the_end() -> None:
    measured = latencies()
    measured.responded(times(), 0.05, NOW, None, well=True)
    measured.responded(times(), 0.0005, NOW, SPAN, well=False)
    measured.responded(times(), 7.0, NOW, None, well=True)
    first = measured.first_response
    assert first is not None
    assert first.counts == [1, 1, 1]
    assert first.sum == pytest.approx(7050.5)
    assert first.exemplars == [(NOW, pytest.approx(0.5), SPAN), None, None]


def test_the_first_of_many_responses_comes_before_the_end() -> None:
    measured = latencies(decoupled=True)
    measured.responded(times(perf_counter() - 6), 6.05, NOW, None, well=True)
    assert measured.first_response is not None
    assert measured.first_response.counts == [0, 1, 0]
    # A stream without a response has none, unless it ends with an error.
    measured.responded(times(), 9.0, NOW, None, well=True)
    assert measured.first_response.counts == [0, 1, 0]
    measured.responded(times(), 9.0, NOW, None, well=False)
    assert measured.first_response.counts == [0, 1, 1]
