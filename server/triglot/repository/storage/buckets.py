"""Objects in buckets: S3 and compatible stores, Google Cloud Storage, Azure Blob Storage.

obstore, or the cloud's own library, finds credentials as the cloud's tools do, in environment variables, files and
the machine's metadata; they never pass through this module.
"""

from __future__ import annotations

import logging
import os
import re
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from threading import Lock
from typing import TYPE_CHECKING, Any

from triglot.repository.scan.urls import ENDPOINTS, Url
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
    folders_of,
    without_folders,
    without_secrets,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

log = logging.getLogger(__name__)

MISSING = "needs obstore, which is not installed; run: pip install obstore"
_CREDENTIALS = {"s3": profile_options, "gs": google_options, "az": azure_options}
_OPENING = Lock()
"""Stores that are opened at the same time share what fetches their credentials."""
_STATUS = re.compile(r"status code: (\d{3}[\w ]*)")
_CAUSE = re.compile(r'HttpError \{.*\b(?:message|error): "([^"]+)"', re.DOTALL)
_CERTIFICATE = re.compile(r"HttpError \{.*\bInvalidCertificate\(\s*(\w+)", re.DOTALL)
"""The reason of a failed connection, which obstore 0.12 has in its description for debugging only."""
_CODE = re.compile(r"<Code>([^<]*)</Code>\s*<Message>([^<]*)")


class Bucket:
    """The objects at a bucket URL. Raise `StoreError` if obstore is not installed or not configured.

    obstore cannot hold keys with an empty segment, `.` or `..`: a listing ends at the first one. A key that begins
    or ends with `/` is listed without it, and then not found. Such keys are skipped, with a warning.
    """

    def __init__(self, url: Url) -> None:
        self._url = url
        self._prefix = url.key.strip("/")
        self._not_found: set[StoredObject] = set()
        """Listed objects that cannot be read."""
        self._skipped: set[str] = set()
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
        below = f"{self._prefix}/" if self._prefix else ""
        try:
            try:
                metas = self._listed(self._prefix)
            except self._obstore.exceptions.InvalidPathError:
                metas = self._listed_by_folder(self._prefix)
            found = [_object(meta, below) for meta in metas if meta["path"] != self._prefix]
            if not found and self._prefix:
                found.append(_object(self._obstore.head(self.store, self._prefix), self._prefix))
            return without_folders(self._readable(found))
        except FileNotFoundError:
            return []
        except self._obstore.exceptions.BaseError as error:
            raise self._error_type(error)(reason(error)) from None

    def _listed(self, folder: str, offset: str | None = None) -> list[Any]:
        metas: list[Any] = []
        for page in self._obstore.list(self.store, folder or None, offset=offset):
            metas += page
            check_count(len(metas))
        return metas

    def _listed_by_folder(self, folder: str) -> list[Any]:
        """Return the same as `_listed`, without the keys that obstore cannot hold."""
        try:
            listed = self._obstore.list_with_delimiter(self.store, folder or None)
        except self._obstore.exceptions.InvalidPathError as error:
            self._skip(str(error).partition('"')[2].partition('"')[0], reason(error))
            # After `//`, `/./` and `/../`; only names that begin with a space or punctuation come before.
            return self._listed(folder, f"{folder}/0".lstrip("/"))
        metas = list(listed["objects"])
        for child in listed["common_prefixes"]:
            metas += self._listed_by_folder(child)
            check_count(len(metas))
        return metas

    def _readable(self, found: list[StoredObject]) -> Iterator[StoredObject]:
        """Yield the objects that can be read, as far as is known."""
        folders = folders_of(found)
        listed = Counter(stored_object.path for stored_object in found)
        for stored_object in found:
            is_odd = (stored_object.size and stored_object.path in folders) or listed[stored_object.path] > 1
            if stored_object not in self._not_found and is_odd and not self._exists(stored_object):
                self._not_found.add(stored_object)
            if stored_object in self._not_found:
                self._skip(
                    self._key(stored_object), "it is listed, and not found; does its key begin or end with '/'?"
                )
            else:
                yield stored_object

    def _exists(self, stored: StoredObject) -> bool:
        try:
            return _tag(self._obstore.head(self.store, self._key(stored))) == stored.tag
        except FileNotFoundError:
            return False

    def _skip(self, key: str, why: str) -> None:
        if key not in self._skipped:
            self._skipped.add(key)
            log.warning("%s: the object %r is skipped: %s", self._url, key, why)

    def _key(self, stored: StoredObject) -> str:
        return "/".join(part for part in (self._prefix, stored.path) if part)

    def _error_type(self, error: Exception) -> type[StoreError]:
        status = _STATUS.search(str(error))
        generic = isinstance(error, self._obstore.exceptions.GenericError)
        return StoreUnreachable if generic and (status is None or status[1].startswith("5")) else StoreError

    def read(self, stored: StoredObject, begin: int, end: int) -> Iterator[bytes]:
        """See `Store`."""
        path = self._key(stored)
        try:
            options: Any = {"range": (begin, end), "if_match": f'"{stored.tag}"'}
            got = self._obstore.get(self.store, path, options=options)
            if _tag(got.meta) != stored.tag:  # Some servers ignore If-Match.
                raise ObjectChanged(path)
            yield from map(bytes, got.stream(PIECE))
        except FileNotFoundError:
            self._not_found.add(stored)
            raise ObjectChanged(path) from None
        except self._obstore.exceptions.PreconditionError:
            raise ObjectChanged(path) from None
        except self._obstore.exceptions.BaseError as error:
            raise StoreError(f"{path}: {reason(error)}") from None


def _object(meta: Any, below: str) -> StoredObject:
    path = meta["path"].removeprefix(below)
    return StoredObject(path, meta["size"], _tag(meta), int(meta["last_modified"].timestamp()))


def _tag(meta: Any) -> str:
    """Return the ETag, which Azure quotes in responses but not in listings."""
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
    """Return the store's error text without parts that differ between retries."""
    text, _, details = str(error).partition("\n\nDebug source")
    text = text.rpartition("credential provider: ")[2]
    status, code = _STATUS.search(text), _CODE.search(text)
    if code is not None:
        return f"{code[1]}: {without_secrets(code[2].splitlines()[0] if code[2] else '')}".rstrip(": ")
    if status is not None:
        return status[1].strip()
    text = without_secrets(re.sub(r" in [\d.]+[µmn]?s(, after \d+ retries[^-]*)?", "", text.splitlines()[0]))
    if "non-partial response" in text:
        return f"{text}: so does Google's storage for objects with Content-Encoding: gzip; store them without it"
    if kind := _CERTIFICATE.search(details):
        return f"{text}: invalid certificate: {kind[1]}; SSL_CERT_FILE names a file of other authorities"
    if cause := _CAUSE.search(details):
        return f"{text}: {cause[1]}"
    return text
