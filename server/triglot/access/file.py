"""The access file: rules in TOML that grant operations to clients. Independent of calls."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from triglot.config.option_fields import is_loopback, unknown
from triglot.config.options import ConfigError
from triglot.core.operation import ALL_MODELS, OPERATION_NAMES, Operation

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_WORD = re.compile(r"[A-Za-z0-9_-]{1,32}")
_DIGEST = re.compile(r"[0-9a-fA-F]{64}")
EMPTY_SHA256 = hashlib.sha256().hexdigest()
"""The hash that a shell command gives for an unset variable."""
MIN_RATE, INF = 0.001, float("inf")
"""Lowest rate in requests per second, and the exclusive upper bound."""
NO_OPERATIONS: frozenset[Operation] = frozenset()


@dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """A set of rights: `operations` on the models whose names match one of the `models` glob patterns.

    `rate`: requests per second; `concurrent`: open calls; 0: no limit.
    """

    operations: frozenset[Operation] = NO_OPERATIONS
    models: tuple[str, ...] = ALL_MODELS
    rate: float = 0.0
    concurrent: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientRule(Grant):
    """A client with its credentials: SHA-256 digests of its tokens, and names in its certificates."""

    name: str
    tokens: tuple[bytes, ...] = ()
    certificates: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class IssuerRule(Grant):
    """An issuer of JWTs: its `iss` and `aud` claims, and its keys' file or URL.

    `jwks_ca`: a file with the CAs for the URL's server; `jwks_token_file`: a file with the bearer token for it.
    `operations` are granted to all of its tokens; `groups` grants more by value of the claim `groups_claim`.
    """

    name: str
    issuer: str
    audience: str
    jwks: str
    jwks_ca: str = ""
    jwks_token_file: str = ""
    groups_claim: str = ""
    groups: Mapping[str, frozenset[Operation]]


@dataclass(frozen=True, slots=True)
class AccessRules:
    """The rules of an access file."""

    clients: tuple[ClientRule, ...] = ()
    issuers: tuple[IssuerRule, ...] = ()
    anonymous: Grant = Grant()

    @property
    def names(self) -> list[str]:
        """The names of the clients and issuers."""
        return [*(client.name for client in self.clients), *(issuer.name for issuer in self.issuers)]

    @property
    def takes_tokens(self) -> bool:
        """Whether any client sends a token."""
        return bool(self.issuers) or any(client.tokens for client in self.clients)

    @property
    def takes_certificates(self) -> bool:
        """Whether any client is identified by its certificate."""
        return any(client.certificates for client in self.clients)


def read_access(path: Path, content: bytes) -> AccessRules:
    """Return the rules of the file at `path` with this content.

    Raise `ConfigError`, which names the file and the key, for invalid content.
    """
    try:
        table = tomllib.loads(content.decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"access: {path} is not TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"access: {path} is nested too deeply") from None
    try:
        return access_rules(table, path.parent)
    except ConfigError as error:
        raise ConfigError(f"access: {path}: {error}") from None


def access_rules(table: dict[str, Any], folder: Path) -> AccessRules:
    """Return the rules of a parsed file in `folder`. Raise `ConfigError`, which names the key."""
    if not table:
        raise ConfigError("expected [client.NAME], [issuer.NAME] or [anonymous], got nothing")
    _check_keys(table, ("client", "issuer", "anonymous"), "")
    clients = tuple(_client(name, fields) for name, fields in _tables(table, "client"))
    issuers = tuple(_issuer(name, fields, folder) for name, fields in _tables(table, "issuer"))
    _check_unique(clients, lambda client: client.tokens, "tokens_sha256")
    _check_unique(clients, lambda client: client.certificates, "certificates")
    _check_issuers(issuers)
    names = {client.name for client in clients}
    for issuer in issuers:
        if issuer.name in names:
            raise ConfigError(f"issuer.{issuer.name}: a client has this name already")
    return AccessRules(clients, issuers, _anonymous(table))


def _tables(table: dict[str, Any], kind: str) -> Iterable[tuple[str, dict[str, Any]]]:
    named = _of(dict, table.get(kind, {}), kind, "tables [" + kind + ".NAME]")
    for name, fields in named.items():
        if not _NAME.fullmatch(name):
            raise ConfigError(f"{kind}.{name}: a name has up to 64 letters, digits, '.', '_', '@' and '-'")
        yield name, _of(dict, fields, f"{kind}.{name}", "a table")


def _client(name: str, table: dict[str, Any]) -> ClientRule:
    where = f"client.{name}."
    _check_keys(table, ("tokens_sha256", "certificates", *_GRANT_KEYS), where)
    tokens = _texts(table, "tokens_sha256", where)
    for token in tokens:
        if not _DIGEST.fullmatch(token):
            raise ConfigError(f"{where}tokens_sha256: expected the 64 hexadecimal digits of a SHA-256 hash")
        if token.lower() == EMPTY_SHA256:
            raise ConfigError(f"{where}tokens_sha256: the hash of an empty text is no token's")
    certificates = _texts(table, "certificates", where)
    if not tokens and not certificates:
        raise ConfigError(f"client.{name}: expected tokens_sha256 or certificates, got neither")
    return ClientRule(
        name=name, tokens=tuple(map(bytes.fromhex, tokens)), certificates=certificates, **_grant(table, where)
    )


def _issuer(name: str, table: dict[str, Any], folder: Path) -> IssuerRule:
    where = f"issuer.{name}."
    needed, files = ("issuer", "audience", "jwks"), ("jwks_ca", "jwks_token_file")
    _check_keys(table, (*needed, *files, "groups", *_GRANT_KEYS), where)
    texts = {key: _of(str, table.get(key, ""), where + key, "a text") for key in needed + files}
    for key in needed:
        if not texts[key]:
            raise ConfigError(f"{where}{key}: missing")
    if "://" in texts["jwks"]:
        _check_url(texts["jwks"], f"{where}jwks")
    else:
        texts["jwks"] = str(folder / texts["jwks"])
    for key in files:
        if texts[key] and not texts["jwks"].startswith("https:"):
            raise ConfigError(f"{where}{key}: needs an https:// URL in jwks")
        texts[key] = texts[key] and str(folder / texts[key])
    groups = dict(_of(dict, table.get("groups", {}), where + "groups", "a table"))
    claim = _of(str, groups.pop("claim", ""), f"{where}groups.claim", "a text")
    if groups and not claim:
        raise ConfigError(f"{where}groups.claim: missing")
    of_group = {group: _operations(names, f"{where}groups.{group}") for group, names in groups.items()}
    grant = _grant(table, where, needs_operations=not of_group)
    return IssuerRule(name=name, **texts, groups_claim=claim, groups=of_group, **grant)


def _check_url(url: str, where: str) -> None:
    """Raise `ConfigError` unless keys from the URL are safe from replacement on the network."""
    try:
        parts = urlsplit(url)
        safe = parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname or ""))
        right = safe and parts.hostname and parts.username is None and (parts.port or True)
    except ValueError:
        right = False
    if not right:
        raise ConfigError(f"{where}: expected a file, https://HOST..., or http:// to this machine")


def _anonymous(table: dict[str, Any]) -> Grant:
    if "anonymous" not in table:
        return Grant()
    given = _of(dict, table["anonymous"], "anonymous", "a table")
    _check_keys(given, _GRANT_KEYS, "anonymous.")
    return Grant(**_grant(given, "anonymous."))


_GRANT_KEYS = ("operations", "models", "rate", "concurrent")


def _grant(table: dict[str, Any], where: str, *, needs_operations: bool = True) -> dict[str, Any]:
    if needs_operations and "operations" not in table:
        raise ConfigError(f"{where}operations: missing")
    rate = table.get("rate", 0.0)
    if isinstance(rate, bool) or not isinstance(rate, int | float) or not (rate == 0 or MIN_RATE <= rate < INF):
        raise ConfigError(f"{where}rate: expected requests a second, {MIN_RATE} or more, got {_number(rate)}")
    concurrent = table.get("concurrent", 0)
    if isinstance(concurrent, bool) or not isinstance(concurrent, int) or concurrent < 0:
        raise ConfigError(f"{where}concurrent: expected a number of calls, got {_number(concurrent)}")
    return {
        "operations": _operations(table.get("operations", []), f"{where}operations"),
        "models": _texts(table, "models", where) if "models" in table else ALL_MODELS,
        "rate": float(rate),
        "concurrent": concurrent,
    }


def _operations(names: Any, where: str) -> frozenset[Operation]:
    operations = NO_OPERATIONS
    for name in _list_of_texts(names, where):
        if name not in OPERATION_NAMES:
            raise ConfigError(f"{where}: {unknown(_word(name), OPERATION_NAMES, 'operation')}")
        operations |= OPERATION_NAMES[name]
    return operations


def _check_unique(clients: Iterable[ClientRule], of: Callable[[ClientRule], Iterable[Any]], key: str) -> None:
    """Raise `ConfigError` if two clients share a credential."""
    owners: dict[Any, str] = {}
    for client in clients:
        for credential in of(client):
            owner = owners.setdefault(credential, client.name)
            if owner != client.name:
                raise ConfigError(f"client.{client.name}.{key}: client.{owner} has the same one")


def _check_issuers(issuers: Iterable[IssuerRule]) -> None:
    names: dict[tuple[str, str], str] = {}
    for issuer in issuers:
        owner = names.setdefault((issuer.issuer, issuer.audience), issuer.name)
        if owner != issuer.name:
            raise ConfigError(f"issuer.{issuer.name}: issuer.{owner} has the same issuer and audience")


def _check_keys(table: dict[str, Any], known: Iterable[str], where: str) -> None:
    known = tuple(known)
    for key in table:
        if key not in known:
            raise ConfigError(f"{where}{_word(key)}: {unknown(_word(key), known, 'key')}")


def _texts(table: dict[str, Any], key: str, where: str) -> tuple[str, ...]:
    return _list_of_texts(table.get(key, []), where + key)


def _list_of_texts(value: Any, where: str) -> tuple[str, ...]:
    if not isinstance(value, list) or not all(isinstance(text, str) and text for text in value):
        raise ConfigError(f"{where}: expected a list of texts, got {_kind_of(value)}")
    return tuple(value)


def _word(text: str) -> str:
    """Return a text, unless its length or characters suggest a secret in the wrong place."""
    return text if _WORD.fullmatch(text) else f"({len(text)} characters)"


def _number(value: Any) -> str:
    return repr(value) if isinstance(value, int | float) else _kind_of(value)


def _kind_of(value: Any) -> str:
    """Return a value's type for an error, without its text, which may be a secret in the wrong place."""
    return f"a list with {len(value)} entries" if isinstance(value, list) else type(value).__name__


def _of(kind: type, value: Any, where: str, expected: str) -> Any:
    if not isinstance(value, kind):
        raise ConfigError(f"{where}: expected {expected}, got {type(value).__name__}")
    return value
