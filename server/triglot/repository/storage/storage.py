"""Models at URLs: keeps local snapshots of them, which the manager scans.

A URL is a root like any other once it has its local path: `fetch` updates the snapshot, and the normal search
finds the models in it. If it cannot be fetched, the snapshot stays unchanged, and its models have a problem until
a later fetch succeeds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha256
from typing import TypeVar

from triglot.core.errors import ModelLoadError
from triglot.repository.config.settings import ModelSettings
from triglot.repository.scan.scanner import Scan
from triglot.repository.scan.source import NotYet, Overrides, Root
from triglot.repository.storage.buckets import ENDPOINTS, Bucket
from triglot.repository.storage.cache import CONNECTIONS, Cache, Missing, cache_folder
from triglot.repository.storage.hub import Hub
from triglot.repository.storage.mirror import Mirror, MirrorRequest, Plan, moved, path_of
from triglot.repository.storage.store import ObjectChanged, Store, StoredObject, StoreError, StoreUnreachable
from triglot.repository.storage.urls import HINTS, Url, url_of
from triglot.repository.storage.web import WebArchive

log = logging.getLogger(__name__)

TRITONS_CREDENTIALS = "TRITON_CLOUD_CREDENTIAL_PATH"
TRIES = 3
"""How often objects that change during the download are listed again, before waiting for the next scan."""
T = TypeVar("T")


def open_store(url: Url) -> Store:
    """Returns the store of a URL. Raises `StoreError`."""
    if url.scheme in HINTS:
        raise StoreError(HINTS[url.scheme])
    if url.scheme in ENDPOINTS and ":" in url.host:
        raise StoreError(
            f"expected {url.scheme}://BUCKET/PATH, and the server's address in {ENDPOINTS[url.scheme][0]}"
        )
    if not url.host or ".." in url.key.split("/"):
        raise StoreError(f"expected {url.scheme}://HOST/PATH without ..")
    kinds: Mapping[str, Callable[[Url], Store]] = {"hf": Hub, "https": WebArchive}
    return kinds.get(url.scheme, Bucket)(url)


class Storage:
    """The mirrors of all URLs that a server serves models from; without any URL, nothing on disk is touched.

    `folder` is that of the cache, "" for the default one; `most_bytes`: see `Cache`.
    """

    def __init__(self, folder: str = "", most_bytes: int = 0) -> None:
        self._folder = folder
        self._most_bytes = most_bytes
        self._cache: Cache | None = None
        self._mirrors: dict[Url, Mirror] = {}
        self._fetch_lock = threading.Lock()

    # --- paths ---

    def local(self, roots: Sequence[Root]) -> tuple[Root, ...]:
        """Returns the roots with local paths instead of URLs. Raises `OSError` if there is no folder for these."""
        return tuple(map(self._local, roots))

    def _local(self, root: Root) -> Root:
        path = path_of(root)
        if path is None or (url := url_of(path)) is None:
            return root
        mirror = self._mirrors.get(url)
        if mirror is None:
            if self._cache is None:
                if os.environ.get(TRITONS_CREDENTIALS):
                    log.warning("%s is ignored; set the variables of each cloud's own tools", TRITONS_CREDENTIALS)
                self._cache = Cache(cache_folder(self._folder), self._most_bytes)
            name = sha256(repr(url).encode(errors="surrogateescape")).hexdigest()[:16]
            mirror = self._mirrors[url] = Mirror(url, self._cache.snapshots / name)
        mirror.unused = False
        return moved(root, mirror.local)

    def outlines(self, roots: Iterable[Root]) -> list[Root]:
        """Returns the local roots for a search of all models, downloaded or not."""
        by_local = {mirror.local: mirror.outline for mirror in list(self._mirrors.values())}
        return [
            moved(root, by_local[path]) if (path := path_of(root)) is not None and path in by_local else root
            for root in roots
        ]

    def named(self, text: str) -> str:
        """Returns a text with URLs instead of local paths."""
        for mirror in list(self._mirrors.values()):
            for path in (mirror.local, mirror.outline):
                text = text.replace(str(path), str(mirror.url))
        return text

    # --- fetching ---

    def fetch(
        self, roots: Sequence[Root], names: Collection[str] | None, overrides: Overrides, *, settle: bool
    ) -> None:
        """Updates the snapshots of these local roots: the models with these names, None: all.

        With `settle`, changes are fetched only if they are the same at the next call. Blocks. Errors become the
        problem of the mirror.
        """
        with self._fetch_lock:
            requests: dict[Mirror, MirrorRequest] = {}
            for mirror in list(self._mirrors.values()):
                its = [root for root in roots if path_of(root) == mirror.local]
                if its:
                    mirror.unused = False
                    requests[mirror] = MirrorRequest(
                        its, None if names is None else frozenset(names), overrides or None
                    )
                elif mirror.remove_unused():
                    del self._mirrors[mirror.url]
            if not requests or self._cache is None:
                return
            for tries_left in reversed(range(TRIES)):
                problems = _Update(self._cache, requests, settle=settle).run()
                for mirror in requests:
                    problem = problems.get(mirror)
                    mirror.problem = "" if problem is None else f"{mirror.url}: {_text(problem)}"
                requests = {
                    mirror: requests[mirror] for mirror, one in problems.items() if isinstance(one, ObjectChanged)
                }
                if not requests or not tries_left:
                    return

    def annotated(self, scan: Scan, roots: Iterable[Root]) -> Scan:
        """Returns the scan with fetch errors added, and with URLs in its texts."""
        if not self._mirrors:
            return scan
        problems = {
            key: type(problem)(self.named(str(problem)), problem.code) for key, problem in scan.problems.items()
        }
        for root in roots:
            for mirror in list(self._mirrors.values()):
                local = mirror.local
                if path_of(root) == local and mirror.problem:
                    error = ModelLoadError(mirror.problem) if mirror.has_snapshot else NotYet(mirror.problem)
                    problems[root.name if isinstance(root, ModelSettings) else str(local)] = error
                    for name, versions in scan.wanted.items():
                        if any(files.file.is_relative_to(local) for files in versions.values()):
                            problems.setdefault(str(local / name), error)
        warnings = {key: [self.named(text) for text in texts] for key, texts in scan.warnings.items()}
        return replace(scan, problems=problems, warnings=warnings)

    def close(self) -> None:
        """Removes the snapshots; downloaded objects stay in the cache."""
        if self._cache is not None:
            with self._fetch_lock:
                self._cache.close()
                self._cache = None


class _Update:
    """One update of several mirrors; a failure of one does not affect the others."""

    def __init__(self, cache: Cache, requests: Mapping[Mirror, MirrorRequest], *, settle: bool) -> None:
        self._cache = cache
        self._requests = requests
        self._settle = settle
        self._problems: dict[Mirror, Exception] = {}

    def run(self) -> Mapping[Mirror, Exception]:
        """Updates the mirrors and returns the errors."""
        with ThreadPoolExecutor(CONNECTIONS, thread_name_prefix="list") as pool:
            listings = dict(zip(self._requests, pool.map(self._listed, self._requests), strict=True))
        updates = {
            mirror: listing
            for mirror, listing in listings.items()
            if listing is not None and mirror.needs_update(listing[1], self._requests[mirror], settle=self._settle)
        }
        if not updates:
            return self._problems
        with self._cache.locked():
            self._download([one for mirror, listing in updates.items() for one in mirror.search_objects(*listing)])
            plans: dict[Mirror, Plan] = {}
            for mirror, (store, listed) in self._without_problems(updates):
                with self._collecting(mirror):
                    plans[mirror] = mirror.plan(self._cache, store, listed, self._requests[mirror])
            self._download([one for plan in plans.values() for one in plan.needed])
            for mirror, plan in self._without_problems(plans):
                with self._collecting(mirror):
                    mirror.publish(self._cache, plan)
                    self._cache.save_listing(_listing_name(mirror.url), plan.listed)
            self._cache.trim()
        return self._problems

    def _listed(self, mirror: Mirror) -> tuple[Store, list[StoredObject]] | None:
        kept, mirror.store = mirror.store, None
        try:
            store = kept or open_store(mirror.url)
            listed = sorted(store.objects())
        except (StoreError, OSError) as error:
            if kept is not None:
                return self._listed(mirror)  # New credentials may be in the files.
            if isinstance(error, StoreUnreachable) and not mirror.has_snapshot:
                saved = self._cache.saved_listing(_listing_name(mirror.url))
                if saved:
                    log.warning("%s: %s; starting with the models that are in the cache", mirror.url, error)
                    return UnreachableStore(error), saved
            self._problems[mirror] = error
            return None
        mirror.store = store
        return store, listed

    def _download(self, objects: Iterable[Missing]) -> None:
        missing = [one for one in objects if not self._cache.has(one.url, one.stored)]
        if not missing:
            return
        errors = self._cache.download(missing)
        self._problems |= {mirror: errors[mirror.url] for mirror in self._requests if mirror.url in errors}

    def _without_problems(self, mirrors: Mapping[Mirror, T]) -> list[tuple[Mirror, T]]:
        """Returns the mirrors without an error so far."""
        return [(mirror, value) for mirror, value in mirrors.items() if mirror not in self._problems]

    @contextmanager
    def _collecting(self, mirror: Mirror) -> Iterator[None]:
        try:
            yield
        except (StoreError, OSError) as error:
            self._problems[mirror] = error


class UnreachableStore:
    """A store that is down, whose objects may be in the cache."""

    def __init__(self, error: StoreUnreachable) -> None:
        self._error = error

    def objects(self) -> list[StoredObject]:
        """Raises the error."""
        raise self._error

    def read(self, stored: StoredObject, begin: int, end: int) -> Iterator[bytes]:
        """Raises the error."""
        raise self._error


def _listing_name(url: Url) -> str:
    """Returns the name of the URL's listing in the cache: another one for the same URL at another server."""
    server = [os.environ.get(name) for names in ENDPOINTS.values() for name in names]
    server += [os.environ.get(name) for name in ("AZURE_STORAGE_ACCOUNT_NAME", "HF_ENDPOINT")]
    return sha256(repr((url, server)).encode(errors="surrogateescape")).hexdigest()


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return str(error)
