"""Model repositories on the Hugging Face hub, or on servers with its API."""

from __future__ import annotations

import os
from collections.abc import Iterator
from http import HTTPStatus
from urllib.parse import unquote

from triglot.repository.scan.urls import Url
from triglot.repository.storage.http import read_part
from triglot.repository.storage.store import StoredObject, StoreError, StoreUnreachable, check_count

MISSING = "needs huggingface_hub, which is not installed; run: pip install huggingface_hub"
OTHER_KINDS = ("datasets", "spaces")


class Hub:
    """The files at hf://OWNER/REPOSITORY[@REVISION][/PATH], of one commit.

    Raise `StoreError` for other URLs, and without huggingface_hub, which finds the token.
    """

    def __init__(self, url: Url) -> None:
        name, _, path = url.key.partition("/")
        repository, _, revision = name.partition("@")
        if not repository or url.host in OTHER_KINDS:
            raise StoreError("expected hf://OWNER/REPOSITORY[@REVISION][/PATH] of a model")
        try:
            from huggingface_hub import HfApi  # noqa: PLC0415 - an extra.
        except ImportError:
            raise StoreError(MISSING) from None
        self._api = HfApi(os.environ.get("HF_ENDPOINT"), library_name="triglot")
        self._name = f"{url.host}/{repository}"
        self._revision = unquote(revision) or "main"
        self._path = path.strip("/")
        self._commit = ""

    def objects(self) -> list[StoredObject]:
        """See `Store`."""
        try:
            about = self._api.model_info(self._name, revision=self._revision, files_metadata=True)
        except Exception as error:  # Also of the HTTP library that huggingface_hub uses.
            raise _store_error(error) from None
        self._commit = str(about.sha)
        files = about.siblings or []
        check_count(len(files))
        folder = self._path and f"{self._path}/"
        return [
            StoredObject(
                file.rfilename[len(folder) :],  # "" of the file that the URL names.
                file.size or 0,
                str(file.blob_id if file.lfs is None else file.lfs.sha256),
            )
            for file in files
            if file.rfilename.startswith(folder) or file.rfilename == self._path
        ]

    def read(self, stored: StoredObject, begin: int, end: int) -> Iterator[bytes]:
        """See `Store`; a commit is immutable."""
        from huggingface_hub import get_token, hf_hub_url  # noqa: PLC0415

        path = "/".join(part for part in (self._path, stored.path) if part)
        url = hf_hub_url(self._name, path, revision=self._commit, endpoint=self._api.endpoint)
        return read_part(url, StoredObject(path, stored.size, stored.tag), begin, end, get_token() or "")


def _store_error(error: Exception) -> StoreError:
    response = getattr(error, "response", None)
    if response is None:
        invalid = isinstance(error, TypeError | ValueError)  # A name, or the answer.
        return (StoreError if invalid else StoreUnreachable)(str(error) or type(error).__name__)
    status = HTTPStatus(response.status_code)
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR or status is HTTPStatus.TOO_MANY_REQUESTS:
        return StoreUnreachable(f"{status} {status.phrase}")
    return StoreError(f"{status} {status.phrase}: no such repository or revision, or it needs another token")
