"""`LoopGuard`, which detects models whose `async def` code blocks the event loop.

Strategy: a coroutine may block the loop in any of its steps, from one suspension to the next, so each step is
timed; nothing else tells the call that blocks from the many that only wait.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from math import inf
from time import monotonic, perf_counter
from types import AsyncGeneratorType, CoroutineType
from typing import Any

from triglot.core.statistics import Reading
from triglot.executors.hosted import HostedModel
from triglot.executors.work import Function, function_of
from triglot.model.ensemble import Ensemble
from triglot.model.model import Model, is_async

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""Shortest time between two warnings about a model."""
ADVICE = "move code that computes or blocks to a plain infer (not async def), which runs on other threads"
RAISED_EXIT = "the model raised GeneratorExit"
"""Text of the `RuntimeError` that replaces a `GeneratorExit` of the model's own.

To a calling generator, `GeneratorExit` means that it is being closed.
"""


class LoopGuard:
    """Counts in `held` how often the model `name` blocked the event loop for longer than `limit` seconds.

    On the event loop. `advice` ends the warning in the log; "" for a model without code of its own on the loop,
    which is not timed. `clock` limits the rate of warnings.
    """

    __slots__ = ("_advice", "_clock", "_name", "_quiet_until", "_unsaid", "held", "limit")

    def __init__(self, name: str, advice: str, clock: Callable[[], float] = monotonic) -> None:
        self.limit = inf
        self.held = 0
        self._name = name
        self._advice = advice
        self._clock = clock
        self._quiet_until = -inf
        self._unsaid = 0

    @property
    def watches(self) -> bool:
        """Whether the model's code is timed."""
        return bool(self._advice)

    def watch(self, seconds: float) -> None:
        """Set the limit in seconds; 0: no limit."""
        self.limit = seconds or inf

    def timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what the function returns, and times the call. Raise as the function."""
        began = perf_counter()
        try:
            return function(*arguments)
        except GeneratorExit as error:
            raise RuntimeError(RAISED_EXIT) from error
        finally:
            if (seconds := perf_counter() - began) > self.limit:
                self.saw(seconds)

    def saw(self, seconds: float) -> None:
        """Count, and log, that the loop was blocked for `seconds`, more than `limit`."""
        self.held += 1
        now = self._clock()
        if now < self._quiet_until:
            self._unsaid += 1
            return
        more = f" (and {self._unsaid} more times since the last such warning)" if self._unsaid else ""
        self._quiet_until, self._unsaid = now + QUIET_SECONDS, 0
        log.warning(
            "%s blocked the event loop, and every other call, for %.3f s%s; %s",
            self._name,
            seconds,
            more,
            self._advice,
        )

    def readings(self) -> tuple[Reading, ...]:
        """Return the metric of `held`, unless the model has no code on the loop."""
        about = "Times that the model's code blocked the event loop for longer than loop_lag_warning."
        return (Reading("event_loop_holds", about, self.held, counter=True),) if self.watches else ()


def guard_of(model: Model, name: str) -> LoopGuard:
    """Return a guard for the model; `name` identifies it in the log."""
    # The server's own code runs on the loop for these, not the model's.
    ours = isinstance(model, HostedModel | Ensemble)
    return LoopGuard(name, ADVICE if is_async(model.infer) and not ours else "")


def guarded_function(model: Model, guard: LoopGuard) -> Function:
    """Return the model's `infer` as `function_of` does, timed if it runs on the event loop."""
    function = function_of(model)
    return guarded(function, guard) if guard.watches else function


def guarded_list(model: Model, guard: LoopGuard) -> Callable[..., Any] | None:
    """Return the model's `infer_batch`, timed if it runs on the event loop; None if it has none."""
    infer_batch = model.infer_batch
    if infer_batch is None or not guard.watches:
        return infer_batch
    return guarded(infer_batch, guard) if is_async(infer_batch) else partial(guard.timed, infer_batch)


def guarded(function: Callable[..., Any], guard: LoopGuard) -> Callable[..., Any]:
    """Return the `async def` function, coroutine or asynchronous generator, with its steps timed."""

    def call(*arguments: Any) -> Any:
        begun = function(*arguments)
        # A function that is only marked as a coroutine function may return any awaitable.
        if type(begun) is CoroutineType:
            return _Steps(begun, guard)
        return _Answers(begun, guard) if type(begun) is AsyncGeneratorType else begun

    return call


class _Steps:
    """Awaitable that awaits `work`, and times its steps."""

    __slots__ = ("_guard", "_work")

    def __init__(self, work: Any, guard: LoopGuard) -> None:
        self._work = work
        self._guard = guard

    def __await__(self) -> Generator[Any, Any, Any]:
        work, guard = self._work, self._guard
        go_on, value = work.send, None
        while True:
            began = perf_counter()
            try:
                waits_for = go_on(value)
            except StopIteration as stop:
                return stop.value
            except GeneratorExit as error:  # Raised by the model: closing this object raises it at the `yield`.
                raise RuntimeError(RAISED_EXIT) from error
            finally:
                value = None  # It may be an error, whose traceback refers to this frame.
                if (seconds := perf_counter() - began) > guard.limit:
                    guard.saw(seconds)
            try:
                go_on, value = work.send, (yield waits_for)
            except GeneratorExit:
                work.close()
                raise
            except BaseException as error:
                go_on, value = work.throw, error


class _Answers:
    """Asynchronous iterator over `answers`, a generator whose steps are timed."""

    __slots__ = ("_answers", "_guard")

    def __init__(self, answers: AsyncGeneratorType[Any, Any], guard: LoopGuard) -> None:
        self._answers = answers
        self._guard = guard

    def __aiter__(self) -> _Answers:
        return self

    def __anext__(self) -> Awaitable[Any]:
        return _Steps(self._answers.__anext__(), self._guard)

    def aclose(self) -> Awaitable[None]:
        """Close the generator."""
        return _Steps(self._answers.aclose(), self._guard)
