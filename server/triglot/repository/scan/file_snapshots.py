"""What was seen of each version: since when it is as it is, and what it was taken with.

Strategy: a version is taken when it has settled, and taken again when its files have changed and settled. What the
model itself writes into its folder is no such change, or it would be loaded again without an end. So of a version
that serves these do not count: new files; data files of a model in Python that something was appended to; and data
files that changed while it loaded, and again while it loaded for that reason. Of one that failed, only the last.
Data files are all but the model's file, Python code, and what the configuration names. New files that come with a
change have to settle with it, but not for ever: it may be a log.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

from triglot.repository.scan.contents import ABSENT, Contents, Sign, contents_of, end_of, stamp_of
from triglot.repository.scan.source import ModelFiles, named_files

log = logging.getLogger(__name__)

IN_PYTHON = ("python", "predictor")
"""Backends whose models write what they like."""
PATIENCE = 60
"""For how many looks new files may go on changing when everything else has settled."""


@dataclass(slots=True)
class _Taken:
    """What a version was taken with.

    `ends`: the last bytes of its data files. `causes`: the data files whose change made it be taken. `loading`:
    nobody has looked at it since it was loaded. `new`: the files that were new at the last look. `restless`: those
    that were changing while everything else had settled, for `waited` looks.
    """

    files: ModelFiles
    contents: Contents
    ends: Mapping[str, bytes | None]
    causes: Collection[str]
    loading: bool = True
    new: Contents = field(default_factory=dict)
    restless: set[str] = field(default_factory=set)
    waited: int = 0

    def changed(self, contents: Contents) -> set[str]:
        """The paths where something was changed, removed or added."""
        return {path for path, _ in contents.items() ^ self.contents.items()}

    def grown(self, contents: Contents) -> set[str]:
        """The data files that something was appended to."""
        grown = set()
        for path, end in self.ends.items():
            size = self.contents[path][0]
            if end is not None and contents.get(path, ABSENT)[0] > size and end_of(path, size) == end:
                grown.add(path)
        return grown


class FileSnapshots:
    """`settle_seconds`: how long, and for two looks at least, things have to stay as they are."""

    def __init__(self, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._seen: dict[tuple[str, int | str], tuple[object, float]] = {}
        self._taken: dict[tuple[str, int], _Taken] = {}
        self._own: dict[tuple[str, int], set[str]] = {}

    def settled(self, name: str, what: int | str, value: object, *, at_once: bool = False) -> bool:
        """Whether the value is what it was some time ago.

        `name` is the model's; `what` says of which version or part of it the value is.
        """
        now = time.monotonic()
        known, since = self._seen.get((name, what), (None, math.inf))
        if at_once:
            since = -math.inf
        elif known != value:
            since = now
        self._seen[name, what] = value, since
        return at_once or (known == value and now - since >= self._settle_seconds)

    def note(self, versions: Iterable[ModelFiles]) -> None:
        """Have a look at versions that nobody wants yet."""
        for files in versions:
            self.settled(files.name, files.version, (files.file, self._contents(files)))

    def whole(
        self, files: ModelFiles, held: ModelFiles | None, *, serving: bool, loading: bool, at_once: bool
    ) -> ModelFiles | None:
        """The files with their stamp; those held where nothing has changed, None for what has not settled.

        `held`: those that were wanted so far. `loading`: they may be loading now, and stay as they are meanwhile.
        """
        key = files.name, files.version
        taken = self._taken.get(key)
        if not at_once and taken is not None and taken.files == held and held.file == files.file:
            return self._again(taken, files, serving=serving, loading=loading)
        if at_once:
            self._own.pop(key, None)
        contents = self._contents(files)
        settled = self.settled(*key, (files.file, contents), at_once=at_once)
        return self._take(files, contents, ()) if settled else None

    def _again(self, taken: _Taken, files: ModelFiles, *, serving: bool, loading: bool) -> ModelFiles | None:
        contents = self._contents(files)
        grown = taken.grown(contents) if serving else set()
        new = {path: sign for path, sign in contents.items() if serving and path not in taken.contents}
        others = _without(grown | new.keys(), contents)
        settled = self.settled(files.name, files.version, (files.file, others))
        settled_new = not new or self.settled(files.name, f"new in {files.version}", new)
        restless = {path for path, sign in new.items() if path in taken.new and taken.new[path] != sign}
        taken.new = new
        if loading:
            return taken.files
        changed = taken.changed(contents) - grown
        if taken.loading:
            taken.loading = False
            own = changed.intersection(taken.causes)
            contents = self._learn(taken, own, contents)
            changed -= own
        if files.config == taken.files.config and changed <= new.keys():
            taken.waited = 0
            taken.restless.clear()
            return taken.files
        if not settled:
            return None
        if not settled_new:
            taken.waited += 1
            taken.restless |= restless
            if taken.waited < PATIENCE:
                return None
            contents = self._learn(taken, taken.restless, contents)
        return self._take(files, contents, changed)

    def _take(self, files: ModelFiles, contents: Contents, changed: Iterable[str]) -> ModelFiles:
        files = replace(files, stamp=stamp_of(contents))
        data = _data_files(files, contents) if files.backend in IN_PYTHON else []
        ends = {path: end_of(path, contents[path][0]) for path in data}
        self._taken[files.name, files.version] = _Taken(files, contents, ends, _data_files(files, changed))
        return files

    def _contents(self, files: ModelFiles) -> Contents:
        return _without(self._own.get((files.name, files.version), ()), contents_of(files))

    def _learn(self, taken: _Taken, own: Collection[str], contents: Contents) -> Contents:
        """Have these files be the model's own; the contents without them."""
        for path in own:
            log.warning(
                "%s: %s appears to be written by the model itself; its changes no longer trigger a reload",
                taken.files,
                path,
            )
        self._own.setdefault((taken.files.name, taken.files.version), set()).update(own)
        taken.ends = {path: end for path, end in taken.ends.items() if path not in own}
        taken.contents = _without(own, taken.contents)
        return _without(own, contents)

    def keep(self, files: Iterable[ModelFiles]) -> None:
        """Forget all others."""
        keys = {(one.name, one.version) for one in files}
        names = {name for name, _ in keys}
        self._taken = {key: taken for key, taken in self._taken.items() if key in keys}
        self._own = {key: own for key, own in self._own.items() if key in keys}
        self._seen = {
            (name, what): seen
            for (name, what), seen in self._seen.items()
            if (name, what) in keys or (isinstance(what, str) and name in names)
        }


def _without(paths: Collection[str], contents: Contents) -> dict[str, Sign]:
    return {path: sign for path, sign in contents.items() if path not in paths}


def _data_files(files: ModelFiles, paths: Iterable[str]) -> list[str]:
    others = {str(files.file), *map(str, named_files(files.config))}
    return [path for path in paths if path not in others and not path.endswith(".py")]
