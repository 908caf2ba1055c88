"""Who may make a call: asked once, before its body is read, by what its row is for.

Strategy: a credential is looked up by its SHA-256 hash, so that how long the look-up takes says nothing of the
secrets. What was found is remembered until the next look at the file, by the header's text: Python's dicts go
by a hash with a secret key of the process's own. What a changed file says goes into the permissions that there
are: whoever holds one, as open streams do, learns of it at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from triglot.access.credentials import CREDENTIAL_FIELDS, Fields, Token, digest, token_of
from triglot.access.file import AccessRules, ClientRule, Grant, read_access
from triglot.access.holder import Holder
from triglot.access.issuers import Issuers
from triglot.access.limits import CallLimits
from triglot.access.restricted import GRPC_PREFIX, Restricted
from triglot.access.tallies import LocalTally, Tallies
from triglot.config.options import Config, ConfigError
from triglot.core.errors import Unauthenticated
from triglot.core.operation import Operation
from triglot.core.permission import EVERYTHING, OperationDenied, Permission

log = logging.getLogger(__name__)

GRPC, REST = "gRPC", "REST"
"""The kinds of doors."""
Key = TypeVar("Key", bytes, str)
MOST_KNOWN = 4096
"""Headers and certificates of clients that are remembered."""
_PUBLIC = Operation.PUBLIC
LOOK_SECONDS = 0.5
"""Between two looks at the file: what it takes away is gone within a second."""
Names = Callable[[], Sequence[str]]
"""Gives the names of the client's certificate; none without one."""


class AccessControl:
    """What the access file and Triton's restricted groups say. On the loop. `tallies`: where clients are counted.

    Raises `ConfigError` for a file, or options, that cannot be what is meant.
    """

    def __init__(self, config: Config, tallies: Tallies = LocalTally) -> None:
        self._config = config
        self._tallies = tallies
        self._restricted = {
            GRPC: Restricted("grpc_restricted_protocol", config.grpc_restricted_protocol, GRPC_PREFIX),
            REST: Restricted("http_restricted_api", config.http_restricted_api),
        }
        self.fields = {
            door: CREDENTIAL_FIELDS | restricted.fields for door, restricted in self._restricted.items()
        }
        """The header fields that `permission` has to see, by kind of door."""
        self._restricts = bool(config.grpc_restricted_protocol or config.http_restricted_api)
        self._file = Path(config.access) if config.access else None
        self._text = b""
        self._rules = AccessRules()
        self._limits: WeakValueDictionary[str, CallLimits] = WeakValueDictionary()
        self._tokens: dict[bytes, Holder] = {}
        self._known: dict[tuple[Any, ...], Permission] = {}
        self._certificates: dict[str, Holder] = {}
        self._issuers = Issuers(self._limits_of)
        self._anonymous = Holder("", Grant(), Grant(), None)
        if self._file is not None:
            self._read(self._file)
            self._apply(self._parsed(self._file))
            for issuer, problem in self._issuers.problems.items():
                raise ConfigError(f"access: {self._file}: issuer.{issuer}.jwks: {problem}")

    def permission(self, operation: Operation, door: str, fields: Fields, certificate: Names) -> Permission:
        """What the call has. `fields`: those of its header that `fields` names, repeated ones as often.

        Raises `Unauthenticated` and `PermissionDenied`, and `Unavailable` as Triton for a restricted group.
        """
        if self._restricts:
            self._restricted[door].check(operation, fields)
        if self._file is None or operation is _PUBLIC:
            return EVERYTHING
        key = (operation, *fields, *certificate()) if self._certificates else (operation, *fields)
        permission = self._known.get(key)
        if permission is None:
            permission = self._find(operation, fields, certificate)
            if len(self._known) < MOST_KNOWN:
                self._known[key] = permission
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
        # The user name of Basic has no ":", which the names of those that an issuer knows have.
        if token.user and token.user != holder.group:
            raise Unauthenticated("the token is unknown")
        return holder

    # --- the file ---

    async def run(self) -> None:
        """Look at the file until cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                self.renew()
            except Exception:  # The next look may find what this one could not: tokens are taken away by it.
                log.exception("cannot look at the access file")

    def renew(self) -> None:
        """Read the file, if it has changed. What is wrong with it is logged once, and the old one holds."""
        if self._file is None:
            return
        self._known.clear()
        self._issuers.renew()
        before = self._text
        try:
            if not self._read(self._file):
                return
            rules = self._parsed(self._file)
            self._apply(rules)
        except ConfigError as error:
            if self._text != before:
                log.warning("the access file changed, but the previous one stays in force: %s", error)
            return
        names = [*(one.name for one in rules.clients), *(one.name for one in rules.issuers)]
        log.info("the new access file is in force, clients and issuers: %s", ", ".join(names))

    def _read(self, file: Path) -> bool:
        """Whether its content is another one now. Raises `ConfigError` where it cannot be read."""
        before = self._text
        try:
            self._text = file.read_bytes()
        except OSError as error:
            self._text = str(error).encode()
            raise ConfigError(f"access: cannot read {file}: {error.strerror}") from None
        return self._text != before

    def _parsed(self, file: Path) -> AccessRules:
        """What the content says. Raises `ConfigError`."""
        rules = read_access(file, self._text)
        _check_secrecy(self._config, rules)
        return rules

    def _apply(self, rules: AccessRules) -> None:
        """Raises `ConfigError`, with everything as it was."""
        self._issuers.apply(rules.issuers, rules.anonymous)
        self._rules = rules
        anonymous = Holder("", rules.anonymous, rules.anonymous, self._limits_of("", rules.anonymous))
        tokens: dict[bytes, Holder] = {}
        certificates: dict[str, Holder] = {}
        for client in rules.clients:
            tokens |= {token: self._made(client) for token in client.tokens}
            certificates |= {name: self._made(client) for name in client.certificates}
        self._anonymous.renew(anonymous)
        self._tokens = _renewed(self._tokens, tokens)
        self._certificates = _renewed(self._certificates, certificates)

    def _made(self, client: ClientRule) -> Holder:
        return Holder(client.name, client, self._rules.anonymous, self._limits_of(client.name, client))

    def _limits_of(self, name: str, grant: Grant) -> CallLimits | None:
        """The same for all credentials of a client, before and after a change of the file."""
        if not grant.rate and not grant.concurrent:
            return None
        limits = self._limits.get(name)
        if limits is None:
            limits = self._limits[name] = CallLimits(name, grant.rate, grant.concurrent, self._tallies(name))
        else:
            limits.change(grant.rate, grant.concurrent)
        return limits


def _renewed(before: Mapping[Key, Holder], after: Mapping[Key, Holder]) -> dict[Key, Holder]:
    """`after`, with the holders of `before` where there are some, which calls refer to."""
    for key, holder in before.items():
        if key not in after:
            holder.withdraw()
    for key, holder in after.items():
        if key in before:
            before[key].renew(holder)
    return {key: before.get(key, holder) for key, holder in after.items()}


def _check_secrecy(config: Config, rules: AccessRules) -> None:
    """Raises `ConfigError` where tokens would be sent as they are for everybody on the way to read."""
    if rules.takes_tokens and not (config.tls_certificate or config.tls_in_front or config.on_loopback):
        raise ConfigError(
            f"access: clients would send their tokens without TLS to {config.host}; set tls_certificate and "
            "tls_key, or tls_in_front if a proxy before the server speaks TLS with them"
        )
    if rules.takes_certificates and not config.tls_client_ca:
        raise ConfigError("access: certificates: set tls_client_ca to the CA that has signed them")


def access_control(config: Config, tallies: Tallies = LocalTally) -> AccessControl | None:
    """None where everybody may do everything. Raises `ConfigError` as `AccessControl`."""
    if config.access or config.grpc_restricted_protocol or config.http_restricted_api:
        return AccessControl(config, tallies)
    return None
