"""Triton's restricted groups: calls that need a header with a shared value (KServe V2, extensions)."""

from __future__ import annotations

import hmac
import re

from triglot.config.option_fields import unknown
from triglot.config.options import ConfigError
from triglot.core.errors import PermissionDenied, RestrictedCall, ServingError
from triglot.core.operation import RESTRICTED_GROUPS, Fields, Operation

GRPC_PREFIX = "triton-grpc-protocol-"
_ENTRY = re.compile(r"([a-z][a-z, -]*):([^=:,\s]+)=([^,\s]+)(?:,|$)")


class Restricted:
    """The restricted groups of one kind of transport, from the option `name`.

    `text` is `GROUP,...:KEY=SECRET`, several separated by commas. `prefix` is put before the key. Raises
    `ConfigError`.
    """

    def __init__(self, name: str, text: str, prefix: str = "") -> None:
        self._is_grpc = bool(prefix)
        self._needed: dict[Operation, list[tuple[str, bytes]]] = {}
        seen: set[str] = set()
        for groups, key, value in _entries(name, text):
            header = prefix + key.lower()
            if self._is_grpc and header.endswith("-bin"):
                raise ConfigError(
                    f"{name}: {key!r} ends in -bin, which gRPC keeps for binary values; use another key"
                )
            for group in groups:
                if group in seen:
                    raise ConfigError(f"{name}: {group} is a duplicate")
                seen.add(group)
                for operation in _operations(name, group):
                    self._needed.setdefault(operation, []).append((header, value.encode()))

    @property
    def fields(self) -> frozenset[str]:
        """The headers that it checks."""
        return frozenset(header for needed in self._needed.values() for header, _ in needed)

    def check(self, operation: Operation, fields: Fields) -> None:
        """Raise Triton's error for a call without a required header, or with a wrong value."""
        for header, value in self._needed.get(operation, ()):
            sent = [field.encode(errors="surrogateescape") for name, field in fields if name == header]
            if len(sent) != 1 or not hmac.compare_digest(sent[0], value):
                raise self._refusal(header)

    def _refusal(self, header: str) -> ServingError:
        if self._is_grpc:
            return RestrictedCall(f"This protocol is restricted, expecting header '{header}'")
        return PermissionDenied(f"This API is restricted, expecting header '{header}'")


def _entries(name: str, text: str) -> list[tuple[list[str], str, str]]:
    entries, at = [], 0
    while at < len(text):
        entry = _ENTRY.match(text, at)
        if entry is None:
            # Without the text, which contains a secret.
            raise ConfigError(f"{name}: expected GROUP,...:KEY=SECRET, with a secret without commas")
        entries.append(([group.strip() for group in entry[1].split(",") if group.strip()], entry[2], entry[3]))
        at = entry.end()
    return entries


def _operations(name: str, group: str) -> frozenset[Operation]:
    if group not in RESTRICTED_GROUPS:
        raise ConfigError(f"{name}: {unknown(group, RESTRICTED_GROUPS, 'group')}")
    return RESTRICTED_GROUPS[group]
