"""The plan by any course of events: no gap, no more than one version too many, and it comes to rest.

Whatever order loads, drains, failures and changes of mind come in: `PlanModel` checks each step.
"""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.repository.plan_model import LAST, WANTED, PlanModel
from triglot.repository.manager.plan import State


class PlanMachine(RuleBasedStateMachine):
    """Executes plans on values."""

    def __init__(self) -> None:
        super().__init__()
        self.model = PlanModel()

    @rule(wanted=WANTED)
    def want(self, wanted: dict[int, int]) -> None:
        stays = self.model.ready() & wanted.keys()
        self.model.want(wanted)
        assert stays <= self.model.ready()

    @rule()
    def retry(self) -> None:
        self.model.retry()

    @precondition(lambda self: self.model.is_loading())
    @rule(well=st.booleans())
    def load_ends(self, *, well: bool) -> None:
        stays = self.model.ready() & self.model.wanted.keys()
        self.model.load_ends(well=well)
        assert stays <= self.model.ready()

    @precondition(lambda self: self.model.draining)
    @rule(data=st.data())
    def drain_ends(self, data: st.DataObject) -> None:
        self.model.drain_ends(data.draw(st.sampled_from(list(self.model.draining))))

    @rule(data=st.data())
    def nothing_changes_any_more(self, data: st.DataObject) -> None:
        """It comes to rest by what loads and drains alone, in as many steps as there are."""
        model = self.model
        served = model.ready()
        came: set[int] = set()
        # The load that is under way, one for each version that is wanted, and the drains of as many and of all
        # that there were.
        steps = 1 + len(model.wanted) + len(model.draining) + len(served) + len(model.wanted) + 1
        for _ in range(steps):
            if not (model.is_loading() or model.draining):
                break
            # Either may come first.
            if model.is_loading() and (not model.draining or data.draw(st.booleans())):
                before = model.ready()
                model.load_ends(well=data.draw(st.booleans()))
                came |= model.ready() - before
            else:
                model.drain_ends(next(iter(model.draining)))
        assert not model.is_loading()
        assert not model.draining
        assert model.step().load is None
        loaded = model.wanted.keys() - model.failed()
        # A wanted version that could not be loaded again serves its former files.
        assert loaded <= model.ready()
        if loaded or not model.wanted:
            assert model.ready() <= model.wanted.keys()
        elif came:
            # The load that was under way gave what is wanted again by now; what came after it failed.
            assert came <= model.ready() <= served | came
        else:
            assert model.ready() == served, "what cannot be replaced goes on"
        for number in loaded:
            assert model.serving[number].files == model.wanted[number]
        assert {version.state for version in model.known.values()} <= {State.READY, State.UNAVAILABLE}


TestPlan = PlanMachine.TestCase
TestPlan.settings = settings(stateful_step_count=40)


def test_the_bound_is_reached() -> None:
    """Each version is replaced by another while nothing drains by itself: one more than were wanted, no less."""
    model = PlanModel()
    model.want(dict.fromkeys(range(1, LAST), 0))
    while model.is_loading():
        model.load_ends(well=True)
    assert model.in_memory() == LAST - 1
    model.want(dict.fromkeys(range(2, LAST + 1), 1))
    assert model.in_memory() == LAST
    while model.is_loading():
        model.load_ends(well=True)
        assert model.in_memory() <= LAST
    assert model.draining
    assert model.step().wait
