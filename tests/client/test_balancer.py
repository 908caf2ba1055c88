"""Which server a call goes to, and when it is tried again."""

from __future__ import annotations

import pytest

from triglot.client.balancer import Balancer, Endpoint, Retries
from triglot.client.calls import Outcome, Settings
from triglot.core.errors import DeadlineExceeded, InvalidArgument, QueueFull, Unavailable

LOST = Unavailable("lost")


def balancer(count: int = 3, **retries: float) -> Balancer:
    return Balancer([Endpoint(str(number)) for number in range(count)], Retries(**retries))  # type: ignore[arg-type]


def test_the_one_with_fewest_calls_and_each_in_turn() -> None:
    made = balancer()
    taken = [made.begin(0.0) for _ in range(6)]
    assert sorted(each.address for each in taken) == ["0", "0", "1", "1", "2", "2"]
    made.end(taken[0], None, 0.0)
    assert made.begin(0.0) is taken[0]


def test_one_that_failed_is_left_alone_until_one_call_finds_it_back() -> None:
    made = balancer(first_delay=1.0)
    lost = made.begin(0.0)
    made.end(lost, LOST, 0.0)
    others = [made.begin(0.1) for _ in range(20)]
    assert lost not in others
    for other in others:
        made.end(other, None, 0.2)
    assert [lost, lost].count(made.begin(2.0)) + [made.begin(2.0) for _ in range(5)].count(lost) <= 2
    made.end(lost, None, 2.1)
    assert lost.failures == 0


@pytest.mark.parametrize("error", [LOST, DeadlineExceeded("late"), QueueFull("full", retry_after=5.0)])
def test_what_makes_another_server_preferred(error: Unavailable) -> None:
    made = balancer(2)
    lost = made.begin(0.0)
    made.end(lost, error, 0.0)
    assert made.begin(0.01) is not lost


def test_an_answer_that_says_what_was_wrong_is_no_failure() -> None:
    made = balancer(2)
    asked = made.begin(0.0)
    made.end(asked, InvalidArgument("no such input"), 0.0)
    assert (asked.failures, asked.back_at) == (0, 0.0)
    assert not made.may_retry(InvalidArgument("no such input"), 1)


def test_when_it_is_tried_again() -> None:
    made = balancer(2)
    first = made.begin(0.0)
    made.end(first, QueueFull("full", retry_after=3.0), 0.0)
    assert made.wait(0.0) == 0.0  # The other one is there.
    second = made.begin(0.0, [first])
    assert second is not first
    made.end(second, QueueFull("full", retry_after=2.0), 0.0)
    assert made.wait(0.5) == pytest.approx(1.5)
    assert made.begin(2.0, [first, second]) is second


def test_retry_hint_of_a_server_holds_while_another_is_silent_or_tried() -> None:
    made = balancer(3)
    later, sooner, silent = (made.begin(0.0) for _ in range(3))
    made.checked(silent, 0.0, answered=False)
    made.end(later, QueueFull("full", retry_after=60.0), 0.0)
    made.end(sooner, QueueFull("full", retry_after=2.0), 0.0)
    assert made.wait(0.5) == pytest.approx(1.5)
    assert made.begin(2.0, [sooner]) is sooner


def test_hedge_needs_another_server_that_takes_calls() -> None:
    made = balancer(3, burst=1)
    first, busy, silent = (made.begin(0.0) for _ in range(3))
    made.end(busy, QueueFull("full", retry_after=2.0), 0.0)
    made.checked(silent, 0.0, answered=False)
    assert not made.may_hedge(1.0, [first])
    assert made.may_hedge(2.0, [first])
    assert not made.may_hedge(2.0, [first])  # The budget is used up.


def test_attempts_and_the_budget() -> None:
    made = balancer(attempts=3, budget=0.5, burst=2)
    assert made.may_retry(LOST, 1)
    assert not made.may_retry(LOST, 3)  # No more attempts.
    assert made.may_retry(LOST, 2)
    assert not made.may_retry(LOST, 1)  # The budget is used up.
    for _ in range(2):
        made.end(made.begin(0.0), None, 0.0)
    assert made.may_retry(LOST, 1)
    assert not made.may_retry(Unavailable("never again", retry_after=-1.0), 1)


def test_a_wait_beyond_the_deadline_costs_no_budget() -> None:
    settings = Settings("a:1", retries=Retries(burst=1))
    steps = settings.attempts(settings.sending_of("/a.B/C", b"", 10.0, None))
    (asked,) = settings.balancer.endpoints
    assert next(steps) is asked
    with pytest.raises(QueueFull):
        steps.send(Outcome(asked, QueueFull("full", retry_after=60.0)))
    assert (settings.balancer.tokens, asked.in_flight) == (1.0, 0)


def test_one_that_owes_answers_is_checked_and_left_while_it_is_silent() -> None:
    made = balancer(2, check_after=5.0)
    silent, other = made.begin(0.0), made.begin(0.0)
    made.end(other, None, 4.0)
    assert made.to_check(4.9) == []
    assert made.to_check(5.0) == [silent]
    made.checked(silent, 5.1, answered=True)
    assert made.to_check(10.0) == []
    assert made.to_check(10.1) == [silent]
    made.checked(silent, 10.2, answered=False)
    made.end(silent, LOST, 10.2)
    assert {made.begin(100.0 + number) for number in range(5)} == {other}
    assert made.to_check(200.0) == [silent, other] or made.to_check(200.0) == [other, silent]
    made.checked(silent, 200.0, answered=True)
    assert made.begin(200.0) is silent


def test_the_only_server_is_not_checked() -> None:
    made = balancer(1)
    made.begin(0.0)
    assert made.to_check(100.0) == []


def test_a_sequence_has_one_server() -> None:
    made = balancer()
    assert len({made.begin_at(77, 0.0).address for _ in range(5)}) == 1


@pytest.mark.parametrize(
    ("option", "value", "error"),
    [
        ("attempts", 0, "expected attempts >= 1"),
        ("budget", float("nan"), "budget >= 0"),
        ("first_delay", -1.0, "expected first_delay >= 0"),
        ("check_after", float("inf"), "check_after and hedge_after > 0 and at most a day"),
        ("hedge_after", 0.0, "check_after and hedge_after > 0 and at most a day"),
    ],
)
def test_retries_are_checked(option: str, value: float, error: str) -> None:
    with pytest.raises(ValueError, match=error):
        Retries(**{option: value})  # type: ignore[arg-type]
