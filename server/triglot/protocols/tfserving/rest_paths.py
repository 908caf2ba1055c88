"""Parses the paths of TensorFlow Serving's REST API (tfs 4). Pure functions."""

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
MAX_CACHED = 256
"""Longest path that is cached, in characters."""
_WHICH = r"(?:/versions/(?P<version>[0-9]+)|/labels/(?P<label>[^/:]+))?"
_POST = re.compile(rf"/v1/models/(?P<model>[^/:]+){_WHICH}:(?P<verb>classify|regress|predict)", re.IGNORECASE)
_GET = re.compile(rf"/v1/models(?:/(?P<model>[^/:]+))?{_WHICH}(?:/(?P<metadata>metadata))?", re.IGNORECASE)
_NAMED = re.compile(r"/v1/models/(?P<model>[^/:]+)", re.IGNORECASE)
_SERVER = re.compile(r"^https?://[^/]*", re.IGNORECASE)
T = TypeVar("T")


class VersionTooLarge(InvalidArgument):
    """The version in the path exceeds 64 bits; the response has no body (tfs 0.18)."""


def path_of(http: HttpRequest) -> str:
    """Returns the path as sent; unlike in TensorFlow Serving, a query is allowed (tfs 0.20)."""
    path = http.target.partition("?")[0]
    return path if path.startswith("/") else _SERVER.sub("", path)


def _cached(read: Callable[[str], T]) -> Callable[[str], T]:
    """Cache a function of paths: clients send few different ones."""
    known = lru_cache(maxsize=512)(read)
    return lambda path: known(path) if len(path) <= MAX_CACHED else read(path)


@_cached
def model_of_path(path: str) -> str:
    """Returns the model in a path, "" if it names none."""
    match = _NAMED.match(path)
    return unquote(match["model"]) if match else ""


@_cached
def parse_call(path: str) -> tuple[str, ModelSpec] | None:
    """Returns which of `CALLS` a path names, and its model; None if it matches neither.

    Raises `VersionTooLarge`.
    """
    match = _POST.fullmatch(path)
    if match is None or match["verb"] not in CALLS:
        return None
    return match["verb"], spec_of_match(match)


def match_get(path: str) -> re.Match[str] | None:
    """Match a GET path: `model`, its version or label, and `metadata`; None if it does not match."""
    return _GET.fullmatch(path)


def spec_of_match(match: re.Match[str]) -> ModelSpec:
    """Returns the ModelSpec of a matched path. Raises `VersionTooLarge`."""
    version = None if match["version"] is None else int(match["version"].lstrip("0")[:20] or "0")
    if version is not None and version > MAX_INT64:
        raise VersionTooLarge(f"Failed to parse version: {version}")
    label = None if match["label"] is None else unquote(match["label"])
    return ModelSpec(unquote(match["model"]), version, label)
