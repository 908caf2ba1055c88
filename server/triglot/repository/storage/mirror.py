"""Mirrors the objects at one URL as a local folder.

A snapshot has the objects that models need: those of the wanted versions, and of the previously wanted ones. To
find these, models are searched in an outline, a folder of empty files and the real configurations. Other versions
are omitted. Objects that belong to no model are empty files, so that a scan of the snapshot reports the same as
for a local folder. A complete snapshot replaces its predecessor with one rename.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from triglot.model.config import ALL
from triglot.repository.config.model_config import CONFIG_FILE
from triglot.repository.config.settings import ModelSettings
from triglot.repository.config.version_names import NAMES_FILE
from triglot.repository.scan.source import Found, Overrides, Root, find_models
from triglot.repository.scan.urls import Url, moved
from triglot.repository.storage.archives import extract, without_suffix
from triglot.repository.storage.cache import Cache, Missing
from triglot.repository.storage.store import Store, StoredObject, StoreError

READ_TO_SEARCH = (CONFIG_FILE, NAMES_FILE)
NOW = "now"
"""The link to the current snapshot."""
FILES, OUTLINE = "files", "outline"
"""The parts of a snapshot."""


@dataclass(frozen=True, slots=True)
class MirrorRequest:
    """What a mirror must provide: for these roots the models with these names; None: all models."""

    roots: Sequence[Root]
    names: frozenset[str] | None = None
    overrides: Overrides | None = None

    def covers(self, other: MirrorRequest) -> bool:
        """Whether a snapshot for this wish is sufficient for the other one."""
        enough = self.names is None or (other.names is not None and other.names <= self.names)
        return enough and self.roots == other.roots and not self.overrides and not other.overrides


@dataclass(frozen=True, slots=True)
class Plan:
    """A snapshot to make: of the `listed` objects those that are `kept`, and those whose contents are `needed`.

    `chosen`: the folders of the wanted versions.
    """

    listed: Sequence[StoredObject]
    kept: Sequence[StoredObject]
    needed: Sequence[Missing]
    request: MirrorRequest
    chosen: set[PurePosixPath] = field(default_factory=set)


class Mirror:
    """The mirror of one URL. `folder` is its own; `local` is the path at which a scan finds the models.

    Its methods block. Errors, `StoreError` and `OSError`, leave the snapshot unchanged.
    """

    def __init__(self, url: Url, folder: Path) -> None:
        self.url = url
        self.problem = ""
        self._folder = folder
        self._number = 0
        self._listed: Sequence[StoredObject] | None = None
        self._seen: Sequence[StoredObject] | None = None
        self._request = MirrorRequest(())
        self._chosen: set[PurePosixPath] = set()
        self.unused = False
        self.store: Store | None = None
        """Kept from listing to listing, with its connections and credentials; None after an error."""
        self._archive = without_suffix(PurePosixPath(url.key).name) if url.key else None
        key = re.sub("@[^/]*", "", url.key) if url.scheme == "hf" else url.key
        self._path = PurePosixPath(url.host, *PurePosixPath(key).parts)
        if self._archive is not None:
            self._path = self._path.with_name(self._archive)
        self.local = self._at(NOW)
        self.outline = self._at(NOW, FILES if self._archive is not None else OUTLINE)

    def _at(self, snapshot: str, part: str = FILES) -> Path:
        return self._folder / snapshot / part / self._path

    @property
    def has_snapshot(self) -> bool:
        """Whether there is a snapshot."""
        return self._listed is not None

    def remove_unused(self) -> bool:
        """Remove the snapshots if the mirror was unused before, too; in between its models may still drain."""
        if self.unused:
            shutil.rmtree(self._folder, ignore_errors=True)
            return True
        self.unused = True
        return False

    def needs_update(self, listed: Sequence[StoredObject], request: MirrorRequest, *, settle: bool) -> bool:
        """Whether a new snapshot is needed; with `settle`, changing objects are left for the next scan."""
        before, self._seen = self._seen, listed
        if listed != self._listed:
            return not settle or listed == before
        return not self._request.covers(request)

    def search_objects(self, store: Store, listed: Sequence[StoredObject]) -> list[Missing]:
        """Return the objects needed for the search: the configurations, or the archive."""
        takes_all = self._archive is not None
        return [
            Missing(self.url, store, stored_object)
            for stored_object in listed
            if takes_all or _is_read(stored_object)
        ]

    def plan(self, cache: Cache, store: Store, listed: Sequence[StoredObject], request: MirrorRequest) -> Plan:
        """Plans the next snapshot; the objects from `search_objects` must be in the cache."""
        self._number += 1
        shutil.rmtree(self._folder / str(self._number), ignore_errors=True)
        (self._folder / str(self._number)).mkdir(parents=True)
        if self._archive is not None:
            return Plan(listed, listed, [], request)
        outline = self._at(str(self._number), OUTLINE)
        self._fill(cache, outline, listed, {stored_object for stored_object in listed if _is_read(stored_object)})
        if outline.is_file():
            return Plan(
                listed, listed, [Missing(self.url, store, stored_object) for stored_object in listed], request
            )
        roots = [moved(root, outline) for root in request.roots]
        found = find_models(roots, request.overrides or {}, allow_symlinks=True)
        folders, omitted, chosen = _select(found, request, outline)
        kept = [
            stored_object for stored_object in listed if not _is_below(stored_object.path, omitted - self._chosen)
        ]
        needed = [
            Missing(self.url, store, stored_object)
            for stored_object in kept
            if _is_below(stored_object.path, folders)
        ]
        return Plan(listed, kept, needed, request, chosen)

    def publish(self, cache: Cache, plan: Plan) -> None:
        """Replace the snapshot; all needed objects must be in the cache."""
        target = self._at(str(self._number))
        if self._archive is not None and plan.listed:
            extract(cache.file(self.url, plan.listed[0]), PurePosixPath(self.url.key).name, target)
        else:
            self._fill(
                cache,
                target,
                plan.kept,
                {stored_object for stored_object in plan.kept if cache.has(self.url, stored_object)},
            )
        link = self._folder / "next"
        link.unlink(missing_ok=True)
        link.symlink_to(str(self._number))
        link.replace(self._folder / NOW)
        # A load may still be reading the previous one.
        shutil.rmtree(self._folder / str(self._number - 2), ignore_errors=True)
        self._listed, self._request, self._chosen = plan.listed, plan.request, plan.chosen

    def _fill(
        self, cache: Cache, target: Path, objects: Iterable[StoredObject], linked: Collection[StoredObject]
    ) -> None:
        made = set[Path]()
        for stored_object in objects:
            file = _inside(target, stored_object.path)
            if file.parent not in made:
                file.parent.mkdir(parents=True, exist_ok=True)
                made.add(file.parent)
            if stored_object in linked:
                cache.link(self.url, stored_object, file)
            else:
                file.touch()


def _select(
    found: Found, request: MirrorRequest, outline: Path
) -> tuple[set[PurePosixPath], set[PurePosixPath], set[PurePosixPath]]:
    """Return the folders that models need, those in them to omit, and those of wanted versions, all relative."""
    policies = {root.name: root.policy for root in request.roots if isinstance(root, ModelSettings)}
    needed, omitted, chosen = set[PurePosixPath](), set[PurePosixPath](), set[PurePosixPath]()

    def below(path: Path) -> PurePosixPath:
        return PurePosixPath(os.path.relpath(path, outline))

    for name, versions in found.models.items():
        of_versions = {version.version: below(version.folder or version.file) for version in versions}
        folder = found.folders.get(name)
        own = {below(folder)} if folder is not None else set(of_versions.values())
        if request.names is not None and name not in request.names:
            omitted |= own
            continue
        # Several models may share an environment outside of their folders.
        environments = {version.config.environment for version in versions}
        needed |= own | {below(path) for path in environments if path is not None}
        wanted = policies.get(name, found.policies.get(name, ALL)).wanted(list(of_versions))
        for number, path in of_versions.items():
            (chosen if number in wanted else omitted).add(path)
    return needed, omitted, chosen


def _is_read(stored: StoredObject) -> bool:
    return PurePosixPath(stored.path).name in READ_TO_SEARCH


def _is_below(path: str, folders: Collection[PurePosixPath]) -> bool:
    pure = PurePosixPath(path)
    return any(folder in folders for folder in (pure, *pure.parents))


def _inside(folder: Path, path: str) -> Path:
    """Raise `StoreError` for an object name that is invalid for a file."""
    if any(part in ("", ".", "..") for part in path.split("/")) and path:
        raise StoreError(f"the object {path!r} has a name that no file can have")
    return folder / path if path else folder
