"""Snapshots of each version's files: detects when they have settled, and when a change requires a reload.

A version is accepted when its files have settled, and again when they have changed and settled. Changes that the
model itself makes in its folder must not count, or it would be reloaded endlessly. So for a serving version these
are ignored: new files; data files of Python models that were appended to; and data files that changed during a
load, and again during the reload that this caused. For a failed version only the last kind is ignored. Data files
are all files except the model file, Python code, and the files that the configuration names. New files that come
with another change have to settle, too, but only for a limited number of scans: one may be a log.
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

PYTHON_BACKENDS = ("mlflow", "predictor", "python")
"""Backends whose models may write any files."""
MAX_WAITING_SCANS = 60
"""Limit on the scans for which new files may keep changing after everything else has settled."""


@dataclass(slots=True)
class _Accepted:
    """The state in which a version was accepted.

    Attributes:
        ends: Last bytes of its data files.
        causes: Data files whose change caused this load.
        loading: Whether no scan has happened since it was loaded.
        new: Files that were new in the last scan.
        restless: Files that kept changing when everything else had settled.
        waited: Number of scans that waited for these.
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
        """Return the paths that were changed, removed or added."""
        return {path for path, _ in contents.items() ^ self.contents.items()}

    def grown(self, contents: Contents) -> set[str]:
        """Return the data files that were only appended to."""
        grown = set()
        for path, end in self.ends.items():
            size = self.contents[path][0]
            if end is not None and contents.get(path, ABSENT)[0] > size and end_of(path, size) == end:
                grown.add(path)
        return grown


class FileSnapshots:
    """The snapshots of all versions. Files settle when unchanged for `settle_seconds` and at least two scans."""

    def __init__(self, settle_seconds: float) -> None:
        self._settle_seconds = settle_seconds
        self._seen: dict[tuple[str, int | str], tuple[object, float]] = {}
        self._accepted: dict[tuple[str, int], _Accepted] = {}
        self._written: dict[tuple[str, int], set[str]] = {}

    def settled(self, name: str, what: int | str, value: object, *, immediate: bool = False) -> bool:
        """Whether the value has been unchanged for the settle time.

        `name` is the model's; `what` identifies the version, or the part of the model, that the value belongs to.
        """
        now = time.monotonic()
        known, since = self._seen.get((name, what), (None, math.inf))
        if immediate:
            since = -math.inf
        elif known != value:
            since = now
        self._seen[name, what] = value, since
        return immediate or (known == value and now - since >= self._settle_seconds)

    def observe(self, versions: Iterable[ModelFiles]) -> None:
        """Observes versions that are not wanted yet, so that they settle."""
        for files in versions:
            self.settled(files.name, files.version, (files.file, self._contents(files)))

    def accept(
        self, files: ModelFiles, held: ModelFiles | None, *, serving: bool, loading: bool, immediate: bool
    ) -> ModelFiles | None:
        """Return the files with their stamp; the `held` ones if nothing changed, None if they have not settled.

        `held`: the files wanted so far. `loading`: whether they may be loading now; they are kept meanwhile.
        """
        key = files.name, files.version
        accepted = self._accepted.get(key)
        if not immediate and accepted is not None and accepted.files == held and held.file == files.file:
            return self._accept_changed(accepted, files, serving=serving, loading=loading)
        if immediate:
            self._written.pop(key, None)
        contents = self._contents(files)
        settled = self.settled(*key, (files.file, contents), immediate=immediate)
        return self._record(files, contents, ()) if settled else None

    def _accept_changed(
        self, accepted: _Accepted, files: ModelFiles, *, serving: bool, loading: bool
    ) -> ModelFiles | None:
        contents = self._contents(files)
        grown = accepted.grown(contents) if serving else set()
        new = {path: sign for path, sign in contents.items() if serving and path not in accepted.contents}
        others = _without(grown | new.keys(), contents)
        settled = self.settled(files.name, files.version, (files.file, others))
        settled_new = not new or self.settled(files.name, f"new in {files.version}", new)
        restless = {path for path, sign in new.items() if path in accepted.new and accepted.new[path] != sign}
        accepted.new = new
        if loading:
            return accepted.files
        changed = accepted.changed(contents) - grown
        if accepted.loading:
            accepted.loading = False
            written = changed.intersection(accepted.causes)
            contents = self._ignore(accepted, written, contents)
            changed -= written
        if files.config == accepted.files.config and changed <= new.keys():
            accepted.waited = 0
            accepted.restless.clear()
            return accepted.files
        if not settled:
            return None
        if not settled_new:
            accepted.waited += 1
            accepted.restless |= restless
            if accepted.waited < MAX_WAITING_SCANS:
                return None
            contents = self._ignore(accepted, accepted.restless, contents)
        return self._record(files, contents, changed)

    def _record(self, files: ModelFiles, contents: Contents, changed: Iterable[str]) -> ModelFiles:
        files = replace(files, stamp=stamp_of(contents))
        data = _data_files(files, contents) if files.backend in PYTHON_BACKENDS else []
        ends = {path: end_of(path, contents[path][0]) for path in data}
        self._accepted[files.name, files.version] = _Accepted(files, contents, ends, _data_files(files, changed))
        return files

    def _contents(self, files: ModelFiles) -> Contents:
        return _without(self._written.get((files.name, files.version), ()), contents_of(files))

    def _ignore(self, accepted: _Accepted, written: Collection[str], contents: Contents) -> Contents:
        """Mark files as written by the model itself; return the contents without them."""
        for path in written:
            log.warning(
                "%s: %s appears to be written by the model itself; its changes no longer trigger a reload",
                accepted.files,
                path,
            )
        self._written.setdefault((accepted.files.name, accepted.files.version), set()).update(written)
        accepted.ends = {path: end for path, end in accepted.ends.items() if path not in written}
        accepted.contents = _without(written, accepted.contents)
        return _without(written, contents)

    def keep(self, files: Iterable[ModelFiles]) -> None:
        """Drop the snapshots of all other versions."""
        keys = {(file.name, file.version) for file in files}
        names = {name for name, _ in keys}
        self._accepted = {key: accepted for key, accepted in self._accepted.items() if key in keys}
        self._written = {key: written for key, written in self._written.items() if key in keys}
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
