"""`Holder`, the client behind a credential, with its permissions."""

from __future__ import annotations

from triglot.access.file import Grant
from triglot.access.limits import CallLimits
from triglot.core.operation import Operation, Permission


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
