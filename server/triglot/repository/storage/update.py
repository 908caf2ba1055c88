"""Updates mirrors from the stores of their URLs."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from hashlib import sha256
from typing import TypeVar

from triglot import parts
from triglot.repository.scan.urls import ENDPOINTS, HINTS, Url
from triglot.repository.storage.cache import CONNECTIONS, Cache, Missing
from triglot.repository.storage.mirror import Mirror, MirrorRequest, Plan
from triglot.repository.storage.store import ObjectChanged, Store, StoredObject, StoreError, StoreUnreachable

log = logging.getLogger(__name__)

TRIES = 3
"""How often objects that change during the download are listed again, before waiting for the next scan."""
T = TypeVar("T")


def open_store(url: Url) -> Store:
    """Return the store of a URL. Raise `StoreError`."""
    if url.scheme in HINTS:
        raise StoreError(HINTS[url.scheme])
    if url.scheme in ENDPOINTS and ":" in url.host:
        raise StoreError(
            f"expected {url.scheme}://BUCKET/PATH, and the server's address in {ENDPOINTS[url.scheme][0]}"
        )
    if not url.host or ".." in url.key.split("/"):
        raise StoreError(f"expected {url.scheme}://HOST/PATH without ..")
    try:
        make: Callable[[Url], Store] = parts.load("store", url.scheme)
    except parts.MissingPart as error:
        raise StoreError(str(error)) from None
    return make(url)


def update(cache: Cache, requests: Mapping[Mirror, MirrorRequest], *, settle: bool) -> None:
    """Update mirrors, as `Storage.fetch`; errors become their problems. Blocks."""
    for tries_left in reversed(range(TRIES)):
        problems = _Update(cache, requests, settle=settle).run()
        for mirror in requests:
            problem = problems.get(mirror)
            mirror.problem = "" if problem is None else f"{mirror.url}: {_text(problem)}"
        requests = {
            mirror: requests[mirror] for mirror, problem in problems.items() if isinstance(problem, ObjectChanged)
        }
        if not requests or not tries_left:
            return


class _Update:
    """One update of several mirrors; a failure of one does not affect the others."""

    def __init__(self, cache: Cache, requests: Mapping[Mirror, MirrorRequest], *, settle: bool) -> None:
        self._cache = cache
        self._requests = requests
        self._settle = settle
        self._problems: dict[Mirror, Exception] = {}

    def run(self) -> Mapping[Mirror, Exception]:
        """Update the mirrors and return the errors."""
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
            self._download(
                [
                    missing_object
                    for mirror, listing in updates.items()
                    for missing_object in mirror.search_objects(*listing)
                ]
            )
            plans: dict[Mirror, Plan] = {}
            for mirror, (store, listed) in self._without_problems(updates):
                with self._collecting(mirror):
                    plans[mirror] = mirror.plan(self._cache, store, listed, self._requests[mirror])
            self._download([missing_object for plan in plans.values() for missing_object in plan.needed])
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
        missing = [
            missing_object
            for missing_object in objects
            if not self._cache.has(missing_object.url, missing_object.stored)
        ]
        if not missing:
            return
        errors = self._cache.download(missing)
        self._problems |= {mirror: errors[mirror.url] for mirror in self._requests if mirror.url in errors}

    def _without_problems(self, mirrors: Mapping[Mirror, T]) -> list[tuple[Mirror, T]]:
        """Return the mirrors without an error so far."""
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
        """Raise the error."""
        raise self._error

    def read(self, stored: StoredObject, begin: int, end: int) -> Iterator[bytes]:
        """Raise the error."""
        raise self._error


def _listing_name(url: Url) -> str:
    """Return the name of the URL's listing in the cache: another one for the same URL at another server."""
    server = [os.environ.get(name) for names in ENDPOINTS.values() for name in names]
    server += [os.environ.get(name) for name in ("AZURE_STORAGE_ACCOUNT_NAME", "HF_ENDPOINT")]
    return sha256(repr((url, server)).encode(errors="surrogateescape")).hexdigest()


def _text(error: Exception) -> str:
    if isinstance(error, OSError):
        return f"{error.filename}: {error.strerror}" if error.filename else str(error)
    return str(error)
