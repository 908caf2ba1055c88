"""Model archives on web servers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import PurePosixPath

from triglot.repository.scan.urls import Url
from triglot.repository.storage.archives import SUFFIXES, without_suffix
from triglot.repository.storage.http import read_part, stat_url
from triglot.repository.storage.store import StoredObject, StoreError


class WebArchive:
    """The archive at an https URL. Raise `StoreError` if its name is not that of an archive."""

    def __init__(self, url: Url) -> None:
        if "@" in url.host:
            raise StoreError("expected a URL without a user and a password")
        if without_suffix(PurePosixPath(url.key).name) is None:
            raise StoreError(f"expected an archive, {', '.join(SUFFIXES)}")
        self._url = f"{url}?{url.query}" if url.query else str(url)

    def objects(self) -> list[StoredObject]:
        """See `Store`."""
        found = stat_url(self._url)
        return [] if found is None else [found]

    def read(self, stored: StoredObject, begin: int, end: int) -> Iterator[bytes]:
        """See `Store`."""
        return read_part(self._url, stored, begin, end)
