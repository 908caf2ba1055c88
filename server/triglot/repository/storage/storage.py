"""Models at URLs: keeps local snapshots of them, which the manager scans.

A URL is a root like any other once it has its local path: `fetch` updates the snapshot, and the normal search
finds the models in it. If it cannot be fetched, the snapshot stays unchanged, and its models have a problem until
a later fetch succeeds.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING

from triglot.core.errors import ModelLoadError
from triglot.repository.config.settings import ModelSettings
from triglot.repository.scan.scanner import Scan
from triglot.repository.scan.source import NotYet, Overrides, Root
from triglot.repository.scan.urls import Url, moved, path_of, url_of

if TYPE_CHECKING:
    from triglot.repository.storage.cache import Cache
    from triglot.repository.storage.mirror import Mirror, MirrorRequest

log = logging.getLogger(__name__)

TRITONS_CREDENTIALS = "TRITON_CLOUD_CREDENTIAL_PATH"


class Storage:
    """The mirrors of all URLs that a server serves models from.

    Without any URL, nothing on disk is touched, and what fetches is not imported.

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
        """Return the roots with local paths instead of URLs. Raise `OSError` if a folder for these is missing."""
        return tuple(map(self._local, roots))

    def _local(self, root: Root) -> Root:
        path = path_of(root)
        if path is None or (url := url_of(path)) is None:
            return root
        mirror = self._mirrors.get(url)
        if mirror is None:
            from triglot.repository.storage.cache import Cache, cache_folder  # noqa: PLC0415
            from triglot.repository.storage.mirror import Mirror  # noqa: PLC0415

            if self._cache is None:
                if os.environ.get(TRITONS_CREDENTIALS):
                    log.warning("%s is ignored; set the variables of each cloud's own tools", TRITONS_CREDENTIALS)
                self._cache = Cache(cache_folder(self._folder), self._most_bytes)
            name = sha256(repr(url).encode(errors="surrogateescape")).hexdigest()[:16]
            mirror = self._mirrors[url] = Mirror(url, self._cache.snapshots / name)
        mirror.unused = False
        return moved(root, mirror.local)

    def outlines(self, roots: Iterable[Root]) -> list[Root]:
        """Return the local roots for a search of all models, downloaded or not."""
        by_local = {mirror.local: mirror.outline for mirror in list(self._mirrors.values())}
        return [
            moved(root, by_local[path]) if (path := path_of(root)) is not None and path in by_local else root
            for root in roots
        ]

    def named(self, text: str) -> str:
        """Return a text with URLs instead of local paths."""
        for mirror in list(self._mirrors.values()):
            for path in (mirror.local, mirror.outline):
                text = text.replace(str(path), str(mirror.url))
        return text

    # --- fetching ---

    def fetch(
        self, roots: Sequence[Root], names: Collection[str] | None, overrides: Overrides, *, settle: bool
    ) -> None:
        """Update the snapshots of these local roots: the models with these names, None: all.

        With `settle`, changes are fetched only if they are the same at the next call. Blocks. Errors become the
        problem of the mirror.
        """
        with self._fetch_lock:
            if self._cache is None:
                return
            from triglot.repository.storage.mirror import MirrorRequest  # noqa: PLC0415
            from triglot.repository.storage.update import update  # noqa: PLC0415

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
            if requests:
                update(self._cache, requests, settle=settle)

    def annotated(self, scan: Scan, roots: Iterable[Root]) -> Scan:
        """Return the scan with fetch errors added, and with URLs in its texts."""
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
        """Remove the snapshots; downloaded objects stay in the cache."""
        if self._cache is not None:
            with self._fetch_lock:
                self._cache.close()
                self._cache = None
