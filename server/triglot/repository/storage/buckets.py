"""Objects in buckets: S3 and compatible stores, Google Cloud Storage, Azure Blob Storage.

obstore finds each cloud's credentials as its own tools do, in environment variables, files and the machine's
metadata; they never pass through this module.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from configparser import Error as ConfigError
from configparser import RawConfigParser
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triglot.repository.storage.store import (
    PIECE,
    ObjectChanged,
    StoredObject,
    StoreError,
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
CREDENTIALS = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
"""Environment variables with S3 credentials; AWS's files come next, and the machine's own role last."""
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
            raise StoreError(reason(error)) from None
        return without_folders(found)

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
    if url.scheme == "s3":
        return S3Store(url.host, config=_profile(), **options)
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


def _profile() -> Any:
    """Returns the settings in AWS's own files, unless variables have credentials.

    Raises `StoreError` for a profile without credentials.
    """
    if any(os.environ.get(name) for name in CREDENTIALS):
        return {}
    name = os.environ.get("AWS_PROFILE", "")
    files = [
        Path(os.environ.get(variable) or usual).expanduser()
        for variable, usual in (
            ("AWS_SHARED_CREDENTIALS_FILE", "~/.aws/credentials"),
            ("AWS_CONFIG_FILE", "~/.aws/config"),
        )
    ]
    profiles = RawConfigParser(strict=False)
    try:
        profiles.read(files)
    except (ConfigError, UnicodeDecodeError):
        raise StoreError(f"{' or '.join(map(str, files))} cannot be understood") from None
    wanted = name or "default"
    found = {
        key: profiles[section][f"aws_{key}" if key != "region" else key]
        for section in (f"profile {wanted}", wanted)
        if profiles.has_section(section)
        for key in ("access_key_id", "secret_access_key", "session_token", "region")
        if (f"aws_{key}" if key != "region" else key) in profiles[section]
    }
    if name and "access_key_id" not in found:
        raise StoreError(f"AWS_PROFILE: {files[0]} has no aws_access_key_id for the profile {name!r}")
    if os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION"):
        found.pop("region", None)
    return found


def reason(error: Exception) -> str:
    """Returns the store's error text without parts that differ between retries."""
    text = str(error).partition("\n\nDebug source")[0]
    status, code = _STATUS.search(text), _CODE.search(text)
    if code is not None:
        return f"{code[1]}: {without_secrets(code[2].splitlines()[0] if code[2] else '')}".rstrip(": ")
    if status is not None:
        return status[1].strip()
    return without_secrets(re.sub(r" in [\d.]+[µmn]?s(, after \d+ retries[^-]*)?", "", text.splitlines()[0]))
