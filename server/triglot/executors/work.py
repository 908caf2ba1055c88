"""What waits in a servable's queue: executions."""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.current_calls import CURRENT_CALLS
from triglot.core.errors import Cancelled, Internal, ServingError, as_serving_error, own_copy
from triglot.core.tensor import Array
from triglot.executors.deadline import WHILE_WAITING
from triglot.model.model import Model

log = logging.getLogger(__name__)

Inputs = Mapping[str, Array]
Function = Callable[[Inputs, Call], Any]
"""A model's `infer`."""
Explain = Callable[[BaseException], ServingError]
"""What the client is told of an exception of the model's."""
Hook = Callable[[Function, Inputs, Call], Any]
"""Calls a model's `infer` and sees to what it answers."""


def takes_call(infer: Callable[..., Any]) -> bool:
    """Whether `infer` wants the call after the inputs.

    Raises `ValueError` when it can be called neither way. A second parameter with a default is the model's own
    unless it is named `call`.
    """
    signature = inspect.signature(infer)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        return True
    for arguments in (1, 2):
        try:
            signature.bind(*range(arguments))
        except TypeError:
            continue
        return arguments == 2 or list(signature.parameters)[1:2] == ["call"]
    raise ValueError(f"infer: expected infer(self, inputs) or infer(self, inputs, call), got infer{signature}")


def function_of(model: Model) -> Function:
    """The model's `infer`, which takes the call in any case. Raises as `takes_call`."""
    return model.infer if takes_call(model.infer) else _without_call(model.infer)


def _without_call(infer: Callable[[Inputs], Any]) -> Callable[[Inputs, Call], Any]:
    return lambda inputs, _: infer(inputs)


class Work(Protocol):
    """What an instance runs in one go."""

    @property
    def delivers(self) -> bool:
        """Whether `deliver` has something to do."""

    def run(self, function: Function, explain: Explain) -> None:
        """On the instance's thread. Raises nothing."""

    def deliver(self) -> None:
        """On the loop, after `run`."""


def reason_to_skip(call: Call) -> ServingError | None:
    """Why nobody waits for this call any more, if so."""
    if not call.cancelled:
        return None
    if call.expired:
        return call.overdue(WHILE_WAITING)
    return Cancelled("the request was cancelled while it waited in the queue")


def explained(what: str, error: BaseException) -> ServingError:
    """What the client of one call is told of an exception of `what`: an error that nobody else has."""
    try:
        failure = own_copy(as_serving_error(error, what))
    except Exception:  # Of the code that an exception's class has of its own; the caller waits for an answer.
        log.exception("%s failed, and its error cannot be converted", what)
        failure = Internal(f"{what} failed; the server's log has the details")
    # Its frames hold the request's data and, where they hold it, too, live until the garbage collector comes by.
    with suppress(Exception):  # A frozen dataclass keeps them.
        error.__traceback__ = error.__context__ = error.__cause__ = None
    return failure


class Execution(ABC):
    """One call of `infer`. `seconds`: how long it has run by itself; below 0: it has not.

    What becomes of its outcome, which comes to the loop at most once, is its class's matter.
    """

    __slots__ = ("call", "failure", "inputs", "queued", "result", "seconds")
    delivers = True

    def __init__(self, inputs: Inputs, call: Call) -> None:
        self.inputs = inputs
        self.call = call
        self.queued = time.perf_counter()
        self.seconds = -1.0
        self.result: Any = None
        self.failure: ServingError | None = None

    @abstractmethod
    def settle(self) -> None:
        """On the loop: the outcome is there, if anybody waits for it still."""

    def run(self, function: Function, explain: Explain) -> None:
        """On the instance's thread: keep the result or the error."""
        call = self.call
        if call.cancelled:
            self.failure = reason_to_skip(call)
            return
        call.times.started(self.queued)
        # As `RunningFor` does, at a third of its cost.
        current = [call]
        token = CURRENT_CALLS.set(current)
        try:
            self.result = function(self.inputs, call)
        except BaseException as error:  # A model that calls exit() fails this call, not the server.
            self.failure = explain(error)
        finally:
            current.clear()
            CURRENT_CALLS.reset(token)
        self.seconds = call.times.ended()

    def skip(self) -> bool:
        """On the thread of a batch: whether it is not to run; then it has its failure."""
        self.failure = reason_to_skip(self.call)
        return self.failure is not None

    def start(self, batch_size: int) -> None:
        """On the thread of a batch: it runs, with so many requests in all."""
        self.call.times.started(self.queued, batch_size)

    def end(self, joining: float = 0.0, splitting: float = 0.0) -> None:
        """On the thread of a batch: it has run; see `Call.ended`."""
        self.call.times.ended(joining, splitting)

    def deliver(self) -> None:
        """On the loop."""
        if self.seconds >= 0.0 and (statistics := self.call.statistics) is not None:
            statistics.executed_alone(self.call.times, self.inputs, self.seconds)
        self.settle()


class AwaitedExecution(Execution):
    """One whose outcome becomes that of a `future`."""

    __slots__ = ("future",)

    def __init__(self, inputs: Inputs, call: Call, future: asyncio.Future[Any]) -> None:
        super().__init__(inputs, call)
        self.future = future

    @property
    def over(self) -> bool:
        """Whether nobody waits for the outcome any more. On the loop."""
        return self.future.done()

    def settle(self) -> None:
        """See the base class."""
        if self.future.done():
            return
        if self.failure is not None:
            self.future.set_exception(self.failure)
        else:
            self.future.set_result(self.result)
            self.result = None  # The thread may hold this for longer than the answer lives.

    def fail(self, error: ServingError) -> None:
        """On the loop: it is over, whatever the model still does."""
        self.future.set_exception(error)


class InstanceExecution(AwaitedExecution):
    """One of as many executions as there are instances; each instance runs exactly one of them.

    Strategy: whoever has taken one waits until all are taken, so nobody takes two. `together` counts them, and is
    aborted when they are given up.
    """

    __slots__ = ("_explain", "_hook", "_together")

    def __init__(
        self,
        inputs: Inputs,
        future: asyncio.Future[Any],
        together: threading.Barrier,
        hook: Hook,
        explain: Explain,
    ) -> None:
        super().__init__(inputs, Call(), future)
        self._together = together
        self._hook = hook
        self._explain = explain

    def run(self, function: Function, explain: Explain) -> None:
        """On the instance's thread."""
        try:
            self._together.wait()
        except threading.BrokenBarrierError:
            self.failure = Cancelled("cancelled before all instances had started")
            return
        super().run(partial(self._hook, function), self._explain)
