"""Objects in buckets: S3 and compatible stores, Google Cloud Storage, Azure Blob Storage.

obstore, or the cloud's own library, finds credentials as the cloud's tools do, in environment variables, files and
the machine's metadata; they never pass through this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any

from triglot.repository.storage.aws import profile_options
from triglot.repository.storage.azure import azure_options
from triglot.repository.storage.google import google_options
from triglot.repository.storage.store import (
    PIECE,
    ObjectChanged,
    StoredObject,
    StoreError,
    StoreUnreachable,
    check_count,
    without_folders,
    without_secrets,
)
from triglot.repository.storage.urls import Url

if TYPE_CHECKING:
    from obstore.store import ObjectStore

MISSING = "needs obstore, which is not installed; run: pip install 'triglot[storage]'"
ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT"),
    "gs": ("STORAGE_EMULATOR_HOST", "GOOGLE_BASE_URL"),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Environment variables that set another server than the cloud's own."""
_CREDENTIALS = {"s3": profile_options, "gs": google_options, "az": azure_options}
_OPENING = Lock()
"""Stores that are opened at the same time share what fetches their credentials."""
_STATUS = re.compile(r"status code: (\d{3}[\w ]*)")
_CODE = re.compile(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)")


class Bucket:
    """The objects at a bucket URL. Raises `StoreError` if obstore is not installed or not configured."""

    def __init__(self, url: Url) -> None:
        self._prefix = url.key.strip("/")
        try:
            import obstore  # noqa: PLC0415 - an extra.
        except ModuleNotFoundError:
            raise StoreError(MISSING) from None
        self._obstore = obstore
        try:
            self.store: Any = _open_store(url)
        except (obstore.exceptions.BaseError, ValueError) as error:
            raise StoreError(reason(error)) from None

    def objects(self) -> list[StoredObject]:
        """See `Store`."""
        found: list[StoredObject] = []
        below = f"{self._prefix}/" if self._prefix else ""
        try:
            for page in self._obstore.list(self.store, self._prefix or None):
                found += [_object(meta, below) for meta in page if meta["path"] != self._prefix]
                check_count(len(found))
            if not found and self._prefix:
                found.append(_object(self._obstore.head(self.store, self._prefix), self._prefix))
        except FileNotFoundError:
            return []
        except self._obstore.exceptions.BaseError as error:
            raise self._error_type(error)(reason(error)) from None
        return without_folders(found)

    def _error_type(self, error: Exception) -> type[StoreError]:
        status = _STATUS.search(str(error))
        generic = isinstance(error, self._obstore.exceptions.GenericError)
        return StoreUnreachable if generic and (status is None or status[1].startswith("5")) else StoreError

    def read(self, stored: StoredObject, begin: int, end: int) -> Iterator[bytes]:
        """See `Store`."""
        path = "/".join(part for part in (self._prefix, stored.path) if part)
        try:
            options: Any = {"range": (begin, end), "if_match": f'"{stored.tag}"'}
            got = self._obstore.get(self.store, path, options=options)
            if _tag(got.meta) != stored.tag:  # Some servers ignore If-Match.
                raise ObjectChanged(path)
            yield from map(bytes, got.stream(PIECE))
        except (FileNotFoundError, self._obstore.exceptions.PreconditionError):
            raise ObjectChanged(path) from None
        except self._obstore.exceptions.BaseError as error:
            raise StoreError(f"{path}: {reason(error)}") from None


def _object(meta: Any, below: str) -> StoredObject:
    path = meta["path"].removeprefix(below)
    return StoredObject(path, meta["size"], _tag(meta), int(meta["last_modified"].timestamp()))


def _tag(meta: Any) -> str:
    """Returns the ETag, which Azure quotes in responses but not in listings."""
    return str(meta["e_tag"] or "").strip('"')


def _open_store(url: Url) -> ObjectStore:
    from obstore.store import AzureStore, GCSStore, S3Store  # noqa: PLC0415 - an extra.

    endpoint = next((text for name in ENDPOINTS[url.scheme] if (text := os.environ.get(name))), "")
    options: Any = {
        "client_options": {"allow_http": endpoint.startswith("http://"), "timeout": "5 minutes"},
        "retry_config": {"max_retries": 4, "retry_timeout": timedelta(seconds=60)},
    }
    with _OPENING:
        options |= _CREDENTIALS[url.scheme]()
    if url.scheme == "s3":
        return S3Store(url.host, **options)
    if url.scheme == "az":
        return AzureStore(url.host, **options)
    if emulator := os.environ.get("STORAGE_EMULATOR_HOST"):  # Google's own variable.
        base = emulator if "://" in emulator else f"http://{emulator}"
        options["client_options"]["allow_http"] = True
        options["config"] = {"service_account_key": _ANONYMOUS % base}
    return GCSStore(url.host, **options)


_ANONYMOUS = (
    '{"gcs_base_url": "%s", "disable_oauth": true, "client_email": "", "private_key": "", "private_key_id": ""}'
)


def reason(error: Exception) -> str:
    """Returns the store's error text without parts that differ between retries."""
    text = str(error).partition("\n\nDebug source")[0]
    text = text.rpartition("credential provider: ")[2]
    status, code = _STATUS.search(text), _CODE.search(text)
    if code is not None:
        return f"{code[1]}: {without_secrets(code[2].splitlines()[0] if code[2] else '')}".rstrip(": ")
    if status is not None:
        return status[1].strip()
    return without_secrets(re.sub(r" in [\d.]+[µmn]?s(, after \d+ retries[^-]*)?", "", text.splitlines()[0]))
