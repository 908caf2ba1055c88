"""How a client's calls are counted: in one process, and by several workers in one file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.access.holder import CallLimits
from triglot.core.errors import QueueFull
from triglot.platform import tallies as module
from triglot.platform.tallies import LocalTally, SharedTallies, Tally, shared_size

WORKERS = 2


class Clock:
    """Time, as the test lets it pass."""

    def __init__(self) -> None:
        self.now = 1000.0
        """Seconds."""

    def __call__(self) -> int:
        return round(self.now * 1e9)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "monotonic_ns", clock)
    return clock


@pytest.fixture
def shared() -> Iterator[Callable[[int], SharedTallies]]:
    """Makes what the worker of a start has."""
    with tempfile.TemporaryFile() as file:
        file.truncate(shared_size(WORKERS))
        yield lambda run: SharedTallies(file.fileno(), WORKERS, run)


@pytest.fixture(params=["local", "shared"])
def tally(request: pytest.FixtureRequest, shared: Callable[[int], SharedTallies]) -> Tally:
    return LocalTally() if request.param == "local" else shared(1)("client")


def taken(limits: CallLimits) -> float:
    """Seconds until it should retry; 0.0: it was let in."""
    try:
        limits.count()
    except QueueFull as error:
        return error.retry_after or 0.0
    return 0.0


def test_a_rate_and_its_burst(tally: Tally, clock: Clock) -> None:
    limits = CallLimits("client", 10, 0, tally)
    assert [taken(limits) for _ in range(10)] == [0.0] * 10
    wait = taken(limits)
    assert wait == pytest.approx(0.1)
    clock.now += wait + 1e-9
    assert taken(limits) == 0.0
    assert taken(limits) > 0.0
    clock.now += 3600
    assert [taken(limits) > 0 for _ in range(11)] == [False] * 10 + [True]


def test_a_rate_of_less_than_one_a_second(tally: Tally, clock: Clock) -> None:
    limits = CallLimits("client", 0.1, 0, tally)
    assert taken(limits) == 0.0
    assert taken(limits) == pytest.approx(10)
    clock.now += 10.001
    assert taken(limits) == 0.0


def test_open_calls(tally: Tally) -> None:
    limits = CallLimits("client", 0, 2, tally)
    limits.enter()
    limits.enter()
    with pytest.raises(QueueFull, match=r"open calls of client .*: at most 2"):
        limits.enter()
    limits.leave()
    limits.enter()
    limits.change(0, 3)
    limits.enter()
    with pytest.raises(QueueFull, match=r"open calls of client .*: at most 3"):
        limits.enter()


def test_a_call_that_comes_too_soon_is_not_open(tally: Tally, clock: Clock) -> None:
    limits = CallLimits("client", 1, 5, tally)
    limits.enter()
    for _ in range(10):
        with pytest.raises(QueueFull, match="at most 1 a second"):
            limits.enter()
    for _ in range(4):
        clock.now += 1.001
        limits.enter()


def test_workers_count_together(shared: Callable[[int], SharedTallies], clock: Clock) -> None:
    first, second = (CallLimits("client", 10, 3, shared(run)("client")) for run in (1, 2))
    assert [taken(limits) for _ in range(5) for limits in (first, second)] == [0.0] * 10
    assert taken(first) > 0
    assert taken(second) > 0
    clock.now += 1
    first.enter()
    second.enter()
    second.enter()
    for limits in (first, second):
        with pytest.raises(QueueFull, match=r"open calls of client .*: at most 3"):
            limits.enter()
    second.leave()
    first.enter()


def test_calls_of_a_worker_that_was_killed(shared: Callable[[int], SharedTallies]) -> None:
    """The supervisor drops them, and no others."""
    assert all(shared(1)(name).enter(0) for name in ("client", "client", "another"))
    client, another = (shared(2)(name) for name in ("client", "another"))
    assert not client.enter(2)
    assert client.enter(3)
    shared(1).clear()
    assert client.enter(2)
    assert not client.enter(2)
    assert another.enter(1)


def test_clients_do_not_mix(shared: Callable[[int], SharedTallies], clock: Clock) -> None:
    tallies = shared(1)
    many = [CallLimits(str(number), 1, 1, tallies(str(number))) for number in range(500)]
    for limits in many:
        limits.enter()
    clock.now += 1.001
    for limits in many:
        with pytest.raises(QueueFull, match=r"open calls of client .*: at most 1"):
            limits.enter()
        limits.leave()
        limits.enter()


def test_slots_of_silent_clients_are_used_again(
    shared: Callable[[int], SharedTallies], clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "SLOTS", 8)
    tallies = shared(1)
    for number in range(100):
        limits = CallLimits(str(number), 2, 1, tallies(str(number)))
        limits.enter()
        assert taken(limits) == 0.0
        assert taken(limits) > 0
        limits.leave()
        clock.now += 2


@given(
    rate=st.floats(0.5, 1000),
    gaps=st.lists(st.floats(0, 0.5), min_size=1, max_size=200),
)
def test_no_second_has_more_than_twice_the_rate(rate: float, gaps: list[float]) -> None:
    """A burst, and what is due meanwhile; and over all of the time no more than the rate and one burst."""
    clock, tally = Clock(), LocalTally()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "monotonic_ns", clock)
        limits = CallLimits("client", rate, 0, tally)
        begun, times = clock.now, []
        for gap in gaps:
            clock.now += gap
            if taken(limits) == 0.0:
                times.append(clock.now)
        burst = max(1.0, rate)
        assert len(times) <= burst + rate * (clock.now - begun) + 1
