"""An executor: what runs a model's work, and has its outcome delivered on the event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from triglot.core.running import Defer
from triglot.executors.work import Function


class Executor(Protocol):
    """Belongs to the event loop, but for `join`. The work that it takes is that of its class."""

    capacity: int
    """Batches that are worth running at the same time."""

    def __len__(self) -> int:
        """Work that waits."""

    @property
    def busy(self) -> int:
        """How much runs at the moment, at most `capacity`. May be read on any thread."""

    @property
    def alive(self) -> bool:
        """Whether something is there to run the next one."""

    def open(self) -> None:
        """Once, before anything is started: have something there that runs it."""

    def check_room(self, limit: int) -> None:
        """Raises `QueueFull` where as many requests as the limit are there already."""

    def start(self, work: Any, defer: Defer | None = None) -> None:
        """Have it run; `work.deliver` is called on the loop when it has ended. Raises `Unavailable` once closed.

        `defer`: who starts several in a row may say when that is over.
        """

    def discard(self, work: Any) -> bool:
        """Nobody waits for it any more: take it out. False where it has begun, and is cancelled if it can be."""

    async def add(self, count: int, begin: Callable[[Function], object]) -> Sequence[BaseException]:
        """Run so many more at the same time. What comes for that calls `begin` with the model's function first.

        Returns what that raised on those that are gone again; the others are there, even if this is cancelled.
        """

    async def remove(self, count: int) -> None:
        """Run so many fewer at the same time, once those that go have ended what they run."""

    def close(self) -> None:
        """End when what waits has ended; nothing more is started."""

    def join(self) -> None:
        """On another thread, after `close`: block until nothing runs any more."""
