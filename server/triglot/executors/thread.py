"""`ThreadExecutor`, which runs the instances of a model on threads, and the queues between threads and event loop.

Strategy: threads pull work. `deque` is atomic, so neither side takes a lock to put or take; a thread that finds
the queue empty parks on its own `Doorbell` and is woken after the next `start`. Work is either in the deque or
taken, never both, so `discard` can promise that discarded work is not started.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, Generic, TypeVar

from triglot.core.errors import Unavailable, queue_full
from triglot.core.running import Defer
from triglot.executors.executor import Runnable
from triglot.executors.instances import errors_of, when_all_left
from triglot.executors.work import Explain, Function

T = TypeVar("T")

log = logging.getLogger(__name__)

PAUSE_SECONDS: Final = 0.1
"""Pause of a thread that failed to take work from the queue, before it retries: the failure may recur."""


_RING: Final = (1).to_bytes(8, sys.byteorder)


class Doorbell:
    """Event that any thread sets, and one thread waits for, or a loop that watches `file`.

    Both sides release the GIL meanwhile, unlike with `threading`'s locks and `call_soon_threadsafe`: a thread that
    is woken on the same core continues at once, instead of having to wait for the GIL.
    """

    __slots__ = ("_rings", "file")

    def __init__(self) -> None:
        self.file = self._rings = -1
        if hasattr(os, "eventfd"):
            self.file = self._rings = os.eventfd(0, os.EFD_CLOEXEC)
        else:
            self.file, self._rings = os.pipe()

    def ring(self) -> None:
        """Wake the waiting side, or have its next `wait` return at once. On any thread."""
        os.write(self._rings, _RING)

    def wait(self) -> None:
        """Block until it has been rung since the last `wait`."""
        os.read(self.file, len(_RING))

    def close(self) -> None:
        """Close its file descriptors; it must no longer be in use."""
        files, self.file, self._rings = {self.file, self._rings}, -1, -1
        for file in files - {-1}:
            os.close(file)

    def __del__(self) -> None:
        self.close()


class Parking:
    """Set of threads that `wait` until any thread calls `call`; the thread that parked last is woken first.

    No locks are needed, since `deque` is atomic, and each thread waits for its own `Doorbell`.
    """

    __slots__ = ("_mine", "_parked")

    def __init__(self) -> None:
        self._parked: deque[Doorbell] = deque()
        self._mine = threading.local()

    def __len__(self) -> int:
        return len(self._parked)

    def wait(self, unless: Callable[[], object]) -> None:
        """Block until woken, unless `unless()` is true, which is evaluated once no `call` can be missed."""
        try:
            bell: Doorbell = self._mine.bell
        except AttributeError:
            bell = self._mine.bell = Doorbell()
        self._parked.append(bell)
        if unless():
            # Another thread may have removed this bell meanwhile, to ring it; then that ring has to be awaited.
            try:
                self._parked.remove(bell)
            except ValueError:
                pass
            else:
                return
        bell.wait()

    def call(self, most: int) -> None:
        """Wake up to `most` threads."""
        for _ in range(most):
            try:
                self._parked.pop().ring()
            except IndexError:
                return  # No thread is parked (any longer).

    def call_all(self) -> None:
        """Wake all threads that are parked now."""
        bells: list[Doorbell] = []
        with suppress(IndexError):
            while True:
                bells.append(self._parked.pop())
        for bell in bells:  # Only now: a woken thread that parks again is not to be woken twice.
            bell.ring()


class LoopInbox(Generic[T]):
    """Queue from threads to the event loop: `receive` is called on the loop with each item.

    Items of one thread arrive in order. The loop is woken once for all items that are put before it runs: a small
    model finishes a whole burst before the loop gets its turn, and a wake-up per result would cost more than the
    model does.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, receive: Callable[[T], object]) -> None:
        self._loop = loop
        self._receive = receive
        self._items: deque[T] = deque()
        self._woken = False
        self._bell = Doorbell()
        loop.add_reader(self._bell.file, self._answer)

    def put(self, item: T) -> None:
        """Queue an item, and wake the loop if necessary. On any thread."""
        self._items.append(item)
        if not self._woken:
            self._woken = True
            self._bell.ring()

    def _answer(self) -> None:
        self._bell.wait()
        # In this order: an item that is put from here on rings again, and that ring is not consumed by `wait`.
        self._woken = False
        self._hand_over()

    def _hand_over(self) -> None:
        while self._items:
            try:
                while self._items:
                    self._receive(self._items.popleft())
            except Exception:  # The remaining items would otherwise wait for the next `put`.
                log.exception("a result could not be delivered")

    def close(self) -> None:
        """Deliver the remaining items, then release the doorbell; no more items are put. On any thread."""
        try:
            self._loop.call_soon_threadsafe(self._close)
        except RuntimeError:
            self._bell.close()  # The loop is closed: it watches no files.

    def _close(self) -> None:
        self._loop.remove_reader(self._bell.file)
        self._bell.close()
        self._hand_over()  # The last ring may not have been handled yet.


def _anyone() -> bool:
    return True


class ThreadExecutor:
    """An `Executor` with at most `capacity` threads, each of which is started once there is work for it.

    Work that finds no idle thread is queued, first in, first out. Each new thread takes the next of `names`. While
    threads are being removed, each calls `leave` between two works; it ends if that returns True.
    """

    def __init__(
        self,
        names: Iterator[str],
        capacity: int,
        function: Function,
        explain: Explain,
        loop: asyncio.AbstractEventLoop,
        leave: Callable[[], bool] = _anyone,
    ) -> None:
        self.capacity = capacity
        self._names = names
        self._function = function
        self._explain = explain
        self._leave = leave
        self._waiting: deque[Runnable] = deque()
        self._parked = Parking()
        self._waking = False
        self._closed = False
        self._loop = loop
        self._finished: LoopInbox[Runnable] | None = None
        self._threads: list[threading.Thread] = []
        self._unstarted = capacity
        self._leaving: deque[asyncio.Future[None]] = deque()
        self._removals = 0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def idle(self) -> int:
        """Number of threads that wait for work."""
        return len(self._parked)

    @property
    def busy(self) -> int:
        """See `Executor`."""
        return max(0, self.capacity - self._unstarted - self.idle)

    @property
    def alive(self) -> bool:
        """See `Executor`."""
        return any(thread.is_alive() for thread in self._threads)

    def open(self) -> None:
        """See `Executor`. Starts the first thread."""
        self._finished = LoopInbox(self._loop, _deliver)
        self._grow(1)

    def check_room(self, limit: int) -> None:
        """See `Executor`. The limit applies to queued work."""
        if len(self._waiting) >= limit:
            raise queue_full(f"{limit} requests are queued")

    def _grow(self, wanted: int) -> None:
        """Start `wanted` threads, within `capacity`. Only on demand: even a thread that never runs is costly."""
        more = min(wanted, self._unstarted)
        self._unstarted -= more
        for _ in range(more):
            self._start_thread(self._run)

    def _start_thread(self, target: Callable[[], object]) -> None:
        # A daemon: a model that never returns must not keep a stopped server's process alive.
        thread = threading.Thread(target=target, name=next(self._names), daemon=True)
        self._threads.append(thread)
        thread.start()

    def add(self, count: int, begin: Callable[[Function], object]) -> Awaitable[Sequence[BaseException]]:
        """See `Executor`."""
        began: list[asyncio.Future[BaseException | None]] = [self._loop.create_future() for _ in range(count)]
        for instance in began:
            self._start_thread(partial(self._begin, begin, instance))
        return errors_of(began, self)

    def remove(self, count: int) -> Awaitable[None]:
        """See `Executor`. Threads that were never started are removed first, then idle ones."""
        self.capacity -= count
        never_began = min(count, self._unstarted)
        self._unstarted -= never_began
        leaving = [self._loop.create_future() for _ in range(count - never_began)]
        self._leaving.extend(leaving)
        self._removals += 1
        self._parked.call_all()
        return when_all_left(leaving, self._forget_ended)

    def _forget_ended(self) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]

    def start(self, work: Runnable, defer: Defer | None = None) -> None:
        """See `Executor`. `defer` delays waking the threads, once for all work that is started until it runs.

        Raise `Unavailable` once closed.
        """
        if self._closed:
            raise Unavailable("the model was unloaded")
        self._waiting.append(work)
        if defer is None:
            self._wake()
        elif not self._waking:
            self._waking = True
            defer(self._wake)

    def _wake(self) -> None:
        self._waking = False
        waiting, parked = len(self._waiting), len(self._parked)
        self._parked.call(min(waiting, parked))
        if waiting > parked and not self._closed:
            self._grow(waiting - parked)

    def discard(self, work: Runnable) -> bool:
        """See `Executor`."""
        try:
            self._waiting.remove(work)
        except ValueError:
            return False
        return True

    def close(self) -> None:
        """See `Executor`."""
        self._closed = True
        self._parked.call_all()
        while self._leaving:
            _set(self._leaving.popleft(), None)  # All threads end.

    def join(self) -> None:
        """See `Executor`."""
        for thread in self._threads:
            thread.join()
        # They refer to the model, and would keep it alive until the garbage collector runs.
        self._threads.clear()
        if self._finished is not None:
            self._finished.close()

    # --- on the threads ---

    def _begin(self, begin: Callable[[Function], object], began: asyncio.Future[BaseException | None]) -> None:
        try:
            begin(self._function)
        except BaseException as error:
            self._resolve_on_loop(began, error)
        else:
            self._resolve_on_loop(began, None)
            del begin, began
            self._run()

    def _resolve_on_loop(self, future: asyncio.Future[Any], result: BaseException | None) -> None:
        with suppress(RuntimeError):  # The loop is closed: the server has stopped.
            self._loop.call_soon_threadsafe(_set, future, result)

    def _run(self) -> None:
        while True:
            try:
                self._run_all()
            except BaseException:  # Without this thread, queued work would wait forever.
                log.exception("%s: cannot take work from the queue", threading.current_thread().name)
                time.sleep(PAUSE_SECONDS)
            else:
                return

    def _run_all(self) -> None:
        """Run queued work, one after the other, until the executor is closed and the queue empty."""
        finished = self._finished
        assert finished is not None
        while (work := self._take()) is not None:
            try:
                work.run(self._function, self._explain)
            except BaseException:  # Without this thread, later work would wait forever.
                log.exception("%s: unexpected error while running a request", threading.current_thread().name)
            finished.put(work)
            # An idle thread must not keep the caller's arrays alive.
            del work

    def _take(self) -> Runnable | None:
        """Return the oldest work; block while there is none. None: this thread is to end."""
        while True:
            closed = self._closed  # Read first: once closed, nothing is added to the queue.
            removals = self._removals
            if self._leaving and self._should_exit():
                return None
            try:
                return self._waiting.popleft()
            except IndexError:
                if closed:
                    return None
            self._parked.wait(unless=partial(self._has_news, removals))

    def _has_news(self, removals: int) -> bool:
        return bool(self._waiting) or self._closed or removals != self._removals

    def _should_exit(self) -> bool:
        """Whether this thread is to end because threads are being removed."""
        if not self._leave():
            return False
        try:
            self._resolve_on_loop(self._leaving.popleft(), None)
        except IndexError:
            return False  # Enough other threads have ended.
        return True


def _deliver(work: Runnable) -> None:
    work.deliver()


def _set(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():  # The coroutine that awaits it may have been cancelled.
        future.set_result(result)
