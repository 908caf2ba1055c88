"""Model repositories on the Hugging Face hub, or on servers with its API."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote, unquote

from triglot.repository.storage.http import read_json, read_part
from triglot.repository.storage.store import StoredObject, StoreError, check_count
from triglot.repository.storage.urls import Url

ENDPOINT = "https://huggingface.co"
OTHER_KINDS = ("datasets", "spaces")


class Hub:
    """The files at hf://OWNER/REPOSITORY[@REVISION][/PATH], of one commit. Raises `StoreError` for other URLs."""

    def __init__(self, url: Url) -> None:
        name, _, path = url.key.partition("/")
        repository, _, revision = name.partition("@")
        if not repository or url.host in OTHER_KINDS:
            raise StoreError("expected hf://OWNER/REPOSITORY[@REVISION][/PATH] of a model")
        self._endpoint = os.environ.get("HF_ENDPOINT", ENDPOINT).rstrip("/")
        self._name = quote(f"{url.host}/{repository}")
        self._revision = unquote(revision) or "main"
        self._path = path.strip("/")
        self._token = _token()
        self._commit = ""

    def objects(self) -> list[StoredObject]:
        """See `Store`."""
        api = f"{self._endpoint}/api/models/{self._name}"
        found: list[StoredObject] = []
        try:
            about, _ = read_json(f"{api}/revision/{quote(self._revision, safe='')}", self._token)
            self._commit = str(about["sha"])
            page = f"{api}/tree/{self._commit}?recursive=true"
            while page:
                files, page = read_json(page, self._token)
                found += [_object(file) for file in files if file["type"] == "file"]
                check_count(len(found))
                if page and not page.startswith(f"{self._endpoint}/"):
                    raise StoreError("the hub's next page is on another server")
        except FileNotFoundError:
            raise StoreError("404 Not Found: no such repository or revision, or it needs a token") from None
        except (KeyError, TypeError) as error:
            raise StoreError(f"the answer is not the hub's: {type(error).__name__} {error}") from None
        return list(self._below(found))

    def _below(self, files: list[StoredObject]) -> Iterator[StoredObject]:
        for one in files:
            if not self._path or one.path.startswith(f"{self._path}/"):
                path = one.path[len(self._path) + 1 :] if self._path else one.path
                yield StoredObject(path, one.size, one.tag)
            elif one.path == self._path:
                yield StoredObject("", one.size, one.tag)

    def read(self, stored: StoredObject, begin: int, end: int) -> Iterator[bytes]:
        """See `Store`; a commit is immutable."""
        path = "/".join(part for part in (self._path, stored.path) if part)
        url = f"{self._endpoint}/{self._name}/resolve/{self._commit}/{quote(path)}"
        return read_part(url, StoredObject(path, stored.size, stored.tag), begin, end, self._token)


def _object(file: dict[str, object]) -> StoredObject:
    """Returns an object; its tag is the content digest in `lfs`, or else `oid`."""
    lfs = file.get("lfs")
    tag, size = (lfs["oid"], lfs["size"]) if isinstance(lfs, dict) else (file["oid"], file["size"])
    return StoredObject(str(file["path"]), int(str(size)), str(tag))


def _token() -> str:
    """Returns the hub's token: HF_TOKEN, or the file that its tools write at a login."""
    if token := os.environ.get("HF_TOKEN"):
        return token.strip()
    home = os.environ.get("HF_HOME", "~/.cache/huggingface")
    file = Path(os.environ.get("HF_TOKEN_PATH", f"{home}/token")).expanduser()
    try:
        return file.read_text().strip()
    except OSError:
        return ""
