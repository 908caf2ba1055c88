"""What one client may do with one kind of operation, as the checks on a call's way need it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Protocol, TypeVar

from triglot.core.errors import PermissionDenied
from triglot.core.operation import Operation

MOST_KNOWN_MODELS = 1024
"""Names of models that were matched, and are remembered."""
ALL_MODELS = ("*",)
WITHDRAWN = "the client's permission was withdrawn"
"""What an open stream is told that ends for it."""
End = Callable[[], object]
Value = TypeVar("Value")


class ClientLimits(Protocol):
    """How many calls a client may make: all of its credentials share them."""

    def enter(self) -> None:
        """One more call begins. Raises `QueueFull`, which says when to come again."""

    def count(self) -> None:
        """As `enter`, for one more request of an open call, which nobody has to `leave`."""

    def leave(self) -> None:
        """A call has ended."""


class Permission:
    """What a credential gives for one operation: the models, by patterns as those of file names.

    `client` is the name for logs, metrics and models: "" where nobody is asked. `group`: the name that metrics
    use, the issuer's of those that a token names. `limits`: None without any. Once it is `withdrawn`, open streams
    have been ended, and no call begins.
    """

    __slots__ = ("_known", "_models", "_streams", "client", "covers_all", "group", "limits", "withdrawn")

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
        """Whether it is for every model: what shows all of them at once is for no other client."""
        self._known: dict[str, bool] = {}
        self._streams: set[End] = set()

    def covers(self, model: str) -> bool:
        """Whether it is for this model, which may not exist."""
        if self.covers_all:
            return True
        known = self._known.get(model)
        if known is None:
            if len(self._known) >= MOST_KNOWN_MODELS:
                self._known.clear()
            known = self._known[model] = any(fnmatchcase(model, pattern) for pattern in self._models)
        return known

    def covered(self, of_models: Mapping[str, Value]) -> dict[str, Value]:
        """Of what is said of models, by their names, that of those which it is for."""
        return {model: value for model, value in of_models.items() if self.covers(model)}

    def check_model(self, model: str) -> None:
        """Raises `PermissionDenied`, whether there is such a model or not."""
        if not (self.covers_all or self.covers(model)):
            raise PermissionDenied(f"{self.who} may not use model '{model}'")

    def check_all_models(self) -> None:
        """Raises `PermissionDenied` unless it is for every model."""
        if not self.covers_all:
            raise PermissionDenied(f"{self.who} may use some models only, and this is about all of them")

    def enter(self) -> ClientLimits | None:
        """One more call begins; who is to be told when it has ended. Raises `QueueFull`."""
        if self.limits is not None:
            self.limits.enter()
        return self.limits

    def count(self) -> None:
        """One more request of an open call. Raises `QueueFull`."""
        if self.limits is not None:
            self.limits.count()

    @property
    def who(self) -> str:
        """The client, for errors."""
        return f"client '{self.client}'" if self.client else "a client without credentials"

    def renew(self, other: Permission) -> None:
        """What the file says now."""
        self.client, self.group, self.limits = other.client, other.group, other.limits
        self._models, self.covers_all = other._models, other.covers_all
        self._known.clear()

    def withdraw(self) -> None:
        """The file does not give it any more: end the open streams."""
        self.withdrawn = True
        self._models, self.covers_all = (), False
        self._known.clear()
        for end in list(self._streams):
            end()

    @property
    def is_followed(self) -> bool:
        """Whether there are open streams."""
        return bool(self._streams)

    def follow(self, end: End) -> None:
        """Have `end` called when it is withdrawn."""
        self._streams.add(end)

    def unfollow(self, end: End) -> None:
        """Take `follow` back."""
        self._streams.discard(end)


class OperationDenied(PermissionDenied):
    """The client may not make such calls; `permission`, which gives nothing, says who it is."""

    def __init__(self, operation: Operation, client: str, group: str) -> None:
        super().__init__(f"client '{client}' may not use {operation.value}")
        self.permission = Permission(client, (), group=group)


EVERYTHING = Permission()
"""Of calls that nobody checks: those of the server and its models, and all where no file says who may do what."""
