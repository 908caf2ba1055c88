"""The certificate of an Azure application, for which obstore leaves the login to azure-identity."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from triglot.repository.storage.store import StoreError

if TYPE_CHECKING:
    from obstore.store import AzureCredential

CERTIFICATE = "AZURE_CLIENT_CERTIFICATE_PATH"
VARIABLES = (
    "AZURE_STORAGE_ACCOUNT_KEY",
    "AZURE_STORAGE_ACCESS_KEY",
    "AZURE_STORAGE_MASTER_KEY",
    "AZURE_STORAGE_SAS_TOKEN",
    "AZURE_STORAGE_SAS_KEY",
    "AZURE_STORAGE_TOKEN",
    "AZURE_STORAGE_CLIENT_SECRET",
    "AZURE_CLIENT_SECRET",
    "AZURE_SKIP_SIGNATURE",
    "AZURE_USE_AZURE_CLI",
)
"""Environment variables of obstore's that go before the certificate, as in Azure's own libraries."""
APPLICATION = ("AZURE_TENANT_ID", "AZURE_CLIENT_ID")


def azure_options() -> Mapping[str, Any]:
    """Return the options of an `AzureStore` for the certificate in use; none if there is none.

    Raise `StoreError` for a certificate that cannot be used.
    """
    file = os.environ.get(CERTIFICATE)
    if not file or any(os.environ.get(name) for name in VARIABLES):
        return {}
    if missing := [name for name in APPLICATION if not os.environ.get(name)]:
        raise StoreError(f"{CERTIFICATE} needs {' and '.join(missing)}, too")
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise StoreError(f"{CERTIFICATE}: {file}: {error.strerror}") from None
    return {"credential_provider": _azure_identity(file, content)}


@cache
def _azure_identity(file: str, _: bytes) -> Callable[[], AzureCredential]:
    """Return a function that fetches tokens by azure-identity, which keeps them until they expire.

    Cached, because each URL has a store of its own. Raise `StoreError`.
    """
    try:
        # azure-identity is the user's choice.
        from azure.identity import EnvironmentCredential  # noqa: PLC0415
        from obstore.auth.azure import AzureCredentialProvider  # noqa: PLC0415
    except ModuleNotFoundError:
        missing = "azure-identity, which is not installed; run: pip install azure-identity"
        raise StoreError(f"{CERTIFICATE} needs {missing}") from None
    try:
        provider = AzureCredentialProvider(EnvironmentCredential())
    except ValueError as error:
        raise StoreError(f"{CERTIFICATE}: {file}: {str(error).splitlines()[0]}") from None
    lock = Lock()

    def fetch() -> AzureCredential:
        with lock:
            return provider()

    return fetch
