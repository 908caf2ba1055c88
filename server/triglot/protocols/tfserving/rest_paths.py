"""The paths of TensorFlow Serving's REST API, taken apart (tfs 4). Pure functions."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar
from urllib.parse import unquote

from triglot.core.errors import InvalidArgument
from triglot.core.http import HttpRequest
from triglot.protocols.tfserving.codec import ModelSpec

CALLS = ("predict", "classify", "regress")
MAX_INT64 = 2**63 - 1
LONGEST_KEPT = 512
"""Characters of a path that is remembered."""
_WHICH = r"(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?"
_POST = re.compile(rf"/v1/models/(?P<model>[^/:]+){_WHICH}:(?P<verb>classify|regress|predict)", re.IGNORECASE)
_GET = re.compile(rf"/v1/models(?:/(?P<model>[^/:]+))?{_WHICH}(?:/(?P<metadata>metadata))?", re.IGNORECASE)
_NAMED = re.compile(r"/v1/models/(?P<model>[^/:]+)", re.IGNORECASE)
_SERVER = re.compile(r"^https?://[^/]*", re.IGNORECASE)
T = TypeVar("T")


class VersionTooLarge(InvalidArgument):
    """The version in the path is beyond 64 bits; the answer has no body (tfs 0.18)."""


def path_of(http: HttpRequest) -> str:
    """The path as it was sent; unlike in TensorFlow Serving, a query does no harm (tfs 0.20)."""
    path = http.target.partition("?")[0]
    return path if path.startswith("/") else _SERVER.sub("", path)


def _kept(read: Callable[[str], T]) -> Callable[[str], T]:
    """What is read in a path is remembered: clients send few different ones."""
    known = lru_cache(maxsize=1024)(read)
    return lambda path: known(path) if len(path) <= LONGEST_KEPT else read(path)


@_kept
def model_in(path: str) -> str:
    """The model that it names, "" for none."""
    match = _NAMED.match(path)
    return unquote(match["model"]) if match else ""


@_kept
def call_in(path: str) -> tuple[str, ModelSpec] | None:
    """Which of `CALLS` is meant, and which model; None: no such path. Raises `VersionTooLarge`."""
    match = _POST.fullmatch(path)
    if match is None or match["verb"] not in CALLS:
        return None
    return match["verb"], spec_in(match)


def look_in(path: str) -> re.Match[str] | None:
    """The `model`, its version, and `metadata` that are asked for; None: no such path."""
    return _GET.fullmatch(path)


def spec_in(match: re.Match[str]) -> ModelSpec:
    """The model that a path means. Raises `VersionTooLarge`."""
    version = None if match["version"] is None else int(match["version"].lstrip("0")[:20] or "0")
    if version is not None and version > MAX_INT64:
        raise VersionTooLarge(f"Failed to parse version: {version}")
    label = None if match["label"] is None else unquote(match["label"])
    return ModelSpec(unquote(match["model"]), version, label)
