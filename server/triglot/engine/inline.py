"""Models that run on the event loop itself: plain functions with `execution` "inline".

A hop to a thread and back costs more than a small model does. For as long as such a model computes nothing else is
served, so it has to be short, and waits for nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from time import perf_counter
from typing import Any, NoReturn

from triglot.core.call import Call
from triglot.core.ensemble import Ensemble
from triglot.core.errors import FailedPrecondition
from triglot.core.model import Model, is_async
from triglot.engine.deadline import WHILE_RUNNING
from triglot.engine.declarations import function_of
from triglot.engine.hosted import HostedModel
from triglot.engine.loop_guard import RAISED_EXIT, LoopGuard, guarded
from triglot.engine.work import Function, Inputs

INLINE = "inline"
ELSEWHERE = "code that computes or waits for long needs execution 'thread' or 'process'"
BLOCKS = "code that computes or waits for long belongs in a plain infer, which has threads of its own"


def _no_reach(_: Call, __: object) -> NoReturn:
    raise FailedPrecondition(
        "execution 'inline': the model calls another one, and nothing could run while it waits for that; expected "
        "execution 'thread', or an async def infer"
    )


def _no_answers_yet(_: Any) -> NoReturn:
    """What `Call.respond` is for it."""
    raise FailedPrecondition(
        "execution 'inline': the model sends an answer before it has ended, and nobody could read that meanwhile; "
        "expected execution 'thread', or an async def infer that yields its answers"
    )


class Inline:
    """Calls such a model."""

    __slots__ = ("_function", "_guard")

    def __init__(self, function: Callable[..., Any], guard: LoopGuard) -> None:
        self._function = function
        self._guard = guard

    def one(self, inputs: Inputs, call: Call) -> Any:
        """The answer to a request by itself. Raises what the model raises, and `DeadlineExceeded`."""
        call.reach = _no_reach
        call.started(perf_counter())
        try:
            answer = self._function(inputs, call)
        except GeneratorExit as error:
            raise RuntimeError(RAISED_EXIT) from error
        finally:
            seconds = call.ended()
            if seconds > self._guard.limit:
                self._guard.saw(seconds)
            if call.statistics is not None:
                call.statistics.executed_alone(call, inputs, seconds)
        if call.deadline is not None and call.expired:
            raise call.overdue(WHILE_RUNNING)
        return answer

    async def run(self, inputs: Inputs, call: Call) -> Any:
        """As an `async def` function is run: of a batch, a stream, or what nobody counts."""
        call.respond = _no_answers_yet
        return self.now(inputs, call)

    def now(self, inputs: Any, call: Any) -> Any:
        """What the model answers: to one call, or to a list of them."""
        for one in call if isinstance(call, list) else (call,):
            one.reach = _no_reach
        return self._guard.timed(self._function, inputs, call)


def runs_inline(model: Model) -> bool:
    """Whether the model is one."""
    return model.execution == INLINE and not is_async(model.infer)


def guard_of(model: Model, name: str) -> LoopGuard:
    """The model's; `name` is what the log calls it."""
    if runs_inline(model):
        return LoopGuard(name, ELSEWHERE)
    # The code of these that runs on the loop is ours.
    ours = isinstance(model, HostedModel | Ensemble)
    return LoopGuard(name, BLOCKS if is_async(model.infer) and not ours else "")


def inline_of(model: Model, guard: LoopGuard) -> Inline | None:
    """What calls the model, if it is one."""
    return Inline(function_of(model), guard) if runs_inline(model) else None


def guarded_function(model: Model, guard: LoopGuard) -> Function:
    """The model's `infer`, which takes the call in any case; `async def`, and timed, of what runs on the loop."""
    function = function_of(model)
    if runs_inline(model):
        return Inline(function, guard).run
    return guarded(function, guard) if guard.watches else function


def guarded_list(model: Model, guard: LoopGuard) -> Callable[..., Any] | None:
    """The model's `infer_batch`, timed where it runs on the loop."""
    infer_batch = model.infer_batch
    if infer_batch is None or not guard.watches:
        return infer_batch
    if runs_inline(model):
        return Inline(infer_batch, guard).now
    return guarded(infer_batch, guard) if is_async(infer_batch) else partial(guard.timed, infer_batch)
