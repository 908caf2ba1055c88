"""Access control: decides once per call, before its body is read, by the row's operation.

Strategy: a credential is looked up by its SHA-256 hash, so that the time of a look-up discloses nothing about the
secrets. Results are cached until the next check of the file, by the header's text: Python's dicts use a hash with
a secret key of the process. A changed file updates the existing permissions: open streams, which hold them, are
affected at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path
from sys import getsizeof
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from triglot.access.credentials import CREDENTIAL_FIELDS, Token, digest, token_of
from triglot.access.file import AccessRules, ClientRule, Grant, read_access
from triglot.access.holder import CallLimits, Holder
from triglot.access.issuers import Issuers
from triglot.access.restricted import GRPC_PREFIX, Restricted
from triglot.config.options import Config, ConfigError
from triglot.config.watched_file import CHECK_SECONDS, State, WatchedFile
from triglot.core.errors import Unauthenticated
from triglot.core.operation import (
    EVERYTHING,
    GRPC,
    REST,
    Authorizer,
    Fields,
    Names,
    Operation,
    OperationDenied,
    Permission,
)
from triglot.platform.tallies import LocalTally, Tallies

log = logging.getLogger(__name__)

Key = TypeVar("Key", bytes, str)
MAX_CACHED_BYTES = 1024 * 1024
"""Memory of the cached headers and certificates of clients, until the next check of the file."""
CACHED_BYTES = 512
"""Memory of a cached permission besides the texts of its key."""
_PUBLIC = Operation.PUBLIC


class AccessControl(Authorizer):
    """The rules of the access file and of Triton's restricted groups. On the event loop.

    `tallies` makes the counters of clients' calls. `known`: the access file as the supervisor knows it. Raises
    `ConfigError` for an invalid file, or invalid options.
    """

    def __init__(self, config: Config, tallies: Tallies = LocalTally, known: State | None = None) -> None:
        self._config = config
        self._tallies = tallies
        self._restricted = {
            GRPC: Restricted("grpc_restricted_protocol", config.grpc_restricted_protocol, GRPC_PREFIX),
            REST: Restricted("http_restricted_api", config.http_restricted_api),
        }
        self.fields = {
            transport: CREDENTIAL_FIELDS | restricted.fields for transport, restricted in self._restricted.items()
        }
        self._restricts = bool(config.grpc_restricted_protocol or config.http_restricted_api)
        self._file = WatchedFile(Path(config.access), known) if config.access else None
        self._problem = ""
        self._rules = AccessRules()
        self._limits: WeakValueDictionary[str, CallLimits] = WeakValueDictionary()
        self._tokens: dict[bytes, Holder] = {}
        self._cached: dict[tuple[Any, ...], Permission] = {}
        self._cached_bytes = 0
        self._certificates: dict[str, Holder] = {}
        self._issuers = Issuers(self._limits_of)
        self._anonymous = Holder("", Grant(), Grant(), None)
        if self._file is not None:
            self._apply(self._parsed(self._file))
            for issuer, problem in self._issuers.problems.items():
                raise ConfigError(f"access: {config.access}: issuer.{issuer}.jwks: {problem}")

    def permission(self, operation: Operation, transport: str, fields: Fields, certificate: Names) -> Permission:
        """See `Authorizer`."""
        if self._restricts:
            self._restricted[transport].check(operation, fields)
        if self._file is None or operation is _PUBLIC:
            return EVERYTHING
        key = (operation, *fields, *certificate()) if self._certificates else (operation, *fields)
        permission = self._cached.get(key)
        if permission is None:
            permission = self._find(operation, fields, certificate)
            texts = *(text for field in fields for text in field), *certificate()
            size = self._cached_bytes + CACHED_BYTES + sum(map(getsizeof, texts))
            if size <= MAX_CACHED_BYTES:
                self._cached[key], self._cached_bytes = permission, size
        return permission

    def _find(self, operation: Operation, fields: Fields, certificate: Names) -> Permission:
        holder = self._holder(fields, certificate)
        permission = holder.permission(operation)
        if permission is not None:
            return permission
        if holder is self._anonymous:
            raise Unauthenticated(
                f"{operation.value} needs credentials: a token in 'authorization: Bearer TOKEN' or 'x-api-key', "
                "or a client certificate that the access file names"
            )
        raise OperationDenied(operation, holder.name, holder.group)

    def _holder(self, fields: Fields, certificate: Names) -> Holder:
        if fields and self._rules.takes_tokens and (token := token_of(fields)) is not None:
            return self._of_token(token)
        if self._certificates:
            for name in certificate():
                if (holder := self._certificates.get(name)) is not None:
                    return holder
        return self._anonymous

    def _of_token(self, token: Token) -> Holder:
        key = digest(token.text)
        holder = self._tokens.get(key) or self._issuers.holder(token.text, key)
        # Basic's user name, which has no ":", is the client's name; for issuers' clients, the issuer's.
        if token.user and token.user != holder.group:
            raise Unauthenticated("the token is unknown")
        return holder

    # --- the file ---

    async def run(self) -> None:
        """Check the file periodically; see `Authorizer`."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            try:
                self.renew()
            except Exception:  # The next check may succeed: revoking tokens depends on it.
                log.exception("cannot look at the access file")

    def renew(self) -> None:
        """Apply the file if it was replaced.

        An error in it is logged once, and the previous rules stay in force.
        """
        if self._file is None:
            return
        self._cached.clear()
        self._cached_bytes = 0
        self._issuers.renew()
        before, problem = self._rules.names, ""
        try:
            replaced = self._file.replaced()
            if replaced:
                self._apply(self._parsed(self._file))
        except ConfigError as error:
            problem = str(error)
            if problem != self._problem:
                log.warning("the access file changed, but the previous one stays in force: %s", error)
        else:
            if replaced:
                log.info("the new access file is in force, clients and issuers: %s", ", ".join(self._rules.names))
                if removed := [name for name in before if name not in self._rules.names]:
                    log.warning("the new access file takes all rights from: %s", ", ".join(removed))
        self._problem = problem

    def _parsed(self, file: WatchedFile) -> AccessRules:
        """Return the rules in the content. Raise `ConfigError`."""
        rules = read_access(Path(self._config.access), file.content)
        _check_secrecy(self._config, rules)
        return rules

    def _apply(self, rules: AccessRules) -> None:
        """Apply the rules. Raise `ConfigError`, and then leaves everything unchanged."""
        self._issuers.apply(rules.issuers, rules.anonymous)
        self._rules = rules
        anonymous = Holder("", rules.anonymous, rules.anonymous, self._limits_of("", rules.anonymous))
        tokens: dict[bytes, Holder] = {}
        certificates: dict[str, Holder] = {}
        for client in rules.clients:
            tokens |= {token: self._make_holder(client) for token in client.tokens}
            certificates |= {name: self._make_holder(client) for name in client.certificates}
        self._anonymous.renew(anonymous)
        self._tokens = _renewed(self._tokens, tokens)
        self._certificates = _renewed(self._certificates, certificates)

    def _make_holder(self, client: ClientRule) -> Holder:
        return Holder(client.name, client, self._rules.anonymous, self._limits_of(client.name, client))

    def _limits_of(self, name: str, grant: Grant) -> CallLimits | None:
        """Return a client's limits, which all its credentials share, and which survive changes of the file."""
        if not grant.rate and not grant.concurrent:
            return None
        limits = self._limits.get(name)
        if limits is None:
            limits = self._limits[name] = CallLimits(name, grant.rate, grant.concurrent, self._tallies(name))
        else:
            limits.change(grant.rate, grant.concurrent)
        return limits


def _renewed(before: Mapping[Key, Holder], after: Mapping[Key, Holder]) -> dict[Key, Holder]:
    """Return `after`, but keep the holders of `before`, which calls refer to, and update or withdraw them."""
    for key, holder in before.items():
        if key not in after:
            holder.withdraw()
    for key, holder in after.items():
        if key in before:
            before[key].renew(holder)
    return {key: before.get(key, holder) for key, holder in after.items()}


def _check_secrecy(config: Config, rules: AccessRules) -> None:
    """Raise `ConfigError` if clients would send tokens in clear text, or certificates are not verified."""
    if rules.takes_tokens and not (config.tls_certificate or config.tls_in_front or config.on_loopback):
        raise ConfigError(
            f"access: clients would send their tokens without TLS to {config.host}; set tls_certificate and "
            "tls_key, or tls_in_front if a proxy before the server speaks TLS with them"
        )
    if rules.takes_certificates and not config.tls_client_ca:
        raise ConfigError("access: certificates: set tls_client_ca to the CA that has signed them")
