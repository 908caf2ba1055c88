"""The soak, in small: its calls end as expected, and it detects what grows."""

from __future__ import annotations

import pytest

from bench import soak
from bench.soak import MIB, Reading, Result, Usage, lines, measure
from bench.soak_calls import KINDS


@pytest.mark.parametrize("transport", soak.TRANSPORTS)
def test_calls_end_as_expected(transport: str) -> None:
    result = measure(transport, minutes=0.15, rate=60)
    assert (result.failed, result.unexpected) == ([], [])
    assert result.calls.total() > 100
    assert len(result.calls) > len(KINDS) / 2
    assert len(result.readings[0].processes) >= 3
    assert min(usage.resident for usage in result.readings[0].processes.values()) > MIB


def soaked(mib_a_minute: float = 0.0, descriptors_an_hour: float = 0.0) -> Result:
    """A soak of 90 minutes that begins with a start of 30, in which much grows."""
    result = Result("h2", root=1, minutes=90.0)
    for reading in range(540):
        minutes = reading / 6
        grown = min(minutes, 30) * 5 + max(0, minutes - 30) * mib_a_minute
        usage = Usage(round((60 + grown) * MIB), round(20 + minutes * descriptors_an_hour / 60), 5)
        result.readings.append(Reading(minutes, {1: Usage(50 * MIB, 10, 2), 2: usage}))
    return result


def test_growth_counts_in_the_last_hour() -> None:
    assert soaked().good
    assert soaked(mib_a_minute=0.09).good
    assert not soaked(mib_a_minute=0.11).good
    assert not soaked(descriptors_an_hour=12).good
    _, shown, *_ = "\n".join(lines([soaked(mib_a_minute=0.2)])).splitlines()
    assert " ".join(shown.split()) == "h2 90 0 0 0 0 260.1 271.9 +0.200 30 30 7 7"


def test_a_process_that_was_replaced_is_wrong() -> None:
    result = soaked()
    last = result.readings.pop()
    result.readings.append(Reading(last.minutes, {1: last.processes[1], 3: last.processes[2]}))
    assert not result.good


def test_failures_are_listed() -> None:
    result = soaked()
    result.failed += [f"12:00:{number} unary" for number in range(30)]
    report = list(lines([result]))
    assert not result.good
    assert "h2: WRONG" in report
    assert report.count("failed: 12:00:7 unary") == 1
    assert report[-1] == "failed: 10 more"
