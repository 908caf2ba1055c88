"""Operations, the kinds of calls, and permissions: which models a client may use with one of them.

A permission never depends on a path.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from triglot.core.errors import PermissionDenied

MAX_KNOWN_MODELS, MAX_KNOWN_NAME = 128, 128
"""Limits on the covered model names that one permission caches, and on their length in characters."""
ALL_MODELS = ("*",)
WITHDRAWN = "the client's permission was withdrawn"
"""Error text of an open stream that a withdrawn permission ends."""
GRPC, REST = "gRPC", "REST"
"""The kinds of transports, as an `Authorizer` names them."""
Fields = Sequence[tuple[str, str]]
"""Header fields with names in lower case, repeated ones included."""
Names = Callable[[], Sequence[str]]
"""Return the names in the client's certificate, none without one."""
End = Callable[[], object]
Value = TypeVar("Value")


class Operation(enum.Enum):
    """The kind of a row's calls. The value is its name in the access file, logs and errors."""

    __hash__ = object.__hash__  # Members are singletons; Enum's own hash takes ten times as long.

    PUBLIC = "public"
    """The same for every client, and discloses nothing about the server: files of web pages, OPTIONS requests."""
    HEALTH = "health"
    METADATA = "metadata"
    """About the server and its models: protocols, versions, signatures, states."""
    MODEL_CONFIG = "model-config"
    MODEL_INDEX = "model-index"
    STATISTICS = "statistics"
    METRICS = "metrics"
    """Metrics of all models together: the page for Prometheus and the monitor page."""
    SHARED_MEMORY_STATUS = "shared-memory-status"
    TRACE_STATUS = "trace-status"
    LOG_STATUS = "log-status"
    INFER = "infer"
    MODEL_CONTROL = "model-control"
    SHARED_MEMORY = "shared-memory-control"
    TRACE = "trace-settings"
    LOG = "log-settings"
    GRPS_STATE = "grps-state"
    """grps' Online and Offline."""


ADMINISTRATION = frozenset(
    (Operation.MODEL_CONTROL, Operation.SHARED_MEMORY, Operation.TRACE, Operation.LOG, Operation.GRPS_STATE)
)
"""Operations that change the server."""
INSPECTION = frozenset(Operation) - ADMINISTRATION - {Operation.PUBLIC, Operation.HEALTH, Operation.INFER}
"""Operations that only read the server's state."""
TRITON_GROUPS: Mapping[str, frozenset[Operation]] = {
    "health": frozenset((Operation.HEALTH,)),
    "metadata": frozenset((Operation.METADATA,)),
    "inference": frozenset((Operation.INFER,)),
    "shared-memory": frozenset((Operation.SHARED_MEMORY_STATUS, Operation.SHARED_MEMORY)),
    "model-config": frozenset((Operation.MODEL_CONFIG,)),
    "model-repository": frozenset((Operation.MODEL_INDEX, Operation.MODEL_CONTROL)),
    "statistics": frozenset((Operation.STATISTICS,)),
    "trace": frozenset((Operation.TRACE_STATUS, Operation.TRACE)),
    "logging": frozenset((Operation.LOG_STATUS, Operation.LOG)),
}
"""The names of Triton's restricted groups (KServe V2 extensions; `--grpc-restricted-protocol`)."""
_RESTRICTED_TOO = {
    **dict.fromkeys(("metadata", "model-config", "statistics"), Operation.METRICS),
    "model-repository": Operation.GRPS_STATE,
}
"""What Triton's protocol does not have: metrics and the monitor page show what these three groups show."""
RESTRICTED_GROUPS: Mapping[str, frozenset[Operation]] = {
    name: group | ({_RESTRICTED_TOO[name]} if name in _RESTRICTED_TOO else frozenset())
    for name, group in TRITON_GROUPS.items()
}
"""What each of Triton's groups restricts, over all protocols. An operation may be in several."""
OPERATION_NAMES: Mapping[str, frozenset[Operation]] = {
    **{operation.value: frozenset((operation,)) for operation in Operation if operation is not Operation.PUBLIC},
    **TRITON_GROUPS,
    "inspect": INSPECTION,
    "administer": ADMINISTRATION,
}
"""Names that the access file may use, each for one operation or several."""


class ClientLimits(Protocol):
    """Limits on a client's calls, shared by all of its credentials."""

    def enter(self) -> None:
        """Count a call that begins. Raise `QueueFull` with the time after which to retry."""

    def count(self) -> None:
        """Count one more request of an open call as `enter` does, without a `leave` to follow."""

    def leave(self) -> None:
        """Count the end of a call."""


class Permission:
    """What a credential grants for one operation: models, by glob patterns (`fnmatch`).

    `client` is the name for logs, metrics and models, "" if access is not controlled. `group` is the name in
    metrics; for clients that a token names, the issuer's. `limits` is None if there are none. Once `withdrawn`,
    its open streams have been ended, and no call begins.
    """

    __slots__ = ("_known", "_models", "client", "covers_all", "group", "limits", "streams", "withdrawn")

    def __init__(
        self,
        client: str = "",
        models: tuple[str, ...] = ALL_MODELS,
        limits: ClientLimits | None = None,
        *,
        group: str = "",
    ) -> None:
        self.client = client
        self.group = group or client
        self.limits = limits
        self.withdrawn = False
        self._models = models
        self.covers_all = "*" in models
        """Whether all models are covered: responses about all models at once need that."""
        self._known: set[str] = set()
        self.streams: set[End] = set()
        """What ends each of its open streams, once it is withdrawn."""

    def covers(self, model: str) -> bool:
        """Whether this model, which may not exist, is covered."""
        if self.covers_all or model in self._known:
            return True
        covered = any(fnmatchcase(model, pattern) for pattern in self._models)
        if covered and len(model) <= MAX_KNOWN_NAME:  # Nothing that a refused client sent is kept.
            if len(self._known) >= MAX_KNOWN_MODELS:
                self._known.clear()
            self._known.add(model)
        return covered

    def covered(self, of_models: Mapping[str, Value]) -> dict[str, Value]:
        """Return the items of the covered models; the keys are model names."""
        return {model: value for model, value in of_models.items() if self.covers(model)}

    def check_model(self, model: str) -> None:
        """Raise `PermissionDenied` if the model is not covered, whether it exists or not."""
        if not (self.covers_all or self.covers(model)):
            raise PermissionDenied(f"{self.who} may not use model '{model}'")

    def check_all_models(self) -> None:
        """Raise `PermissionDenied` unless all models are covered."""
        if not self.covers_all:
            raise PermissionDenied(f"{self.who} may use some models only, and this is about all of them")

    def enter(self) -> ClientLimits | None:
        """Count a call that begins; return the limits on which to call `leave` at its end. Raise `QueueFull`."""
        if self.limits is not None:
            self.limits.enter()
        return self.limits

    def count(self) -> None:
        """Count one more request of an open call. Raise `QueueFull`."""
        if self.limits is not None:
            self.limits.count()

    @property
    def who(self) -> str:
        """The client's description in error texts."""
        return f"client '{self.client}'" if self.client else "a client without credentials"

    def renew(self, other: Permission) -> None:
        """Take over what the reloaded access file grants."""
        self.client, self.group, self.limits = other.client, other.group, other.limits
        self._models, self.covers_all = other._models, other.covers_all
        self._known.clear()

    def withdraw(self) -> None:
        """Revoke it, since the access file no longer grants it, and end the open streams."""
        self.withdrawn = True
        self._models, self.covers_all = (), False
        self._known.clear()
        for end in list(self.streams):
            end()


class OperationDenied(PermissionDenied):
    """The client may not use this operation; `permission`, which covers nothing, identifies the client."""

    def __init__(self, operation: Operation, client: str, group: str) -> None:
        super().__init__(f"client '{client}' may not use {operation.value}")
        self.permission = Permission(client, (), group=group)


class Authorizer(ABC):
    """Decides which calls clients may make, by the headers of each, before its body is read.

    `fields`: the header fields that `permission` needs, by kind of transport.
    """

    fields: Mapping[str, frozenset[str]]

    @abstractmethod
    def permission(
        self, operation: Operation, transport: str, fields: Fields, certificate: Names, /
    ) -> Permission:
        """Return a call's permission.

        `fields` are its header fields named in `self.fields`, repeated ones included.

        Raise `Unauthenticated` and `PermissionDenied`, and Triton's `Unavailable` for a restricted group.
        """

    @abstractmethod
    async def run(self) -> None:
        """Apply changes of what clients may do, until cancelled."""


EVERYTHING = Permission()
"""Permission of calls that are not checked: the server's and its models' own, and all without an access file."""
