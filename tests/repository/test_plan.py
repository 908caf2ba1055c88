"""What is to be done about one model, as tables; test_plan_machine.py has any course of events."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from triglot.core.errors import ServingError
from triglot.repository.manager.plan import Plan, State, Version, needs_load, plan
from triglot.repository.scan.source import ModelFiles

START, LOADING, READY, UNLOADING, ENDED = State
FAILED = "failed"
AGAIN, STALE = "is loaded again", "could not be loaded again"
"""It serves its former files."""
Known = Mapping[int, State | str]


def files(number: int, stamp: int = 0, place: str = "m") -> ModelFiles:
    return ModelFiles("m", number, "python", Path(f"/{place}/{number}/model.py"), stamp)


def version(number: int, state: State | str) -> Version:
    if state == FAILED:
        return Version(files(number), ENDED, ServingError("no disk"))
    if state in (AGAIN, STALE):
        error = ServingError("no disk") if state == STALE else None
        return Version(files(number), READY, error, served=files(number, stamp=-1))
    assert isinstance(state, State)
    return Version(files(number), state, served=files(number) if state is READY else None)


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
        ({1: READY, 2: READY, 3: AGAIN}, [2, 3], [1], None),
        # One that serves its former files is not what is wanted.
        ({1: READY, 2: AGAIN}, [2], [], None),
        ({1: READY, 2: STALE}, [2], [], None),
        ({1: READY, 2: STALE, 3: START}, [2, 3], [], 3),
        ({1: READY, 2: STALE}, [], [1, 2], None),
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
        (READY, files(1), False),
        (READY, files(1, stamp=5), True),
        (READY, files(1, place="elsewhere"), True),
        (LOADING, files(1, place="elsewhere"), False),
    ],
)
def test_files_that_changed(state: State | str, found: ModelFiles, *, needed: bool) -> None:
    assert needs_load(version(1, state), found) is needed
    assert plan({1: version(1, state)}, {1: found}) == Plan([], found if needed else None)


def test_unwanted_version_stays_until_the_wanted_files_serve() -> None:
    """Another policy and other files that came together."""
    known = {number: version(number, READY) for number in (1, 2)}
    assert plan(known, {2: files(2, stamp=5)}) == Plan([], files(2, stamp=5))


@pytest.mark.parametrize("state", [FAILED, READY])
def test_what_is_tried_again(state: State | str) -> None:
    again = version(1, state)
    again.retry = True
    assert plan({1: again}, {1: files(1)}) == Plan([], files(1))


@pytest.mark.parametrize(
    ("known", "wanted", "draining", "wait"),
    [
        # Beside what serves, one more.
        ({1: READY}, [2], 0, False),
        ({1: READY}, [2], 1, True),
        ({1: READY, 2: READY}, [3], 1, True),
        ({1: READY}, [1, 2], 0, False),
        ({1: READY}, [1, 2], 1, False),
        ({1: READY}, [1, 2], 2, True),
        # What is retired just now is in memory, too.
        ({1: READY, 2: READY, 3: READY}, [3, 4], 0, True),
        ({1: READY, 2: READY, 3: READY}, [3, 4, 5], 0, False),
        # Where nothing serves, one more than are wanted.
        ({1: FAILED}, [2], 0, False),
        ({1: UNLOADING}, [2], 1, False),
        ({1: UNLOADING, 2: UNLOADING}, [3], 2, True),
        # Without a load nothing waits.
        ({1: READY, 2: UNLOADING}, [1], 1, False),
    ],
)
def test_load_waits_for_room(known: Known, wanted: list[int], draining: int, *, wait: bool) -> None:
    versions = {number: version(number, state) for number, state in known.items()}
    assert plan(versions, {number: files(number) for number in wanted}, draining=draining).wait is wait


@pytest.mark.parametrize(
    ("state", "error", "reason"),
    [
        (READY, None, ""),
        (READY, "no disk", "no disk"),
        (ENDED, "no disk", "no disk"),
        (ENDED, None, "unloaded"),
        (UNLOADING, None, ""),
    ],
)
def test_the_reason_of_a_state(state: State, error: str | None, reason: str) -> None:
    assert Version(files(1), state, None if error is None else ServingError(error)).reason == reason
