"""URLs of models, used in place of paths.

A path that begins with a scheme is a URL, in pathlib's spelling with one slash after the colon:
`Path("s3://bucket/models")` is `s3:/bucket/models`. So URLs are handled as paths until the manager scans for
models.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from triglot.repository.config.settings import ModelSettings
from triglot.repository.scan.paths import is_below
from triglot.repository.scan.source import MLServerFolder, ModelFiles, NamedPath, Root

SCHEMES = ("s3", "gs", "az", "hf", "https")
HINTS = {
    "as": "expected az://CONTAINER/PATH, and the account in AZURE_STORAGE_ACCOUNT_NAME",
    "abfs": "expected az://CONTAINER/PATH, and the account in AZURE_STORAGE_ACCOUNT_NAME",
    "abfss": "expected az://CONTAINER/PATH, and the account in AZURE_STORAGE_ACCOUNT_NAME",
    "gcs": "expected gs://BUCKET/PATH",
    "http": "expected https://",
}
"""Hints for schemes that other programs use."""
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "gs": ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Environment variables that set another server than the cloud's own."""
_URL = re.compile(rf"({'|'.join((*SCHEMES, *HINTS))}):/+(.*)", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Url:
    """`host`: a bucket, a container, or an owner on the hub. `key`: the path in it, "" for all of it.

    `query` may contain a signature, so `str` omits it.
    """

    scheme: str
    host: str
    key: str
    query: str = ""

    def __str__(self) -> str:
        host = self.host.rpartition("@")[2] if self.scheme == "https" else self.host
        return f"{self.scheme}://{host}" + (f"/{self.key}" if self.key else "")


def url_of(path: Path) -> Url | None:
    """Return the URL that a path stands for, or None."""
    if (match := _URL.fullmatch(str(path))) is None:
        return None
    scheme, rest = match.groups()
    query = ""
    if scheme == "https":
        rest, _, query = rest.partition("?")
    host, _, key = rest.partition("/")
    return Url(scheme, host, key, query)


def is_allowed(path: Path, folders: Iterable[Path]) -> bool:
    """Whether a path is one of the folders or below one; a URL only below another URL."""
    if url_of(path) is None:
        return is_below(path, [folder for folder in folders if url_of(folder) is None])
    return ".." not in path.parts and any(
        url_of(folder) is not None and path.is_relative_to(folder) for folder in folders
    )


def spelled(path: Path) -> str:
    """Return a path as messages show it; URLs in their usual spelling."""
    url = url_of(path)
    return str(path) if url is None else str(url)


def path_of(root: Root) -> Path | None:
    """Return the path of a root that may be a URL."""
    match root:
        case ModelSettings():
            return root.base_path
        case NamedPath() | MLServerFolder():
            return root.path
        case ModelFiles():
            return None
    return root


def moved(root: Root, path: Path) -> Root:
    """Return the root with another path."""
    match root:
        case ModelSettings():
            return replace(root, base_path=path)
        case NamedPath() | MLServerFolder():
            return replace(root, path=path)
    return path
