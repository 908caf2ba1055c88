"""Found by the processes that a project spawns, where nobody has provided the names of `grps_framework`."""

from triglot.backends.grps.surface import provide_in_child

provide_in_child()
