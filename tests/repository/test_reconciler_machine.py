"""The real reconciler does what the plan's model does, whatever happens, and in whatever order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import closing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.repository.plan_model import NAME, WANTED, Copy, PlanModel
from tests.repository.reconciler_gates import Gated
from tests.waiting import until


class InStep:
    """A reconciler and the model: after each event they come to the same."""

    def __init__(self) -> None:
        self.model = PlanModel()
        self.runner = asyncio.Runner()
        self.real = Gated()

    def want(self, wanted: dict[int, int]) -> None:
        self._both(lambda: self.model.want(wanted), lambda: self.real.want(wanted))

    def retry(self) -> None:
        self._both(self.model.retry, self.real.retry)

    def load_ends(self, *, well: bool) -> None:
        self._both(lambda: self.model.load_ends(well=well), lambda: self.real.outcomes.put(well))

    def drain_ends(self, copy: Copy) -> None:
        self._both(lambda: self.model.drain_ends(copy), lambda: self.real.release(copy.number))

    def _both(self, on_model: Callable[[], object], on_real: Callable[[], object]) -> None:
        async def both() -> None:
            on_model()
            on_real()
            await self.real.is_as(self.model)

        self.runner.run(both())

    def close(self) -> None:
        self.runner.run(self.real.close())
        self.runner.close()


COURSES: dict[str, list[dict[int, int] | bool | str]] = {
    "a reload that is superseded": [{1: 1}, True, {1: 2}, {1: 3}, True, "drain 1", True],
    "what serves is wanted again while its successor loads": [{1: 1}, True, {1: 2}, {1: 1}, True],
    "the same, and the successor fails": [{1: 1}, True, {1: 2}, {1: 1}, False],
    "a version that is removed while it is reloaded, and comes back in time": [
        *({1: 1}, True, {1: 2}, {}, "drain 0", {1: 2}, True),
    ],
    "a version that is removed while it is reloaded": [{1: 1}, True, {1: 2}, {}, True, "drain 0", "drain 1"],
    "a load that waits for room begins when more is wanted": [
        *({1: 0, 2: 0}, True, True, {3: 0}, True, {3: 0, 4: 0}, {3: 0, 4: 0, 5: 0}, True),
        *("drain 0", "drain 1", True),
    ],
    "a reload that fails is tried again when somebody asks": [{1: 1}, True, {1: 2}, False, {1: 2}, "retry", True],
    "a reload that failed, whose version comes back": [{1: 1}, True, {1: 2}, False, {2: 1}, False, {1: 2}, False],
    "what is not wanted stays until what is wanted serves": [
        *({1: 0, 2: 1}, True, True, {2: 2}, {2: 2}, False, {2: 3}, True),
    ],
    "the error of a reload goes with its version": [{1: 1}, True, {1: 2}, False, {}, "drain 0"],
}
"""Events: the stamps of the versions that are wanted, whether a load ends well, and drains by number."""


@pytest.mark.parametrize("course", COURSES.values(), ids=COURSES)
def test_courses(course: list[dict[int, int] | bool | str]) -> None:
    with closing(InStep()) as both:
        for event in course:
            match event:
                case dict():
                    both.want(event)
                case bool():
                    both.load_ends(well=event)
                case "retry":
                    both.retry()
                case _:
                    both.drain_ends(next(copy for copy in both.model.draining if event == f"drain {copy.number}"))


class ReconcilerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.both = InStep()

    @rule(wanted=WANTED)
    def want(self, wanted: dict[int, int]) -> None:
        self.both.want(wanted)

    @rule()
    def retry(self) -> None:
        self.both.retry()

    @precondition(lambda self: self.both.model.is_loading())
    @rule(well=st.booleans())
    def load_ends(self, *, well: bool) -> None:
        self.both.load_ends(well=well)

    @precondition(lambda self: self.both.model.draining)
    @rule(data=st.data())
    def drain_ends(self, data: st.DataObject) -> None:
        self.both.drain_ends(data.draw(st.sampled_from(list(self.both.model.draining))))

    def teardown(self) -> None:
        self.both.close()


TestReconciler = ReconcilerMachine.TestCase
TestReconciler.settings = settings(max_examples=10, stateful_step_count=25)

WANT = st.tuples(st.just("want"), WANTED)
EVENTS = st.lists(
    st.one_of(
        WANT,
        WANT,
        st.tuples(st.just("load"), st.booleans()),
        st.tuples(st.just("drain"), st.integers(0, 20)),
        st.tuples(st.just("retry"), st.none()),
        # How many turns the loop has until the next event.
        st.tuples(st.just("turns"), st.integers(1, 20)),
    ),
    max_size=40,
)


@given(EVENTS)
@settings(max_examples=25)
def test_events_that_come_in_between(events: list[tuple[str, object]]) -> None:
    """Nothing waits for what came before: events fall between any two steps of the reconciler."""
    asyncio.run(_run(events))


async def _run(events: list[tuple[str, object]]) -> None:
    real = Gated()
    wanted: dict[int, int] = {}
    for event, value in events:
        match event, value:
            case "want", dict():
                wanted = value
                real.want(wanted)
            case "load", bool():
                real.outcomes.put(value)
            case "drain", int():
                real.release(value)
            case "retry", _:
                real.retry()
            case "turns", int():
                for _ in range(value):
                    await asyncio.sleep(0)
    if not wanted:
        real.want(wanted)
    # From here on loads end well, and calls end.
    done = asyncio.create_task(real.reconciler.wait_for([NAME]))
    while not done.done():
        real.outcomes.put(True)
        for number in list(real.held):
            real.release(number)
        await asyncio.wait([done], timeout=0.001)
    for number in list(real.held):
        real.release(number)
    loaded = wanted.keys() - real.failed()
    await until(lambda: loaded <= real.ready().keys() and real.open() == len(real.ready()))
    if loaded or not wanted:
        assert real.ready().keys() <= wanted.keys()
    assert all(real.ready()[number].stamp == wanted[number] for number in loaded)
    assert not real.problems
    await real.close()
