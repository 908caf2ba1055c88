"""Credentials and the region from AWS's own files, which obstore does not read."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from configparser import Error as ConfigError
from configparser import RawConfigParser
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from triglot.repository.storage.store import StoreError

if TYPE_CHECKING:
    from obstore.store import S3Credential

VARIABLES = (
    "AWS_ACCESS_KEY_ID",
    "AWS_WEB_IDENTITY_TOKEN_FILE",
    "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI",
    "AWS_CONTAINER_CREDENTIALS_FULL_URI",
    "AWS_SKIP_SIGNATURE",
)
"""Environment variables with S3 credentials; AWS's files come next, and the machine's own role last."""
FILES = {
    "AWS_SHARED_CREDENTIALS_FILE": "~/.aws/credentials",
    "AWS_CONFIG_FILE": "~/.aws/config",
}
KEYS = ("access_key_id", "secret_access_key", "session_token")
LOGINS = frozenset({"role_arn", "sso_session", "sso_start_url", "credential_process", "login_session"})
"""Settings of profiles whose keys have to be fetched, which boto3 does."""
SHORTEST = timedelta(minutes=10)
"""boto3 renews keys that expire sooner."""


def profile_options() -> Mapping[str, Any]:
    """Return the options of an `S3Store` for the profile in use; none if variables have credentials.

    Raise `StoreError` for a profile without credentials.
    """
    if any(os.environ.get(name) for name in VARIABLES):
        return {}
    name = os.environ.get("AWS_PROFILE", "")
    files = [Path(os.environ.get(variable) or usual).expanduser() for variable, usual in FILES.items()]
    profiles = RawConfigParser(strict=False)
    try:
        profiles.read(files)
    except (ConfigError, UnicodeDecodeError):
        raise StoreError(f"{' or '.join(map(str, files))} cannot be understood") from None
    profile: dict[str, str] = {}
    for section in (f"profile {name or 'default'}", name or "default"):
        if profiles.has_section(section):
            profile |= profiles[section]
    config = {}
    if "region" in profile and not (os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")):
        config["region"] = profile["region"]
    if login := sorted(LOGINS & profile.keys()):
        return {"config": config, "credential_provider": _boto3(name or "default", login[0], *files)}
    config |= {key: profile[f"aws_{key}"] for key in KEYS if f"aws_{key}" in profile}
    if name and "access_key_id" not in config:
        raise StoreError(f"AWS_PROFILE: {files[0]} has no aws_access_key_id for the profile {name!r}")
    return {"config": config}


@cache
def _boto3(name: str, login: str, *_: Path) -> Callable[[], S3Credential]:
    """Return a function that fetches the keys of a profile by boto3, which keeps them until they expire.

    Cached, because each URL has a store of its own. Raise `StoreError`.
    """
    try:
        from obstore.auth.boto3 import Boto3CredentialProvider  # noqa: PLC0415 - boto3 is the user's choice.
    except ModuleNotFoundError:
        missing = "which needs boto3, which is not installed; run: pip install boto3"
        raise StoreError(f"the AWS profile {name!r} has {login}, {missing}") from None
    if not (logger := logging.getLogger("botocore")).level:
        logger.setLevel(logging.INFO)  # At debug it logs tokens and keys.
    try:
        # Not the provider: its region would go before that of the variables.
        return Boto3CredentialProvider(ttl=SHORTEST).__call__
    except Exception as error:
        raise StoreError(f"the AWS profile {name!r}: {error}") from None
