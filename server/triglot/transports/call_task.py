"""What runs a call: a coroutine that begins at once, rather than with the loop's next turn."""

from __future__ import annotations

import asyncio
from asyncio.tasks import _enter_task, _leave_task  # For tasks of other makes, as Python's documentation says.
from collections.abc import Callable, Coroutine
from contextvars import copy_context
from typing import Any

from triglot.core.own_task import WANTS_TASK


class CallTask:
    """Runs `coro`, which takes its own exceptions, as an `asyncio.Task` does; `ended` is told of its end.

    A call that never waits costs no turn of the loop, and one that waits once, one. Nobody awaits it. It is the
    current task of what it runs, as far as our own code and asyncio's need one: `asyncio.timeout`, `TaskGroup`.
    Where code of users comes, a task of asyncio's goes on with the coroutine (`as_task`).
    """

    __slots__ = (
        "__weakref__",
        "_cancels",
        "_context",
        "_coro",
        "_ended",
        "_loop",
        "_must_cancel",
        "_successor",
        "_waits",
    )

    def __init__(
        self,
        coro: Coroutine[Any, Any, None],
        loop: asyncio.AbstractEventLoop,
        ended: Callable[[CallTask], object],
    ) -> None:
        self._coro: Coroutine[Any, Any, None] | None = coro
        self._loop = loop
        self._ended = ended
        self._context = copy_context()
        self._cancels = 0
        self._must_cancel = False
        self._waits: asyncio.Future[Any] | None = None
        self._successor: asyncio.Task[None] | None = None

    def done(self) -> bool:
        """Whether it has ended."""
        return self._coro is None

    def cancel(self, msg: Any = None) -> bool:
        """Have `CancelledError` raised where it waits; False when it has ended."""
        if self._coro is None:
            return False
        if self._successor is not None:
            return self._successor.cancel(msg)
        self._cancels += 1
        if self._waits is None or not self._waits.cancel(msg):
            self._must_cancel = True
        return True

    def add_done_callback(self, callback: Callable[[CallTask], object]) -> None:
        """Call it when this has ended, which it has not."""
        ended = self._ended

        def both(task: CallTask) -> None:
            ended(task)
            callback(task)

        self._ended = both

    def cancelling(self) -> int:
        """How often it was cancelled, less how often that was taken back."""
        return self._cancels if self._successor is None else self._successor.cancelling()

    def uncancel(self) -> int:
        """Take back one cancellation; how many are left."""
        self._cancels = max(0, self._cancels - 1)
        return self._cancels

    def start(self) -> None:
        """Run until it waits for something, or ends; where a task runs already, once that waits."""
        if asyncio.current_task(self._loop) is None:
            self._context.run(self._step)
        else:
            self._loop.call_soon(self._step, context=self._context)

    def _step(self, _: asyncio.Future[Any] | None = None) -> None:
        coro, loop, self._waits = self._coro, self._loop, None
        if coro is None:
            return
        _enter_task(loop, self)  # type: ignore[arg-type]  # It asks for no Task; the stubs do.
        try:
            if self._must_cancel:
                self._must_cancel = False
                waits_for = coro.throw(asyncio.CancelledError())
            else:
                waits_for = coro.send(None)
        except StopIteration:
            self._end()
        except asyncio.CancelledError:  # Before it has begun.
            self._end()
        except BaseException:  # An exit of the interpreter's: all others are its own.
            self._end()
            raise
        else:
            self._wait(waits_for)
        finally:
            _leave_task(loop, self)  # type: ignore[arg-type]  # As above.

    def _wait(self, waits_for: Any) -> None:
        if waits_for is None:  # asyncio.sleep(0)
            self._loop.call_soon(self._step, context=self._context)
            return
        if waits_for is WANTS_TASK:
            self._hand_over()
            return
        waits_for._asyncio_future_blocking = False
        waits_for.add_done_callback(self._step, context=self._context)
        self._waits = waits_for
        if self._must_cancel and waits_for.cancel():
            self._must_cancel = False

    def _hand_over(self) -> None:
        assert self._coro is not None
        task = self._successor = self._loop.create_task(self._coro, context=self._context)
        for _ in range(self._cancels):
            task.cancel()
        task.add_done_callback(self._end)

    def _end(self, _: asyncio.Task[None] | None = None) -> None:
        self._coro = self._successor = None
        self._ended(self)
