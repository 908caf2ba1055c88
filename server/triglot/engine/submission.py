"""A call that nobody awaits: what it ends with is told."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from typing import TYPE_CHECKING

from triglot.core.call import Call
from triglot.core.errors import ServingError
from triglot.engine.deadline import WHILE_RUNNING, seen_late
from triglot.engine.queue import Defer
from triglot.engine.work import Execution, Inputs

if TYPE_CHECKING:
    from triglot.engine.admission import Gate
    from triglot.engine.servable import Servable


class Submission(Execution):
    """For `Servable.submit`: until `ended` or `cancel` is called, it holds a lease, and room at the `gate`.

    It saves what a coroutine costs that waits for a future, which is as much as a small model does.
    """

    __slots__ = ("defer", "gate", "over", "servable", "timer")

    def __init__(self, servable: Servable, inputs: Inputs, call: Call, defer: Defer | None = None) -> None:
        super().__init__(inputs, call)
        self.servable = servable
        self.defer = defer
        """See `Schedule.put`."""
        self.gate: Gate | None = None
        self.timer: asyncio.TimerHandle | None = None
        """Of its deadline."""
        self.over = False
        """Whether nobody waits for the outcome any more."""

    @abstractmethod
    def ended(self) -> None:
        """There is a `result`, or an `error`."""

    def settle(self) -> None:
        """See the base class."""
        if self.over:
            return
        self.over = True
        if self.error is not None:
            self.error = seen_late(self.error, self.call, WHILE_RUNNING)
        self.servable.finish(self)
        self.ended()

    def fail(self, error: ServingError) -> None:
        """It is over, whatever the model still does."""
        self.error = error
        self.settle()

    def cancel(self) -> bool:
        """Nobody wants the outcome any more; False when it is over already."""
        if self.over:
            return False
        self.over = True
        self.servable.give_up(self)
        return True
