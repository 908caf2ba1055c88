"""Imported by processes that a project spawns, in which the names of `grps_framework` are not provided yet."""

from triglot.backends.grps.surface import provide_in_child

provide_in_child()
