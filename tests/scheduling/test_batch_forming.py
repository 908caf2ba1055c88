"""Which requests are executed together, and when: lists in, a decision out (spec 5.1)."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.scheduling.forming import Decision, Lane, Rules, Run, Wait, Waiting, form

NOW = 100.0


def waiting(*rows: int, key: object = "a", age: float = 0.0, expires: float = inf) -> list[Waiting]:
    return [Waiting(object(), row, key, NOW - age, expires) for row in rows]


def ran(decision: Decision) -> tuple[list[int], str]:
    """The rows of what is run, and why."""
    assert isinstance(decision.then, Run)
    return [member.rows for member in decision.then.members], decision.then.reason


@pytest.mark.parametrize(
    ("rows", "rules", "members", "reason"),
    [
        # A lone request goes at once, and so does whatever else waits.
        ([1], Rules(8), [1], "no_delay"),
        ([1, 2, 1], Rules(8), [1, 2, 1], "no_delay"),
        ([4, 4], Rules(8), [4, 4], "full"),
        ([4, 3, 2], Rules(8), [4, 3], "full"),
        ([4, 4, 4], Rules(8), [4, 4], "full"),
        # The largest preferred size that can be reached, and no more.
        ([1] * 7, Rules(8, (2, 4)), [1] * 4, "preferred"),
        ([1] * 3, Rules(8, (2, 4)), [1] * 2, "preferred"),
        ([1] * 8, Rules(8, (4,)), [1] * 4, "preferred"),
        ([1] * 8, Rules(8, (4, 8)), [1] * 8, "full"),
        ([1], Rules(8, (2, 4)), [1], "no_delay"),
        ([6], Rules(8, (4,)), [6], "preferred"),
        # No preferred size can be reached exactly: what is below the largest.
        ([3, 2], Rules(8, (4,)), [3], "full"),
        # With a delay, a preferred size is still executed at once.
        ([1] * 5, Rules(8, (4,), delay=1.0), [1] * 4, "preferred"),
        ([8], Rules(8, delay=1.0), [8], "full"),
        ([5, 4], Rules(8, delay=1.0), [5], "full"),
        ([6], Rules(8, (4,), delay=1.0), [6], "preferred"),
    ],
)
def test_a_batch_that_is_run_at_once(
    rows: Sequence[int], rules: Rules, members: Sequence[int], reason: str
) -> None:
    assert ran(form([Lane(waiting=waiting(*rows))], NOW, rules)) == (members, reason)


def test_a_batch_grows_until_its_oldest_request_has_waited_for_the_delay() -> None:
    lane = Lane(waiting=[*waiting(1, age=0.25), *waiting(2)])
    rules = Rules(8, delay=1.0)
    decision = form([lane], NOW, rules)
    assert decision.then == Wait(NOW + 0.75, "a", 3, 8)
    assert ran(form([lane], NOW + 0.75, rules)) == ([1, 2], "delay")


def test_what_is_too_old_is_run_with_all_that_fits_preferred_or_not() -> None:
    lane = Lane(waiting=waiting(1, 1, 1, 1, 1, 1, 1, age=1.0))
    assert ran(form([lane], NOW, Rules(8, (4,), delay=1.0))) == ([1] * 7, "delay")
    assert ran(form([lane], NOW, Rules(6, (4,), delay=1.0))) == ([1] * 6, "full")


def test_the_next_preferred_size_is_waited_for() -> None:
    lane = Lane(waiting=waiting(1, 1, 1))
    decision = form([lane], NOW, Rules(16, (5, 8), delay=1.0))
    assert isinstance(decision.then, Wait)
    assert decision.then.target == 5


def test_requests_that_cannot_be_joined_do_not_part_those_that_can() -> None:
    first, other, second = waiting(1, 2), waiting(4, key="b"), waiting(3)
    lane = Lane(waiting=[*first, *other, *second])
    decision = form([lane], NOW, Rules(8))
    assert isinstance(decision.then, Run)
    assert list(decision.then.members) == [*first, *second]
    assert decision.mixed


def test_the_oldest_request_is_executed_first_whatever_else_is_full() -> None:
    lane = Lane(waiting=[*waiting(1, key="b", age=2), *waiting(4, 4)])
    assert ran(form([lane], NOW, Rules(8))) == ([1], "no_delay")


@pytest.mark.parametrize("key", ["b", None])
def test_a_request_that_cannot_share_it_closes_the_batch_that_waits(key: object) -> None:
    lane = Lane(waiting=[*waiting(1), *waiting(4, key=key), *waiting(2)])
    assert ran(form([lane], NOW, Rules(8, delay=1.0))) == ([1, 2], "full")
    # A preferred size that is there is kept.
    assert ran(form([lane], NOW, Rules(8, (1,), delay=1.0))) == ([1], "preferred")


def test_a_request_that_shares_no_batch_runs_alone_and_at_once() -> None:
    unbatched, other = waiting(1, key=None), waiting(1)
    rules = Rules(8, delay=1.0)
    assert ran(form([Lane(waiting=[*unbatched, *unbatched, *other])], NOW, rules)) == ([1], "alone")
    assert ran(form([Lane(waiting=[*unbatched])], NOW, Rules(8))) == ([1], "alone")


def test_higher_levels_come_first_and_lower_ones_fill_the_batch() -> None:
    high, low = waiting(2, age=0), waiting(3, 3, age=5)
    decision = form([Lane(1, waiting=high), Lane(2, waiting=low)], NOW, Rules(8))
    assert isinstance(decision.then, Run)
    assert list(decision.then.members) == [*high, *low]
    # What cannot be joined with the higher level's waits, however old it is.
    other = waiting(1, key="b", age=50)
    decision = form([Lane(1, waiting=high), Lane(2, waiting=other)], NOW, Rules(8))
    assert ran(decision) == ([2], "no_delay")


def test_expired_requests_are_refused_where_the_policy_says_so() -> None:
    dead, alive = waiting(1, expires=NOW), waiting(1, expires=NOW + 1)
    decision = form([Lane(waiting=[*dead, *alive])], NOW, Rules(8))
    assert decision.refused == dead
    assert isinstance(decision.then, Run)
    assert list(decision.then.members) == alive
    decision = form([Lane(waiting=dead)], NOW, Rules(8))
    assert (decision.refused, decision.then) == (dead, None)


def test_expired_requests_run_after_the_others_of_their_level_where_the_policy_says_so() -> None:
    late, alive, low = waiting(1, expires=NOW), waiting(2, expires=NOW + 1), waiting(3)
    lanes = [Lane(1, True, [*late, *alive]), Lane(2, waiting=low)]
    decision = form(lanes, NOW, Rules(8))
    assert isinstance(decision.then, Run)
    assert list(decision.then.members) == [*alive, *late, *low]
    assert decision.late == [(lanes[0], late[0])]
    # Once they are behind, they stay there.
    decision = form([Lane(1, True, alive, late)], NOW, Rules(8))
    assert decision.late == []
    assert ran(decision)[0] == [2, 1]


def test_an_instance_that_waits_looks_again_when_the_next_request_expires() -> None:
    lane = Lane(waiting=[*waiting(1), *waiting(1, expires=NOW + 0.5)])
    decision = form([lane], NOW, Rules(8, delay=1.0))
    assert isinstance(decision.then, Wait)
    assert decision.then.until == NOW + 0.5


def test_a_request_is_not_held_back_until_its_deadline() -> None:
    (request,) = waiting(1)
    request.latest_start = NOW + 0.25
    decision = form([Lane(waiting=[request])], NOW, Rules(8, delay=1.0))
    assert isinstance(decision.then, Wait)
    assert decision.then.until == NOW + 0.25
    assert ran(form([Lane(waiting=[request])], NOW + 0.25, Rules(8, delay=1.0))) == ([1], "deadline")


def test_nothing_is_waited_for_while_draining() -> None:
    lane = Lane(waiting=waiting(1, 1))
    assert ran(form([lane], NOW, Rules(8, (4,), delay=9.0), draining=True)) == ([1, 1], "drained")


def test_removed_requests_are_not_batched() -> None:
    lane = Lane(waiting=waiting(1, 1))
    for request in lane.waiting:
        request.is_removed = True
    assert form([lane], NOW, Rules(8)) == Decision()
    assert form([], NOW, Rules(8)) == Decision()


# --- whatever waits ---

ROWS = st.integers(1, 8)
ONE = st.builds(
    Waiting,
    st.builds(object),
    ROWS,
    st.sampled_from(["a", "b", None]),
    st.floats(NOW - 3, NOW),
    st.sampled_from([inf, NOW - 1, NOW, NOW + 0.5]),
    st.sampled_from([inf, NOW - 1, NOW + 0.25]),
    st.booleans(),
)
LANES = st.lists(st.builds(Lane, st.just(0), st.booleans(), st.lists(ONE, max_size=8)), max_size=3)
RULES = st.builds(
    Rules,
    st.just(8),
    st.lists(ROWS, unique=True, max_size=3).map(sorted).map(tuple),
    st.sampled_from([0.0, 0.5, 10.0]),
)


@given(LANES, RULES, st.booleans())
def test_whatever_waits(lanes: list[Lane], rules: Rules, draining: bool) -> None:
    """One key, not too many rows, in order, nothing that is gone or refused; and the waiting always ends."""
    decision = form(lanes, NOW, rules, draining=draining)
    alive = [request for lane in lanes for request in lane.waiting if not request.is_removed]
    refused = {id(request) for request in decision.refused}
    runnable = [
        request
        for lane in lanes
        for request in lane.waiting
        if not request.is_removed and (request.expires > NOW or lane.delays)
    ]
    assert all(
        request.expires <= NOW and request not in runnable and request in alive for request in decision.refused
    )
    match decision.then:
        case Run(members, _):
            assert len({id(member) for member in members}) == len(members)
            assert all(member in runnable and id(member) not in refused for member in members)
            assert len({member.key for member in members}) == 1
            assert members[0].key is not None or len(members) == 1
            assert len(members) == 1 or sum(member.rows for member in members) <= rules.max_rows
            for lane in lanes:  # First come, first served; those that have expired after the others.
                own = [request for request in lane.waiting if any(request is member for member in members)]
                own.sort(key=lambda request: request.expires <= NOW)
                assert own == [member for member in members if any(member is other for other in own)]
        case Wait(until, _, rows, target):
            assert until > NOW
            assert not draining
            assert rules.delay > 0
            assert not decision.mixed
            assert rows < target <= rules.max_rows
            again = form(lanes, until, rules, draining=draining)
            assert not isinstance(again.then, Wait) or again.refused or again.then.until > until
        case None:
            assert not runnable


@given(LANES, RULES)
def test_the_decision_changes_nothing(lanes: list[Lane], rules: Rules) -> None:
    before = [list(lane.waiting) for lane in lanes]
    assert form(lanes, NOW, rules) == form(lanes, NOW, rules)
    assert before == [lane.waiting for lane in lanes]
