"""`Work`, the interface of what instances run, and `Execution`, a request that runs `infer` once."""

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
"""Maps an exception that a model raised to the error that the client gets."""
Hook = Callable[[Function, Inputs, Call], Any]
"""Calls a model's `infer`, and handles its result."""


def takes_call(infer: Callable[..., Any]) -> bool:
    """Returns whether `infer` takes the call as its second argument, after the inputs.

    A second parameter with a default does not count, unless it is named `call`. Raises `ValueError` if `infer`
    accepts neither one argument nor two.
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
    """Returns the model's `infer` as a function of inputs and call, even if it takes no call.

    Raises as `takes_call`.
    """
    return model.infer if takes_call(model.infer) else _without_call(model.infer)


def _without_call(infer: Callable[[Inputs], Any]) -> Callable[[Inputs, Call], Any]:
    return lambda inputs, _: infer(inputs)


class Work(Protocol):
    """A unit of work, which an instance runs on its thread."""

    @property
    def delivers(self) -> bool:
        """Whether `deliver` has something to do."""

    def run(self, function: Function, explain: Explain) -> None:
        """Run the model's `function`; `explain` maps its errors. On the instance's thread. Raises nothing."""

    def deliver(self) -> None:
        """Report the outcome. On the event loop, after `run`."""


def reason_to_skip(call: Call) -> ServingError | None:
    """Returns the error of a call that was cancelled or expired while it was queued; None for any other call."""
    if not call.cancelled:
        return None
    if call.expired:
        return call.overdue(WHILE_WAITING)
    return Cancelled("the request was cancelled while it waited in the queue")


def explained(what: str, error: BaseException) -> ServingError:
    """Returns the error that a client gets for an exception raised by `what`; a copy for this call alone."""
    try:
        failure = own_copy(as_serving_error(error, what))
    except Exception:  # Raised by the exception class's own code; the caller needs a response nevertheless.
        log.exception("%s failed, and its error cannot be converted", what)
        failure = Internal(f"{what} failed; the server's log has the details")
    # Its frames keep the request's data alive and, if they refer to the error, until the garbage collector runs.
    with suppress(Exception):  # A frozen dataclass refuses the assignment.
        error.__traceback__ = error.__context__ = error.__cause__ = None
    return failure


class Execution(ABC):
    """One call of `infer`; `result` or `failure` is its outcome. Subclasses deliver it, on the event loop, once.

    `queued` is the `time.perf_counter()` instant at which it was queued, or else created. `seconds`: how long it
    ran outside of a batch; negative if it did not. `skip`, `start` and `end` are called where its batch runs: on
    the instance's thread or on the event loop.
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
        """Report the outcome, unless the caller no longer waits. On the event loop."""

    def run(self, function: Function, explain: Explain) -> None:
        """See `Work`: keeps the result or the error. On the instance's thread."""
        call = self.call
        if call.cancelled:
            self.failure = reason_to_skip(call)
            return
        call.times.started(self.queued)
        # Does the same as `RunningFor`, at a third of its cost.
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
        """Returns True if it is not to run in its batch; then `failure` is set."""
        self.failure = reason_to_skip(self.call)
        return self.failure is not None

    def start(self, batch_size: int) -> None:
        """Note that it starts, in a batch of `batch_size` requests."""
        self.call.times.started(self.queued, batch_size)

    def end(self, joining: float = 0.0, splitting: float = 0.0) -> None:
        """Note that it has ended in its batch; see `CallTimes.ended`."""
        self.call.times.ended(joining, splitting)

    def deliver(self) -> None:
        """Count the execution in the statistics, and report the outcome. On the event loop."""
        if self.seconds >= 0.0 and (statistics := self.call.statistics) is not None:
            statistics.executed_alone(self.call.times, self.inputs, self.seconds)
        self.settle()


class AwaitedExecution(Execution):
    """An execution that resolves a `future` with its outcome."""

    __slots__ = ("future",)

    def __init__(self, inputs: Inputs, call: Call, future: asyncio.Future[Any]) -> None:
        super().__init__(inputs, call)
        self.future = future

    @property
    def over(self) -> bool:
        """Whether the outcome was reported, or is no longer needed. On the event loop."""
        return self.future.done()

    def settle(self) -> None:
        """See `Execution`."""
        if self.future.done():
            return
        if self.failure is not None:
            self.future.set_exception(self.failure)
        else:
            self.future.set_result(self.result)
            self.result = None  # The thread may keep this object for longer than the response lives.

    def fail(self, error: ServingError) -> None:
        """End it with an error, even if the model still runs. On the event loop."""
        self.future.set_exception(error)


class InstanceExecution(AwaitedExecution):
    """One of a set of executions, of which each instance runs exactly one.

    Strategy: a thread that has taken one waits until all are taken, so none takes two. `together` is the barrier
    of the set; it is aborted when the set is cancelled.
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
        """Run `hook` once every thread has taken its execution. On the instance's thread."""
        try:
            self._together.wait()
        except threading.BrokenBarrierError:
            self.failure = Cancelled("cancelled before all instances had started")
            return
        super().run(partial(self._hook, function), self._explain)
