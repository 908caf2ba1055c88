"""`Holder`, the client behind a credential, with its permissions, and the limits on its calls."""

from __future__ import annotations

from triglot.access.file import Grant
from triglot.core.errors import RETRY_AFTER_SECONDS, QuotaExceeded
from triglot.core.operation import Operation, Permission
from triglot.platform.tallies import Tally

SECOND = 1_000_000_000
"""One second in nanoseconds; an idle client may send the requests of one second at once."""


class CallLimits:
    """`ClientLimits` of one client, for all its credentials. `rate`, `concurrent`: 0 for no limit. On the loop."""

    __slots__ = ("__weakref__", "_concurrent", "_rate", "_tally", "_who")

    def __init__(self, client: str, rate: float, concurrent: int, tally: Tally) -> None:
        self._who = f"client '{client}'" if client else "clients without credentials"
        self._rate, self._concurrent = rate, concurrent
        self._tally = tally

    def change(self, rate: float, concurrent: int) -> None:
        """Set the limits of a changed access file."""
        self._rate, self._concurrent = rate, concurrent

    def enter(self) -> None:
        if not self._tally.enter(self._concurrent):
            raise QuotaExceeded(
                f"too many open calls of {self._who}: at most {self._concurrent}",
                retry_after=RETRY_AFTER_SECONDS,
            )
        try:
            self.count()
        except QuotaExceeded:
            self._tally.leave()
            raise

    def count(self) -> None:
        if not self._rate:
            return
        interval = int(SECOND / self._rate)
        early = self._tally.take(interval, max(SECOND, interval))
        if early:
            raise QuotaExceeded(
                f"too many requests of {self._who}: at most {self._rate:g} a second",
                retry_after=early / SECOND,
            )

    def leave(self) -> None:
        self._tally.leave()


class Holder:
    """A credential's client, and what it grants. `name` is for logs, `group` for metrics; see `Permission`."""

    def __init__(
        self, name: str, grant: Grant, anonymous: Grant, limits: CallLimits | None, group: str = ""
    ) -> None:
        self.name = name
        self.group = group or name
        self._grants: tuple[Grant, ...] = (grant, anonymous)
        self._limits = limits
        self._permissions: dict[Operation, Permission] = {}

    def permission(self, operation: Operation) -> Permission | None:
        """Return the permission for an operation, None if it is not granted.

        It covers the client's own models, and those granted to anyone.
        """
        permission = self._permissions.get(operation)
        if permission is None and (permission := self._make_permission(operation)) is not None:
            self._permissions[operation] = permission
        return permission

    def _make_permission(self, operation: Operation) -> Permission | None:
        models = [model for grant in self._grants if operation in grant.operations for model in grant.models]
        if not any(operation in grant.operations for grant in self._grants):
            return None
        return Permission(self.name, tuple(models), self._limits, group=self.group)

    @property
    def has_streams(self) -> bool:
        """Whether streams with its permissions are open."""
        return any(permission.streams for permission in self._permissions.values())

    def renew(self, other: Holder) -> None:
        """Take over the grants of a changed access file."""
        self.name, self.group = other.name, other.group
        self._grants, self._limits = other._grants, other._limits
        for operation, permission in list(self._permissions.items()):
            if (renewed := self._make_permission(operation)) is None:
                del self._permissions[operation]
                permission.withdraw()
            else:
                permission.renew(renewed)

    def withdraw(self) -> None:
        """Revoke everything: the access file no longer lists the credential."""
        self._grants = ()
        self.renew(self)
