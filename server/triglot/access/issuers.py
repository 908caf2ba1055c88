"""JWTs (RFC 7519) of the access file's issuers.

Strategy: nothing in a token decides how it is verified, except the name of its key: the key comes from the issuer,
and is for one algorithm, as RFC 8725 (3.1) requires. Verified tokens are cached by their hash, like the access
file's own tokens.
"""

from __future__ import annotations

import binascii
import logging
import re
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import time
from typing import Any, TypeGuard

from triglot.access.file import Grant, IssuerRule
from triglot.access.holder import CallLimits, Holder
from triglot.access.jwks import ALGORITHMS, Key, KeyFile, KeySource, KeyUrl
from triglot.config.options import ConfigError
from triglot.core.errors import RETRY_AFTER_SECONDS, Unauthenticated, Unavailable
from triglot.core.fast_json import loads

log = logging.getLogger(__name__)

LEEWAY_SECONDS = 30
"""Tolerated difference between the clocks of an issuer and this machine."""
MAX_VERIFIED = 4096
"""Cached tokens, not counting those with open streams."""
MAX_SUBJECT = 256
_PART = r"([A-Za-z0-9_-]+)"
_JWT = re.compile(rf"({_PART}\.{_PART})\.{_PART}")
LimitsOf = Callable[[str, Grant], CallLimits | None]


@dataclass(slots=True)
class _Verified:
    """A verified token. `values` are those of its groups claim; `end` is `exp` in seconds since the epoch."""

    rule: IssuerRule
    key: Key
    subject: str
    values: frozenset[str]
    end: float
    holder: Holder


class Issuers:
    """The access file's issuers, and their verified tokens. On the event loop.

    `limits_of` returns a client's limits by its name.
    """

    def __init__(self, limits_of: LimitsOf) -> None:
        self._limits_of = limits_of
        self._rules: tuple[IssuerRule, ...] = ()
        self._anonymous = Grant()
        self._sources: dict[tuple[str, ...], KeySource] = {}
        self._keys: list[tuple[Key, ...]] = []
        self._problems: dict[str, str] = {}
        self._verified: OrderedDict[bytes, _Verified] = OrderedDict()

    def holder(self, token: str, digest: bytes) -> Holder:
        """Return the holder of a token; `digest` is its key in the cache.

        Raise `Unauthenticated`, and `Unavailable` while its key may be among those being fetched.
        """
        verified = self._verified.get(digest)
        if verified is None:
            verified = self._verify(token)
            self._keep(digest, verified)
        elif _has_ended(verified.end):
            raise Unauthenticated("the token has expired")
        else:
            self._verified.move_to_end(digest)
        return verified.holder

    def _keep(self, digest: bytes, verified: _Verified) -> None:
        if len(self._verified) >= MAX_VERIFIED:
            unused = (kept for kept, other in self._verified.items() if not other.holder.has_streams)
            if (oldest := next(unused, None)) is not None:
                del self._verified[oldest]
        self._verified[digest] = verified

    # --- one token ---

    def _verify(self, token: str) -> _Verified:
        parts = _JWT.fullmatch(token)
        if parts is None:
            raise Unauthenticated("the token is unknown")
        header, claims = _object(parts[2]), _object(parts[3])
        if "crit" in header:
            raise Unauthenticated("the token's header asks for extensions (crit), and there are none")
        rule = self._rule(claims)
        key = self._key(rule, header)
        if not key.verify(parts[1].encode(), _bytes(parts[4])):
            raise Unauthenticated("the token's signature is wrong")
        end = _check_times(claims)
        subject = claims.get("sub")
        if not isinstance(subject, str) or not 0 < len(subject) <= MAX_SUBJECT or not subject.isprintable():
            raise Unauthenticated(f"the token's sub is not a text of up to {MAX_SUBJECT} printable characters")
        values = frozenset(_texts(claims.get(rule.groups_claim))) if rule.groups_claim else frozenset()
        return _Verified(rule, key, subject, values, end, self._make_holder(rule, subject, values))

    def _rule(self, claims: dict[str, Any]) -> IssuerRule:
        issuer, audiences = claims.get("iss"), _texts(claims.get("aud"))
        for rule in self._rules:
            if rule.issuer == issuer and rule.audience in audiences:
                return rule
        raise Unauthenticated("the token's iss and aud are those of no issuer in the access file")

    def _key(self, rule: IssuerRule, header: dict[str, Any]) -> Key:
        source = self._sources[_source_of(rule)]
        kid, algorithm = header.get("kid"), header.get("alg")
        if algorithm not in ALGORITHMS or not isinstance(kid, str | None):
            raise Unauthenticated(f"the token's alg: expected one of {', '.join(ALGORITHMS)}, and a text as kid")
        of_kid = [key for key in source.keys if kid is None or key.kid == kid]
        keys = [key for key in of_kid if key.algorithm == algorithm]
        if len(keys) == 1:
            return keys[0]
        if keys:
            raise Unauthenticated("the token does not say which of its issuer's keys has signed it (kid)")
        if of_kid and kid is not None:
            raise Unauthenticated("the token's alg is not that of its key")
        if source.request_refresh(kid):
            raise Unavailable(
                f"the token's key is not known yet: those of issuer '{rule.name}' are being fetched",
                retry_after=RETRY_AFTER_SECONDS,
            )
        raise Unauthenticated(f"the token's key is not one of issuer '{rule.name}'")

    def _make_holder(self, rule: IssuerRule, subject: str, values: Iterable[str]) -> Holder:
        operations = rule.operations.union(*(rule.groups[value] for value in values if value in rule.groups))
        grant = Grant(operations=operations, models=rule.models, rate=rule.rate, concurrent=rule.concurrent)
        name = f"{rule.name}:{subject}"
        return Holder(name, grant, self._anonymous, self._limits_of(name, grant), rule.name)

    # --- what changes ---

    def apply(self, rules: tuple[IssuerRule, ...], anonymous: Grant) -> None:
        """Apply the rules of a changed access file. Raise `ConfigError`, and then leaves everything unchanged."""
        if rules:
            _check_installed()
        sources = {_source_of(rule): self._sources.get(_source_of(rule)) or _make_source(rule) for rule in rules}
        self._rules, self._anonymous, self._sources = rules, anonymous, sources
        now = {_identity(rule): rule for rule in rules}
        for digest, verified in list(self._verified.items()):
            rule = now.get(_identity(verified.rule))
            if rule is None:
                del self._verified[digest]
                verified.holder.withdraw()
            else:
                verified.rule = rule
                verified.holder.renew(self._make_holder(rule, verified.subject, verified.values))

    @property
    def problems(self) -> dict[str, str]:
        """Why keys cannot be read, by issuer name."""
        problems = {rule.name: self._sources[_source_of(rule)].problem for rule in self._rules}
        return {name: problem for name, problem in problems.items() if problem}

    def renew(self) -> None:
        """Check for new keys. Does not block."""
        for source in self._sources.values():
            source.renew()
        problems = self.problems
        for name, problem in problems.items():
            if self._problems.get(name) != problem:
                log.warning("issuer.%s.jwks: %s; keys that were read before, if any, stay in force", name, problem)
        self._problems = problems
        keys = [source.keys for source in self._sources.values()]
        if keys != self._keys:
            self._keys = keys
            self._withdraw_without_key()

    def _withdraw_without_key(self) -> None:
        """Withdraw unexpired tokens whose key the issuer has removed, as it may be compromised.

        A key is also removed, without harm, once all tokens signed by it have expired.
        """
        for digest, verified in list(self._verified.items()):
            known = self._sources[_source_of(verified.rule)].keys
            if verified.key not in known and not _has_ended(verified.end):
                del self._verified[digest]
                verified.holder.withdraw()


def _identity(rule: IssuerRule) -> tuple[str, ...]:
    """Return what a verified token depends on."""
    return (rule.name, rule.issuer, rule.audience, rule.groups_claim, *_source_of(rule))


def _source_of(rule: IssuerRule) -> tuple[str, ...]:
    return rule.jwks, rule.jwks_ca, rule.jwks_token_file


def _make_source(rule: IssuerRule) -> KeySource:
    return KeyUrl(*_source_of(rule)) if "://" in rule.jwks else KeyFile(rule.jwks)


def _check_installed() -> None:
    try:
        from jwt.algorithms import has_crypto  # noqa: PLC0415 - only where there is an issuer.
    except ImportError:
        has_crypto = False
    if not has_crypto:
        raise ConfigError("access: issuers need PyJWT and cryptography; run: pip install 'PyJWT[crypto]'")


def _object(part: str) -> dict[str, Any]:
    try:
        value = loads(_bytes(part))
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise Unauthenticated("the token is no valid JWT: expected JSON objects")
    return value


def _bytes(part: str) -> bytes:
    """Decode base64url. Raise `Unauthenticated` for anything but the canonical form (RFC 7515 2)."""
    try:
        value = urlsafe_b64decode(part + "=" * (-len(part) % 4))
    except binascii.Error:
        value = b""
    if urlsafe_b64encode(value).rstrip(b"=") != part.encode():
        raise Unauthenticated("the token is no valid JWT: expected base64url")
    return value


def _check_times(claims: dict[str, Any]) -> float:
    """Return the expiry. Raise `Unauthenticated` if the token is not valid at this time."""
    end, start = claims.get("exp"), claims.get("nbf", 0)
    if not _is_number(end) or not _is_number(start):
        raise Unauthenticated("the token's exp and nbf: expected seconds since 1970, and an exp")
    if _has_ended(end):
        raise Unauthenticated("the token has expired")
    if start > time() + LEEWAY_SECONDS:
        raise Unauthenticated("the token is not valid yet (nbf)")
    return float(end)


def _has_ended(end: float) -> bool:
    return time() >= end + LEEWAY_SECONDS


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _texts(value: Any) -> list[str]:
    """Return the strings of a claim that may be a string or a list."""
    values = value if isinstance(value, list) else [value]
    return [value for value in values if isinstance(value, str)]
