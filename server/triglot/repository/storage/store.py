"""What a store of objects can do, and what can go wrong with one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

TOO_MANY = 100_000
"""Objects at one URL: more are no models, but a whole bucket."""


class StoreError(Exception):
    """A store does not give what was asked of it; the text has no credentials, and is the same at each try."""


class ObjectChanged(StoreError):
    """An object is not what it was when it was listed."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: changed while it was downloaded")


@dataclass(frozen=True, slots=True, order=True)
class StoredObject:
    """One object of a store.

    `path`: below the URL that was listed, "" for the very object that the URL names. `size`: in bytes. `tag`:
    changes with what it holds. `modified`: seconds since 1970, 0 where the store does not say. `in_parts`:
    whether parts of it can be read.
    """

    path: str
    size: int
    tag: str
    modified: int = 0
    in_parts: bool = True


class Store(Protocol):
    """The objects at one URL. Its methods block, and run on several threads at once."""

    def objects(self) -> list[StoredObject]:
        """All of them, or the one that the URL names. Raises `StoreError`."""

    def read(self, stored: StoredObject, begin: int, end: int) -> Iterator[bytes]:
        """These bytes of an object, as they come. Raises `StoreError`; `ObjectChanged` if it is another by now."""


def without_secrets(text: str) -> str:
    """Without the queries of URLs, where signatures are."""
    return re.sub(r"\?[^\s\"'),]+", "?…", text)


def without_folders(found: Iterable[StoredObject]) -> list[StoredObject]:
    """Without the empty objects that stand for folders. Raises `StoreError` for one that is a file as well."""
    found = list(found)
    folders = {str(parent) for one in found for parent in PurePosixPath(one.path).parents}
    files = [one for one in found if one.size or one.path not in folders]
    if twice := next((one.path for one in files if one.path in folders), ""):
        raise StoreError(f"{twice} is an object, and a folder of others; remove or rename one of them")
    return files


def check_count(count: int) -> None:
    """Raises `StoreError` for too many objects."""
    if count > TOO_MANY:
        raise StoreError(f"more than {TOO_MANY} objects; expected the URL of a model, or of a folder of models")
