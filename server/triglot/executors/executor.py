"""Interfaces of what runs a model's work and delivers its outcome on the event loop, and of the work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

from triglot.core.running import Defer
from triglot.executors.work import Explain, Function


class Runnable(Protocol):
    """What an instance runs: the `Work` of one request, or of several together."""

    __slots__ = ()

    def run(self, function: Function, explain: Explain, /) -> None:
        """Run the model's `function`; `explain` maps its errors. On the instance's thread. Raise nothing."""

    def deliver(self) -> None:
        """Report the outcome. On the event loop, after `run`."""


class Executor(Protocol):
    """Runs the work of one model. Methods are for the event loop, except `busy` and `join`.

    `ThreadExecutor` takes `Work`, `LoopExecutor` takes `LoopWork`.
    """

    capacity: int
    """Number of requests or batches that are worth running at the same time."""

    def __len__(self) -> int:
        """Return the number of queued works."""

    @property
    def busy(self) -> int:
        """Number of works that run now, at most `capacity`. May be read on any thread."""

    @property
    def alive(self) -> bool:
        """Whether it can run the next work."""

    def open(self) -> None:
        """Get ready to run work. Called once, before the first `start`."""

    def check_room(self, limit: int) -> None:
        """Raise `QueueFull` if `limit` requests are queued (or run, on the event loop) already."""

    def start(self, work: Any, defer: Defer | None = None) -> None:
        """Run `work` as soon as possible; `work.deliver` is called on the loop when it has ended.

        With `defer`, a caller that starts several works in a row has them begin together, when `defer` runs its
        function. Raise `Unavailable` once closed.
        """

    def discard(self, work: Any) -> bool:
        """Remove `work`, whose outcome is no longer needed, from the queue.

        Return False if it has started already; then it is cancelled if that is possible.
        """

    def add(self, count: int, begin: Callable[[Function], object]) -> Awaitable[Sequence[BaseException]]:
        """Increase `capacity` by `count`. Each new thread calls `begin` with the model's function before any work.

        Return the errors that `begin` raised on threads that have therefore ended; the other threads remain, even
        if this coroutine is cancelled.
        """

    def remove(self, count: int) -> Awaitable[None]:
        """Reduce `capacity` by `count`; waits until the removed threads have finished their current work."""

    def close(self) -> None:
        """End once all queued work has ended; no more work is started."""

    def join(self) -> None:
        """Block until all work has ended. On another thread, after `close`."""
