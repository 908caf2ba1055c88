"""What is to be done about one model, as tables, and by any course of events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.errors import ServingError
from triglot.repository.plan import Plan, State, Version, needs_load, plan
from triglot.repository.source import ModelFiles

START, LOADING, READY, UNLOADING, ENDED = State
FAILED = "failed"
Known = Mapping[int, State | str]


def files(number: int, stamp: int = 0, place: str = "m") -> ModelFiles:
    return ModelFiles("m", number, "python", Path(f"/{place}/{number}/model.py"), stamp)


def version(number: int, state: State | str) -> Version:
    if state == FAILED:
        return Version(files(number), ENDED, ServingError("no disk"))
    assert isinstance(state, State)
    return Version(files(number), state)


def decide(known: Known, *wanted: int) -> tuple[list[int], int | None]:
    """The versions to retire, and the one to load."""
    step = plan(
        {number: version(number, state) for number, state in known.items()},
        {number: files(number) for number in wanted},
    )
    return list(step.retire), None if step.load is None else step.load.version


@pytest.mark.parametrize(
    ("known", "wanted", "retire", "load"),
    [
        # Nothing to do.
        ({}, [], [], None),
        ({1: READY}, [1], [], None),
        ({1: LOADING}, [1], [], None),
        ({1: ENDED, 2: FAILED}, [], [], None),
        # The highest is loaded first.
        ({}, [1, 2, 3], [], 3),
        ({1: START, 2: START, 3: READY}, [1, 2, 3], [], 2),
        # The old version stays until a wanted one serves.
        ({1: READY, 2: START}, [2], [], 2),
        ({1: READY, 2: LOADING}, [2], [], None),
        ({1: READY, 2: READY}, [2], [1], None),
        ({1: READY, 2: READY, 3: READY}, [3], [1, 2], None),
        ({2: READY, 1: START}, [1], [], 1),
        # One that fails leaves the old one, and the others have their turn.
        ({1: READY, 2: FAILED}, [2], [], None),
        ({1: READY, 2: START, 3: FAILED}, [2, 3], [], 2),
        # What goes makes way at once where a wanted one serves.
        ({1: READY, 2: READY}, [2, 3], [1], 3),
        # Nothing is wanted: all goes.
        ({1: READY, 2: READY}, [], [1, 2], None),
        ({1: UNLOADING, 2: LOADING, 3: START}, [], [3], None),
        ({1: READY, 2: START}, [1], [2], None),
        # What comes back is loaded anew.
        ({1: ENDED}, [1], [], 1),
        ({1: UNLOADING, 2: READY}, [1], [], 1),
    ],
)
def test_the_next_step(known: Known, wanted: list[int], retire: list[int], load: int | None) -> None:
    assert decide(known, *wanted) == (retire, load)


@pytest.mark.parametrize(
    ("state", "found", "needed"),
    [
        (FAILED, files(1), False),
        (FAILED, files(1, stamp=5), True),
        (FAILED, files(1, place="elsewhere"), True),
        (READY, files(1, stamp=5), False),
        (READY, files(1, place="elsewhere"), True),
        (LOADING, files(1, place="elsewhere"), False),
    ],
)
def test_files_that_changed(state: State | str, found: ModelFiles, *, needed: bool) -> None:
    assert needs_load(version(1, state), found) is needed
    assert plan({1: version(1, state)}, {1: found}) == Plan([], found if needed else None)


EVENTS = st.lists(
    st.one_of(
        st.frozensets(st.integers(1, 5)),  # What is wanted changes.
        st.booleans(),  # A load ends well or not.
        st.none(),  # A version has drained.
    ),
    max_size=40,
)


class Model:
    """Does what the plan says, and checks it."""

    def __init__(self) -> None:
        self.known: dict[int, Version] = {}
        self.wanted: frozenset[int] = frozenset()
        self.loading: Version | None = None

    def numbers(self, state: State) -> set[int]:
        return {number for number, one in self.known.items() if one.state is state}

    def step(self) -> None:
        served = self.numbers(READY)
        step = plan(self.known, {number: files(number) for number in self.wanted})
        for number in step.retire:
            assert number not in self.wanted
            known = self.known[number]
            known.state = UNLOADING if known.state is READY else ENDED
        if self.wanted and served:
            assert self.numbers(READY), "somebody serves as long as anything is wanted"
        if step.load is not None and self.loading is None:
            assert step.load.version in self.wanted
            assert step.load.version not in self.numbers(READY) | self.numbers(LOADING)
            self.loading = self.known[step.load.version] = Version(step.load, LOADING)

    def finish(self, *, well: bool) -> None:
        if self.loading is not None:
            self.loading.state = READY if well else ENDED
            self.loading.error = None if well else ServingError("no disk")
            self.loading = None

    def happen(self, event: frozenset[int] | bool | None) -> None:
        if isinstance(event, bool):
            self.finish(well=event)
        elif event is None:
            for number in sorted(self.numbers(UNLOADING))[:1]:
                self.known[number].state = ENDED
        else:
            self.wanted = event


@given(EVENTS)
def test_any_course_of_events(events: list[frozenset[int] | bool | None]) -> None:
    model = Model()
    for event in events:
        model.happen(event)
        model.step()
    # With loads that end well it comes to rest, and serves what is wanted and did not fail.
    for _ in range(12):
        model.finish(well=True)
        model.step()
    failed = {number for number, one in model.known.items() if one.error is not None}
    assert model.loading is None
    assert model.wanted - failed == model.wanted & model.numbers(READY)
    if model.wanted - failed or not model.wanted:
        assert model.numbers(READY) == model.wanted - failed
