"""A schedule: what waits for a model's instances, and which of it an instance gets next."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

from triglot.core.readings import Reading
from triglot.core.running import Defer
from triglot.executors.work import Work


class Schedule(Protocol):
    """`take` belongs to the instances' threads, everything else to the loop.

    Work that was discarded, or whose call is cancelled or expired when it is taken, is never started.
    """

    limit: int
    """Requests that may wait."""

    def __len__(self) -> int:
        """Requests that wait."""

    def put(self, work: Work, defer: Defer | None = None) -> None:
        """Add `work`. Raises `QueueFull`, `InvalidArgument` for what it cannot be, `Unavailable` once closed.

        `defer`: who puts several in a row may say when that is over, in place of the loop's next turn.
        """

    def take(self, instance: int) -> Work | None:
        """What the instance of this number runs next, waiting for it; None once closed and empty."""

    def discard(self, work: Work) -> bool:
        """Take `work` out again, for nobody waits for it; False when an instance has it already."""

    def close(self) -> None:
        """Let the instances finish what waits, and then end."""

    def readings(self) -> Iterator[Reading]:
        """What it counts."""
