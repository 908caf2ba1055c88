"""An executor that the test drives by hand: what it was given runs when the test runs it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from triglot.core.errors import queue_full
from triglot.core.running import Defer
from triglot.executors.work import Function


class HeldExecutor:
    """An `Executor`; `started` is what has not been run yet, oldest first."""

    def __init__(self, capacity: int = 1) -> None:
        self.capacity = capacity
        self.started: list[Any] = []
        self.closed = False

    def __len__(self) -> int:
        return len(self.started)

    @property
    def busy(self) -> int:
        """See `Executor`."""
        return min(len(self.started), self.capacity)

    @property
    def alive(self) -> bool:
        """See `Executor`."""
        return not self.closed

    def open(self) -> None:
        """See `Executor`."""

    def check_room(self, limit: int) -> None:
        """See `Executor`."""
        if len(self.started) >= limit:
            raise queue_full(f"{limit} requests are queued")

    def start(self, work: Any, _: Defer | None = None) -> None:
        """See `Executor`."""
        assert not self.closed
        self.started.append(work)

    def discard(self, work: Any) -> bool:
        """See `Executor`."""
        if work not in self.started:
            return False
        self.started.remove(work)
        return True

    async def add(self, count: int, _: Callable[[Function], object]) -> Sequence[BaseException]:
        """See `Executor`."""
        self.capacity += count
        return ()

    async def remove(self, count: int) -> None:
        """See `Executor`."""
        self.capacity -= count

    def close(self) -> None:
        """See `Executor`."""
        self.closed = True

    def join(self) -> None:
        """See `Executor`."""
