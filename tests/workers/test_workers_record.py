"""The record of changes: as much as brings a worker that comes later to where the others are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from triglot.dataplane.control import (
    LOAD_MODEL,
    LOG_SETTINGS,
    ONLINE,
    REGISTER,
    RELOAD,
    TRACE_SETTINGS,
    UNLOAD_MODEL,
    UNREGISTER,
)
from triglot.workers.record import MAX_UNREGISTERED, Change, Record

Made = tuple[str, dict[str, Any]]
MODELS = st.sampled_from(["a", "b"])
RATES = st.one_of(st.none(), st.integers(1, 9).map(lambda rate: [str(rate)]))
CHANGES: st.SearchStrategy[Made] = st.one_of(
    st.tuples(st.just(LOAD_MODEL), st.builds(lambda name: {"name": name, "config": None}, MODELS)),
    st.tuples(st.just(UNLOAD_MODEL), st.builds(lambda name: {"name": name, "dependents": False}, MODELS)),
    st.tuples(st.just(LOG_SETTINGS), st.dictionaries(st.sampled_from(["x", "y"]), st.none() | st.integers(0, 9))),
    st.tuples(
        st.just(TRACE_SETTINGS),
        st.builds(
            lambda model, settings: {"model": model, "settings": settings},
            st.sampled_from(["", "a"]),
            st.dictionaries(st.sampled_from(["rate", "count"]), RATES),
        ),
    ),
    st.tuples(st.just(REGISTER), st.builds(lambda name: {"name": name, "key": f"/{name}"}, MODELS)),
    st.tuples(st.just(UNREGISTER), st.builds(lambda name: {"name": name}, st.sampled_from(["", "a", "b"]))),
    st.tuples(st.just(ONLINE), st.builds(lambda online: {"online": online}, st.booleans())),
)


class State:
    """What a server of one process would have after changes; that of a load is that there is one."""

    def __init__(self) -> None:
        self.models: dict[str, bool] = {}
        self.logs: dict[str, int] = {}
        self.traces: dict[tuple[str, str], Any] = {}
        self.regions: set[str] = set()
        self.online = False

    def make(self, name: str, arguments: Mapping[str, Any]) -> None:
        if name in (LOAD_MODEL, UNLOAD_MODEL):
            self.models[arguments["name"]] = name == LOAD_MODEL
        elif name == LOG_SETTINGS:
            self.logs |= {key: value for key, value in arguments.items() if value is not None}
        elif name == TRACE_SETTINGS:
            self.traces |= {(arguments["model"], key): value for key, value in arguments["settings"].items()}
        elif name == REGISTER:
            self.regions.add(arguments["name"])
        elif name == UNREGISTER:
            self.regions -= {arguments["name"]} if arguments["name"] else set(self.regions)
        else:
            self.online = arguments["online"]


@given(st.lists(CHANGES), st.integers(0, 20))
def test_what_is_kept_leads_to_the_same_state(changes: list[Made], seen: int) -> None:
    """Also for workers that got the first changes at once, and the rest later."""
    record, all_of_them, reported_late, reported_twice = Record(), State(), State(), State()
    revision = 0
    for count, (name, arguments) in enumerate(changes):
        if count == seen:
            for change in record.after(0):
                reported_twice.make(change.name, change.arguments)
            revision = record.revision
        record.note(name, arguments)
        all_of_them.make(name, arguments)
    for change in record.after(0):
        reported_late.make(change.name, change.arguments)
    for change in record.after(revision):
        reported_twice.make(change.name, change.arguments)
    assert vars(reported_late) == vars(all_of_them)
    assert vars(reported_twice) == vars(all_of_them)


@given(st.lists(CHANGES, max_size=200))
def test_record_is_bounded_by_what_can_change(changes: list[Made]) -> None:
    record = Record()
    for name, arguments in changes:
        record.note(name, arguments)
    assert len(record.after(0)) <= 2 + 1 + 2 + 3 + 1
    revisions = [change.revision for change in record.after(0)]
    assert revisions == sorted(set(revisions))


def test_regions_come_and_go_without_end() -> None:
    record = Record()
    for number in range(2000):
        record.note(REGISTER, {"name": str(number), "key": "/x"})
        if number % 2:
            record.note(UNREGISTER, {"name": str(number)})
    kept = record.after(0)
    assert [change.arguments["name"] for change in kept if change.name == REGISTER] == list(
        map(str, range(0, 2000, 2))
    )
    assert len(kept) == 1000 + MAX_UNREGISTERED
    record.note(UNREGISTER, {"name": ""})
    assert [change.name for change in record.after(0)] == [UNREGISTER]


def test_change_says_whether_it_succeeded_and_travels_as_json() -> None:
    record = Record()
    record.note(RELOAD, {"models": []}, succeeded=False)
    (change,) = record.after(0)
    assert Change(*change.fields()) == change
    assert not change.succeeded
    assert record.after(change.revision) == []
