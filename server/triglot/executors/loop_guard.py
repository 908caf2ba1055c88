"""Names the models whose code, on the event loop, keeps it from everything else.

Strategy: code that awaits may hold the loop in any of its steps, from one await to the next, so each step is
timed; nothing else tells one of many calls that wait from the one that blocks.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Generator
from functools import partial
from math import inf
from time import monotonic, perf_counter
from types import AsyncGeneratorType, CoroutineType
from typing import Any

from triglot.core.readings import Reading
from triglot.executors.hosted import HostedModel
from triglot.executors.work import Function, function_of
from triglot.model.ensemble import Ensemble
from triglot.model.model import Model, is_async

log = logging.getLogger(__name__)

QUIET_SECONDS = 60.0
"""From one line in the log about a model to the next."""
ADVICE = "move code that computes or blocks to a plain infer (not async def), which runs on other threads"
RAISED_EXIT = "the model raised GeneratorExit"
"""What its GeneratorExit becomes: to callers, one means that they are closed."""


class LoopGuard:
    """Counts how often the model called `name` held the loop for longer than `limit` seconds. On the loop.

    `advice` is for the log: what to do about it; "" of a model that has no code of its own there.
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
        """Whether it is to be asked."""
        return bool(self._advice)

    def watch(self, seconds: float) -> None:
        """This is the limit from now on; 0: there is none."""
        self.limit = seconds or inf

    def timed(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """What the function gives or raises."""
        began = perf_counter()
        try:
            return function(*arguments)
        except GeneratorExit as error:
            raise RuntimeError(RAISED_EXIT) from error
        finally:
            if (seconds := perf_counter() - began) > self.limit:
                self.saw(seconds)

    def saw(self, seconds: float) -> None:
        """It has held the loop for so long, and that is longer than `limit`."""
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
        """How often that was."""
        about = "Times that the model's code blocked the event loop for longer than loop_lag_warning."
        return (Reading("event_loop_holds", about, self.held, counter=True),) if self.watches else ()


def guard_of(model: Model, name: str) -> LoopGuard:
    """The model's; `name` is what the log calls it."""
    # The code of these that runs on the loop is ours.
    ours = isinstance(model, HostedModel | Ensemble)
    return LoopGuard(name, ADVICE if is_async(model.infer) and not ours else "")


def guarded_function(model: Model, guard: LoopGuard) -> Function:
    """The model's `infer`, which takes the call in any case, timed where it runs on the loop."""
    function = function_of(model)
    return guarded(function, guard) if guard.watches else function


def guarded_list(model: Model, guard: LoopGuard) -> Callable[..., Any] | None:
    """The model's `infer_batch`, timed where it runs on the loop."""
    infer_batch = model.infer_batch
    if infer_batch is None or not guard.watches:
        return infer_batch
    return guarded(infer_batch, guard) if is_async(infer_batch) else partial(guard.timed, infer_batch)


def guarded(function: Callable[..., Any], guard: LoopGuard) -> Callable[..., Any]:
    """The `async def` function, coroutine or generator, with its steps timed."""

    def call(*arguments: Any) -> Any:
        begun = function(*arguments)
        # What only says that it is `async def` may return any awaitable.
        if type(begun) is CoroutineType:
            return _Steps(begun, guard)
        return _Answers(begun, guard) if type(begun) is AsyncGeneratorType else begun

    return call


class _Steps:
    """An awaitable that is `work`, whose steps are timed."""

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
            except GeneratorExit as error:  # The model's own: one that closes this never gets here.
                raise RuntimeError(RAISED_EXIT) from error
            finally:
                value = None  # An error, whose traceback has this frame.
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
    """An asynchronous generator that is `answers`, each step timed."""

    __slots__ = ("_answers", "_guard")

    def __init__(self, answers: AsyncGeneratorType[Any, Any], guard: LoopGuard) -> None:
        self._answers = answers
        self._guard = guard

    def __aiter__(self) -> _Answers:
        return self

    def __anext__(self) -> Awaitable[Any]:
        return _Steps(self._answers.__anext__(), self._guard)

    def aclose(self) -> Awaitable[None]:
        """As of a generator."""
        return _Steps(self._answers.aclose(), self._guard)
