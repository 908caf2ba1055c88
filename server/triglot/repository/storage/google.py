"""Google's credential files of types that obstore does not know, which google-auth does."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from datetime import UTC
from functools import cache
from importlib import import_module
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from triglot.repository.storage.store import StoreError

if TYPE_CHECKING:
    from obstore.store import GCSCredential

VARIABLES = (
    "GOOGLE_SERVICE_ACCOUNT",
    "GOOGLE_SERVICE_ACCOUNT_PATH",
    "GOOGLE_SERVICE_ACCOUNT_KEY",
    "GOOGLE_SKIP_SIGNATURE",
    "STORAGE_EMULATOR_HOST",
)
"""Environment variables that go before the file."""
TYPES = frozenset({"external_account", "external_account_authorized_user", "impersonated_service_account"})
SCOPE = "https://www.googleapis.com/auth/devstorage.read_only"


def google_options() -> Mapping[str, Any]:
    """Return the options of a `GCSStore` for the credential file in use; none if obstore reads it.

    Raise `StoreError` for a file that cannot be used.
    """
    if any(os.environ.get(name) for name in VARIABLES):
        return {}
    usual = Path(os.environ.get("CLOUDSDK_CONFIG") or "~/.config/gcloud", "application_default_credentials.json")
    file = Path(os.environ.get("GOOGLE_APPLICATION_CREDENTIALS") or usual).expanduser()
    try:
        text = file.read_text()
        kind = json.loads(text)["type"]
    except (OSError, ValueError, LookupError, TypeError):
        return {}  # obstore says what is wrong.
    return {"credential_provider": _google_auth(file, text)} if kind in TYPES else {}


@cache
def _google_auth(file: Path, text: str) -> Callable[[], GCSCredential]:
    """Return a function that fetches tokens by google-auth, each once until it expires.

    Cached, because each URL has a store of its own. Raise `StoreError`.
    """
    info = json.loads(text)
    try:
        # google-auth is the user's choice.
        from google.auth.credentials import TokenState  # noqa: PLC0415
        from google.auth.transport.requests import Request  # noqa: PLC0415
    except ImportError:
        missing = "which needs google-auth, which is not installed; run: pip install 'google-auth[requests]'"
        raise StoreError(f"{file} has the type {info['type']}, {missing}") from None
    try:
        credentials = _credentials(info)
    except Exception as error:
        raise StoreError(f"{file}: {error}") from None
    lock = Lock()

    def fetch() -> GCSCredential:
        with lock:
            if credentials.token_state is not TokenState.FRESH:
                credentials.refresh(Request())
            return {"token": credentials.token, "expires_at": credentials.expiry.replace(tzinfo=UTC)}

    return fetch


def _credentials(info: Mapping[str, Any]) -> Any:
    """Return those of a file. `google.auth.default` would look for a project, too, which is not needed."""
    match info:
        case {"type": "impersonated_service_account"}:
            found: Any = import_module("google.auth.impersonated_credentials").Credentials
            return found.from_impersonated_service_account_info(info, [SCOPE])
        case {"type": "external_account_authorized_user"}:
            return import_module("google.auth.external_account_authorized_user").Credentials.from_info(info)
        case {"subject_token_type": "urn:ietf:params:aws:token-type:aws4_request"}:
            name = "aws"
        case {"credential_source": {"executable": _}}:
            name = "pluggable"
        case _:
            name = "identity_pool"
    return import_module(f"google.auth.{name}").Credentials.from_info(info, scopes=[SCOPE])
