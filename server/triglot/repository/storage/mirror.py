"""What lies at one URL, as a local folder.

Strategy: a snapshot holds what models need of the objects that were listed: those of the versions that are
wanted, and of those that were wanted before. Which these are, a search for models in an outline says, a folder
of empty files beside the real configurations. The other versions are left out. What belongs to no model is an
empty file, so that who searches the snapshot says of it what he would say of a local folder. A whole snapshot
takes the place of the one before it by one rename.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

from triglot.model.config import ALL
from triglot.repository.config.model_config import CONFIG_FILE
from triglot.repository.config.settings import ModelSettings
from triglot.repository.config.version_names import NAMES_FILE
from triglot.repository.scan.source import Found, ModelFiles, NamedPath, Overrides, Root, find_models
from triglot.repository.storage.archives import extract, without_suffix
from triglot.repository.storage.cache import Cache, Missing
from triglot.repository.storage.store import Store, StoredObject, StoreError
from triglot.repository.storage.urls import Url

READ_TO_SEARCH = (CONFIG_FILE, NAMES_FILE)
NOW = "now"
"""The link to the snapshot that is searched."""
FILES, OUTLINE = "files", "outline"
"""What a snapshot has."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What of a mirror is to be there: for these roots, the models of these names, or all."""

    roots: Sequence[Root]
    names: frozenset[str] | None = None
    overrides: Overrides | None = None

    def covers(self, other: Wish) -> bool:
        """Whether what is there for this is enough for the other one."""
        enough = self.names is None or (other.names is not None and other.names <= self.names)
        return enough and self.roots == other.roots and not self.overrides and not other.overrides


@dataclass(frozen=True, slots=True)
class Plan:
    """A snapshot: of the objects that were `listed` those that are `kept`, and those whose bytes are `needed`.

    `chosen`: the folders of the wanted versions.
    """

    listed: Sequence[StoredObject]
    kept: Sequence[StoredObject]
    needed: Sequence[Missing]
    wish: Wish
    chosen: set[PurePosixPath] = field(default_factory=set)


class Mirror:
    """`folder` is its own; `local`: where a search for models finds what is at the URL.

    Its methods block. What they raise, `StoreError` and `OSError`, leaves the snapshot as it is.
    """

    def __init__(self, url: Url, folder: Path) -> None:
        self.url = url
        self.problem = ""
        self._folder = folder
        self._number = 0
        self._listed: Sequence[StoredObject] | None = None
        self._seen: Sequence[StoredObject] | None = None
        self._wish = Wish(())
        self._chosen: set[PurePosixPath] = set()
        self.unused = False
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
    def shown(self) -> bool:
        """Whether there is a snapshot."""
        return self._listed is not None

    def let_go(self) -> bool:
        """Remove the snapshots if the mirror was not used before either: its models may still drain then."""
        if self.unused:
            shutil.rmtree(self._folder, ignore_errors=True)
            return True
        self.unused = True
        return False

    def has_news(self, listed: Sequence[StoredObject], wish: Wish, *, settle: bool) -> bool:
        """Whether there is something to do; with `settle`, what is being changed waits for the next look."""
        before, self._seen = self._seen, listed
        if listed != self._listed:
            return not settle or listed == before
        return not self._wish.covers(wish)

    def read_first(self, store: Store, listed: Sequence[StoredObject]) -> list[Missing]:
        """What a search reads: the configurations, or the archive."""
        whole = self._archive is not None
        return [Missing(self.url, store, one) for one in listed if whole or _is_read(one)]

    def plan(self, cache: Cache, store: Store, listed: Sequence[StoredObject], wish: Wish) -> Plan:
        """What the next snapshot has; all of `read_first` is in the cache."""
        self._number += 1
        shutil.rmtree(self._folder / str(self._number), ignore_errors=True)
        (self._folder / str(self._number)).mkdir(parents=True)
        if self._archive is not None:
            return Plan(listed, listed, [], wish)
        outline = self._at(str(self._number), OUTLINE)
        self._fill(cache, outline, listed, {one for one in listed if _is_read(one)})
        if outline.is_file():
            return Plan(listed, listed, [Missing(self.url, store, one) for one in listed], wish)
        roots = [moved(root, outline) for root in wish.roots]
        found = find_models(roots, wish.overrides or {}, allow_symlinks=True)
        folders, left_out, chosen = _choice(found, wish, outline)
        kept = [one for one in listed if not _is_below(one.path, left_out - self._chosen)]
        needed = [Missing(self.url, store, one) for one in kept if _is_below(one.path, folders)]
        return Plan(listed, kept, needed, wish, chosen)

    def show(self, cache: Cache, plan: Plan) -> None:
        """Have a snapshot in place of the one before; all that the plan needs is in the cache."""
        target = self._at(str(self._number))
        if self._archive is not None and plan.listed:
            extract(cache.file(self.url, plan.listed[0]), PurePosixPath(self.url.key).name, target)
        else:
            self._fill(cache, target, plan.kept, {one for one in plan.kept if cache.has(self.url, one)})
        link = self._folder / "next"
        link.unlink(missing_ok=True)
        link.symlink_to(str(self._number))
        link.replace(self._folder / NOW)
        # Who loads a model may be reading the one before.
        shutil.rmtree(self._folder / str(self._number - 2), ignore_errors=True)
        self._listed, self._wish, self._chosen = plan.listed, plan.wish, plan.chosen

    def _fill(
        self, cache: Cache, target: Path, objects: Iterable[StoredObject], linked: Collection[StoredObject]
    ) -> None:
        made = set[Path]()
        for one in objects:
            file = _inside(target, one.path)
            if file.parent not in made:
                file.parent.mkdir(parents=True, exist_ok=True)
                made.add(file.parent)
            if one in linked:
                cache.link(self.url, one, file)
            else:
                file.touch()


def _choice(
    found: Found, wish: Wish, outline: Path
) -> tuple[set[PurePosixPath], set[PurePosixPath], set[PurePosixPath]]:
    """What models need, the folders in it that are left out, and those of wanted versions; below the outline."""
    policies = {root.name: root.policy for root in wish.roots if isinstance(root, ModelSettings)}
    needed, left_out, chosen = set[PurePosixPath](), set[PurePosixPath](), set[PurePosixPath]()

    def below(path: Path) -> PurePosixPath:
        return PurePosixPath(os.path.relpath(path, outline))

    for name, versions in found.models.items():
        of_versions = {one.version: below(one.folder or one.file) for one in versions}
        folder = found.folders.get(name)
        mine = {below(folder)} if folder is not None else set(of_versions.values())
        if wish.names is not None and name not in wish.names:
            left_out |= mine
            continue
        # Several models may have one environment, beside them.
        environments = {one.config.environment for one in versions}
        needed |= mine | {below(path) for path in environments if path is not None}
        wanted = policies.get(name, found.policies.get(name, ALL)).wanted(list(of_versions))
        for number, path in of_versions.items():
            (chosen if number in wanted else left_out).add(path)
    return needed, left_out, chosen


def path_of(root: Root) -> Path | None:
    """Where a root is, if it may be at a URL."""
    match root:
        case ModelSettings():
            return root.base_path
        case NamedPath():
            return root.path
        case ModelFiles():
            return None
    return root


def moved(root: Root, path: Path) -> Root:
    """The root at another path."""
    match root:
        case ModelSettings():
            return replace(root, base_path=path)
        case NamedPath():
            return replace(root, path=path)
    return path


def _is_read(stored: StoredObject) -> bool:
    return PurePosixPath(stored.path).name in READ_TO_SEARCH


def _is_below(path: str, folders: Collection[PurePosixPath]) -> bool:
    pure = PurePosixPath(path)
    return any(folder in folders for folder in (pure, *pure.parents))


def _inside(folder: Path, path: str) -> Path:
    """Raises `StoreError` for the name of an object that no file can have."""
    if any(part in ("", ".", "..") for part in path.split("/")) and path:
        raise StoreError(f"the object {path!r} has a name that no file can have")
    return folder / path if path else folder
