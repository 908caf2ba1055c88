"""One execution of a model that was submitted: it ends by a method call, and nobody has to await it."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import ServingError
from triglot.core.running import Defer
from triglot.executors.deadline import WHILE_RUNNING, WHILE_WAITING, seen_late
from triglot.executors.work import Execution, Inputs
from triglot.scheduling.admission import Gate


class Runner(Protocol):
    """What executions are submitted to. See `Servable`."""

    def finish(self, execution: Any) -> None:
        """It is over: release what it holds."""

    def discard(self, execution: Any) -> bool:
        """Take it out of the queue; False where it is not there."""


class Submission(Execution):
    """For `Servable.submit`. Until it is `over` it holds a lease, unless `leased`, and room at the `gate`.

    It saves what a coroutine costs that waits for a future, which is as much as a small model does.
    """

    __slots__ = ("defer", "error", "expires", "gate", "is_late", "leased", "over", "servable", "task")

    def __init__(self, servable: Runner, inputs: Inputs, call: Call, defer: Defer | None = None) -> None:
        super().__init__(inputs, call)
        self.servable = servable
        self.defer = defer
        """See `Schedule.put`."""
        self.gate: Gate | None = None
        self.expires = 0
        """The tick of its deadline, where a timer waits for it."""
        self.leased = False
        """Whether who submits it holds a lease until then."""
        self.task: asyncio.Task[None] | None = None
        """What runs code on the loop."""
        self.error: ServingError | None = None
        """Of its outcome: when it is over, whoever runs it may go on to fail."""
        self.is_late = False
        """Whether what runs it was cancelled at its deadline."""
        self.over = False
        """Whether it has ended: nothing of it is reported any more."""

    @abstractmethod
    def ended(self) -> None:
        """There is a `result`, or an `error`."""

    @abstractmethod
    def dropped(self) -> None:
        """It was cancelled, and there is no outcome."""

    def settle(self) -> None:
        """See the base class."""
        if self.over:
            return
        failure, self.failure = self.failure, None  # Its frames may come to have this.
        self._end(failure and seen_late(failure, self.call, WHILE_RUNNING))

    def fail(self, error: ServingError) -> None:
        """It is over, whatever the model still does."""
        if not self.over:
            self._end(error)

    def _end(self, error: ServingError | None) -> None:
        self.over = True
        self.error = error
        self.servable.finish(self)
        self.ended()

    def expire(self) -> None:
        """End it at its deadline, wherever it is then; code on the loop is cancelled, and waited for."""
        if self.over:
            return
        if self.task is not None:
            self.is_late = True
            self.task.cancel()
        else:
            waits = self.servable.discard(self)
            self.fail(self.call.overdue(WHILE_WAITING if waits else WHILE_RUNNING))

    def drop(self) -> None:
        """It is over, and nobody wants the outcome."""
        if not self.over:
            self.over = True
            self.call.cancel()
            self.servable.finish(self)
            self.dropped()

    def task_ended(self, _: object) -> None:
        """What runs it has ended; where there is no outcome, it was cancelled."""
        self.drop()

    def cancel(self) -> None:
        """Nobody wants the outcome any more. Code on the loop is waited for, code on a thread is not."""
        if self.over:
            return
        if self.task is not None:
            self.task.cancel()
            return
        self.servable.discard(self)
        self.drop()


class AwaitedSubmission(Submission):
    """One whose outcome becomes that of a `future`, for who holds a lease."""

    __slots__ = ("future",)

    def __init__(self, servable: Runner, inputs: Inputs, call: Call, future: asyncio.Future[Any]) -> None:
        super().__init__(servable, inputs, call)
        self.leased = True
        self.future = future

    def ended(self) -> None:
        """See the base class."""
        if self.future.done():
            return
        if self.error is not None:
            self.future.set_exception(self.error)
        else:
            self.future.set_result(self.result)
            self.result = None  # The thread may hold this for longer than the answer lives.

    def dropped(self) -> None:
        """See the base class."""
