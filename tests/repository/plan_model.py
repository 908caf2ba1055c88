"""A reconciler on values: it does what the plan says at once, and checks it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from hypothesis import strategies as st

from triglot.core.errors import ServingError
from triglot.repository.manager.plan import Plan, State, Version, needs_load, plan
from triglot.repository.scan.source import ModelFiles

NAME = "m"
LAST = 4
"""The highest version that is ever wanted."""
WANTED = st.dictionaries(st.integers(1, LAST), st.integers(0, 2), max_size=LAST)
"""The wanted versions, and the stamp of the files of each."""


def files_of(number: int, stamp: int) -> ModelFiles:
    return ModelFiles(NAME, number, "python", Path(f"/{stamp}/{NAME}/{number}/model.py"), stamp)


def files_of_all(wanted: Mapping[int, int]) -> dict[int, ModelFiles]:
    return {number: files_of(number, stamp) for number, stamp in wanted.items()}


@dataclass(eq=False)
class Copy:
    """A version in memory; `number`: it is the how manieth that was loaded."""

    number: int
    files: ModelFiles


@dataclass
class PlanModel:
    """One model. Nothing happens by itself: loads and drains end when the test says so."""

    known: dict[int, Version] = field(default_factory=dict)
    wanted: dict[int, ModelFiles] = field(default_factory=dict)
    serving: dict[int, Copy] = field(default_factory=dict)
    draining: dict[Copy, Version | None] = field(default_factory=dict)
    loading: tuple[Version, ModelFiles] | None = None
    """The entry, and the files that it had before."""
    begun: list[ModelFiles] = field(default_factory=list)
    loaded: int = 0
    most_wanted: int = 0

    def is_loading(self) -> bool:
        return self.loading is not None

    def ready(self) -> set[int]:
        return {number for number, version in self.known.items() if version.state is State.READY}

    def failed(self) -> set[int]:
        return {number for number in self.wanted if self.known[number].error is not None}

    # --- what happens ---

    def want(self, wanted: Mapping[int, int]) -> None:
        before, self.wanted = self.wanted, files_of_all(wanted)
        self.most_wanted = max(self.most_wanted, len(wanted))
        for number, files in self.wanted.items():
            entry = self.known.get(number)
            if entry is None or (entry.closed_to_calls and (number not in before or needs_load(entry, files))):
                self.known[number] = Version(files)
            elif number not in before:
                entry.retry = entry.error is not None
        self.step()

    def retry(self) -> None:
        for version in self.known.values():
            version.retry = version.error is not None
        self.want({number: files.stamp for number, files in self.wanted.items()})

    def load_ends(self, *, well: bool) -> None:
        assert self.loading is not None
        (version, before), self.loading = self.loading, None
        files = version.files
        copy = None
        if well:
            copy = Copy(self.loaded, files)
            self.loaded += 1
        if self.wanted.get(files.version) != files:
            if version.state is State.READY:
                version.files = before
            elif version.state is State.LOADING:
                version.state = State.START if files.version in self.wanted else State.UNAVAILABLE
            if copy is not None:
                self.draining[copy] = None
        elif copy is None:
            self._fail(self.known[files.version])
        else:
            self._serve(self.known[files.version], copy)
        self.step()

    def drain_ends(self, copy: Copy) -> None:
        version = self.draining.pop(copy)
        if version is not None:
            version.state = State.UNAVAILABLE
        self.step()

    def _fail(self, version: Version) -> None:
        version.error = ServingError("no disk")
        if version.state is not State.READY:
            version.state = State.UNAVAILABLE

    def _serve(self, version: Version, copy: Copy) -> None:
        former = self.serving.get(copy.files.version)
        if former is not None:
            self.draining[former] = None
        self.serving[copy.files.version] = copy
        version.state, version.served, version.error, version.retry = State.READY, version.files, None, False

    def replaced(self) -> bool:
        """Whether a wanted version serves what is wanted of it."""
        return any(
            number in self.wanted and self.wanted[number] == copy.files for number, copy in self.serving.items()
        )

    # --- the next step, and what has to be true of it ---

    def step(self) -> Plan:
        served, replaced = self.ready(), self.replaced()
        step = plan(self.known, self.wanted, draining=len(self.draining))
        for number in step.retire:
            assert number not in self.wanted
            version = self.known[number]
            copy = self.serving.pop(number, None)
            version.state, version.error = State.UNAVAILABLE, None
            if copy is not None:
                version.state = State.UNLOADING
                self.draining[copy] = version
        if self.wanted and served:
            assert self.ready(), "something serves as long as anything is wanted"
        if self.wanted and not replaced:
            assert self.ready() == served, "nothing goes until what is wanted serves"
        else:
            assert self.ready() <= self.wanted.keys()
        if step.load is not None and self.loading is None and not step.wait:
            self._begin(step.load)
        assert self.ready() == self.serving.keys()
        assert self.in_memory() <= self.most_wanted + 1
        return step

    def in_memory(self) -> int:
        return len(self.serving) + len(self.draining) + (self.loading is not None)

    def _begin(self, files: ModelFiles) -> None:
        number = files.version
        assert self.wanted.get(number) == files
        version = self.known[number]
        assert version.retry or version.files != files or version.state is State.START, "there is a reason"
        if version.closed_to_calls:  # What it failed with was of other files.
            version = self.known[number] = Version(files)
        self.loading = version, version.files
        version.files, version.retry = files, False
        if version.state is not State.READY:
            version.state = State.LOADING
        self.begun.append(files)
        assert self.in_memory() <= max(len(self.serving), len(self.wanted)) + 1
