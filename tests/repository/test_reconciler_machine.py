"""The real reconciler does what the plan's model does, whatever happens, and in whatever order."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule
from plan_model import NAME, WANTED, PlanModel
from reconciler_gates import Gated

from waiting import until


class ReconcilerMachine(RuleBasedStateMachine):
    """A reconciler and the model in step: after each event they come to the same."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PlanModel()
        self.runner = asyncio.Runner()
        self.real = Gated()

    async def _come_to_the_same(self) -> None:
        await self.real.is_as(self.model)

    @rule(wanted=WANTED)
    def want(self, wanted: dict[int, int]) -> None:
        async def both() -> None:
            self.model.want(wanted)
            self.real.want(wanted)
            await self._come_to_the_same()

        self.runner.run(both())

    @rule()
    def retry(self) -> None:
        async def both() -> None:
            self.model.retry()
            self.real.retry()
            await self._come_to_the_same()

        self.runner.run(both())

    @precondition(lambda self: self.model.is_loading())
    @rule(well=st.booleans())
    def load_ends(self, *, well: bool) -> None:
        async def both() -> None:
            self.model.load_ends(well=well)
            self.real.outcomes.put(well)
            await self._come_to_the_same()

        self.runner.run(both())

    @precondition(lambda self: self.model.draining)
    @rule(data=st.data())
    def drain_ends(self, data: st.DataObject) -> None:
        copy = data.draw(st.sampled_from(list(self.model.draining)))

        async def both() -> None:
            self.model.drain_ends(copy)
            self.real.release(copy.number)
            await self._come_to_the_same()

        self.runner.run(both())

    def teardown(self) -> None:
        self.runner.run(self.real.close())
        self.runner.close()


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
