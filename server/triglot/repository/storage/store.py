"""The interface of object stores, and their errors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Protocol

MAX_OBJECTS = 100_000
"""Limit on the objects at one URL: more are not models, but a whole bucket."""

PIECE = 1 << 20
"""Size of the pieces in which a store reads an object; each of several connections holds one in memory."""


class StoreError(Exception):
    """Raised when a store fails; the text contains no credentials, and is the same for each retry."""


class StoreUnreachable(StoreError):
    """Raised when a store cannot be reached, or is out of order."""


class ObjectChanged(StoreError):
    """Raised when an object changed after it was listed."""

    def __init__(self, path: str) -> None:
        super().__init__(f"{path}: changed while it was downloaded")


@dataclass(frozen=True, slots=True, order=True)
class StoredObject:
    """One object of a store.

    Attributes:
        path: Path below the listed URL; "" for the object that the URL names.
        size: Size in bytes.
        tag: Changes with the contents.
        modified: Seconds since the epoch, 0 if unknown.
        in_parts: Whether ranges can be read.
    """

    path: str
    size: int
    tag: str
    modified: int = 0
    in_parts: bool = True


class Store(Protocol):
    """The objects at one URL. Its methods block and are thread-safe."""

    def objects(self) -> list[StoredObject]:
        """Return all objects, or the one that the URL names. Raise `StoreError`."""

    def read(self, stored: StoredObject, begin: int, end: int) -> Iterator[bytes]:
        """Yield bytes of an object. Raise `StoreError`, or `ObjectChanged` if it has changed."""


def without_secrets(text: str) -> str:
    """Remove the queries of URLs, which may contain signatures."""
    return re.sub(r"\?[^\s\"'),]+", "?…", text)


def folders_of(found: Iterable[StoredObject]) -> set[str]:
    """Return the paths of all folders that the objects are in."""
    return {str(parent) for stored_object in found for parent in PurePosixPath(stored_object.path).parents}


def without_folders(found: Iterable[StoredObject]) -> list[StoredObject]:
    """Remove the empty objects that mark folders. Raise `StoreError` if a file and a folder have one name."""
    found = list(found)
    folders = folders_of(found)
    files = [stored_object for stored_object in found if stored_object.size or stored_object.path not in folders]
    if conflict := next((stored_object.path for stored_object in files if stored_object.path in folders), ""):
        raise StoreError(f"{conflict} is an object, and a folder of others; remove or rename one of them")
    return files


def check_count(count: int) -> None:
    """Raise `StoreError` for too many objects."""
    if count > MAX_OBJECTS:
        raise StoreError(f"more than {MAX_OBJECTS} objects; expected the URL of a model, or of a folder of models")
