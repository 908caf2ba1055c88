"""`Batch`, requests that an instance executes together; each has its own outcome (spec 5.1)."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, Protocol

from triglot.core.call import BatchCall, Call
from triglot.core.current_calls import RunningFor
from triglot.core.errors import Cancelled, Internal, ServingError, own_copy
from triglot.executors.executor import Runnable
from triglot.executors.joining import join, rows_of, split
from triglot.executors.work import Explain, Function, Work

log = logging.getLogger(__name__)


class BatchTimes:
    """Times of one batch. `began` and `end_time` are `time.perf_counter` instants; 0 until they are reached."""

    __slots__ = ("_answered", "_joined", "_span", "began", "end_time")

    def __init__(self) -> None:
        self.began = self._joined = self._answered = self.end_time = 0.0
        self._span: Any = None

    def begin(self, calls: Sequence[Call]) -> None:
        """Note the start of the batch of these calls; begins a span for several, if any of them is sampled."""
        if len(calls) > 1:
            spans = [call.span for call in calls if call.span is not None]
            if spans:
                self._span = spans[0].begin_batch(spans)
        self.began = self._joined = perf_counter()

    def joined(self) -> None:
        """Note that the inputs are joined, and the model starts."""
        self._joined = perf_counter()

    def answered(self) -> None:
        """Note that the model has ended successfully."""
        self._answered = perf_counter()

    def end(self) -> None:
        """Note that every member has its outcome."""
        self.end_time = perf_counter()

    @property
    def joining(self) -> float:
        """Seconds from the start of the batch to the model's start."""
        return self._joined - self.began

    @property
    def splitting(self) -> float:
        """Seconds from the model's end to the end of the batch; 0 if the model failed."""
        return self.end_time - self._answered if self._answered else 0.0

    def count(self, members: Sequence[Work], counts: Sequence[int] = ()) -> None:
        """Count the batch in the statistics, and end its span. On the event loop.

        `members` were executed together; `counts` are the rows of each, if known.
        """
        calls = [member.call for member in members]
        if (span := self._span) is not None:
            self._span = None
            first = calls[0]
            rows = sum(counts) or len(calls)
            span.end(first.model_name, first.model_version, self.began, self.end_time, len(calls), rows)
        # A member may be a warm-up's, without statistics, or have been cancelled in the model's own queue.
        statistics = next((call.statistics for call in calls if call.statistics is not None), None)
        if statistics is None or not any(call.batch_size for call in calls):
            return
        counts = counts or [statistics.rows(member.inputs) for member in members]
        for call, rows in zip(calls, counts, strict=True):
            call.rows += rows
        infer = self.end_time - self.began - self.joining - self.splitting
        statistics.executed(sum(counts), infer, self.joining, self.splitting)


@dataclass(frozen=True, slots=True)
class Joining:
    """How several requests are passed to the model.

    They are concatenated along the batch dim and, if there are `allowed_sizes` (in rows, ascending), padded to the
    next one; or `infer_batch` gets them as a list. `hosted`: see `stacked`.
    """

    allowed_sizes: Sequence[int] = ()
    infer_batch: Callable[..., Any] | None = None
    hosted: bool = False


class Owner(Protocol):
    """Owner of a batch, which calls it on the event loop."""

    def on_end(self, batch: Batch) -> None:
        """Note that the batch has ended. Called once, before `deliver` is called for its members."""

    def deliver(self, work: Work) -> None:
        """Deliver the outcome of one member."""


class Batch(Runnable):
    """Requests that share one call of the model. It runs on a thread, or is `LoopWork`.

    `joinable`: the requests may share a call of the model; otherwise there is one member.

    Strategy: an error fails the members, never the thread. Each member has its own copy, since an error collects
    the frames that it passes.
    """

    __slots__ = (
        "_counts",
        "_joinable",
        "_joining",
        "_members",
        "_owner",
        "_padded",
        "_running",
        "_times",
        "task",
    )

    def __init__(
        self,
        members: Sequence[Work],
        joinable: bool,
        joining: Joining,
        owner: Owner,
    ) -> None:
        self._members = members
        self._joinable = joinable
        self._joining = joining
        self._owner = owner
        self._running: list[Work] = []
        self._counts: list[int] = []  # Rows of each running member.
        self._padded = 0  # Rows of the joined inputs, padding included; 0 if nothing was joined.
        self._times = BatchTimes()
        self.task: asyncio.Task[None] | None = None
        """Task that runs it on the event loop, if any."""

    @property
    def abandoned(self) -> bool:
        """Whether all members are cancelled."""
        return all(member.call.cancelled for member in self._members)

    def run(self, function: Function, explain: Explain) -> None:
        """Execute the members. On the instance's thread. Raise nothing."""
        if self._start():
            with RunningFor(member.call for member in self._running):
                try:
                    self._answer(self._ask(function), explain)
                except BaseException as error:  # A model that calls exit() fails these calls, not the server.
                    self._fail(error, explain)
            self._end()

    async def run_on_loop(self, function: Function, explain: Explain) -> None:
        """See `LoopWork`."""
        if self._start():
            with RunningFor(member.call for member in self._running):
                try:
                    answer = self._ask(function)
                    self._answer(await answer if inspect.isawaitable(answer) else answer, explain)
                except BaseException as error:
                    self._fail(error, explain)
            self._end()

    def _start(self) -> bool:
        self._running = [member for member in self._members if not member.skip()]
        for member in self._running:
            member.start(len(self._running))
        self._times.begin([member.call for member in self._running])
        return bool(self._running)

    def _ask(self, function: Function) -> Any:
        members = self._running
        calls = [member.call for member in members]
        if self._joining.infer_batch is not None:
            return self._joining.infer_batch([member.inputs for member in members], calls)
        if self._joinable:
            self._counts = [rows_of(member.inputs) for member in members]
            rows = sum(self._counts)
            sizes = self._joining.allowed_sizes
            padded = next((size for size in sizes if size >= rows), rows) if sizes else rows
            if padded > rows or len(members) > 1:
                self._padded = padded
                inputs = join([member.inputs for member in members], padded, hosted=self._joining.hosted)
                self._times.joined()
                return function(inputs, calls[0] if len(calls) == 1 else BatchCall(calls))
        return function(members[0].inputs, calls[0])

    def _answer(self, answer: Any, explain: Explain) -> None:
        members = self._running
        self._times.answered()
        if self._joining.infer_batch is not None:
            self._answer_each(answer, explain)
        elif not self._joinable:
            members[0].result = answer
        else:
            try:
                # Even for a single member: otherwise the model's author would see the error only under load.
                parts = split(answer, self._counts, self._padded or sum(self._counts))
            except Internal as error:
                log.error("%s", error.message)
                raise
            for member, part in zip(members, parts, strict=True):
                member.result = part

    def _answer_each(self, answers: Any, explain: Explain) -> None:
        members = self._running
        for member, answer in zip(members, check_answers(answers, len(members)), strict=True):
            if isinstance(answer, BaseException):
                member.failure = own_copy(explain(answer))
            else:
                member.result = answer

    def _fail(self, error: BaseException, explain: Explain) -> None:
        if isinstance(error, asyncio.CancelledError) and self.abandoned:
            failure: ServingError = Cancelled("every request of the batch was cancelled")
        else:
            try:
                failure = explain(error)
            except Exception:
                log.exception("cannot convert a model's error")
                failure = Internal("the model failed; the server's log has the details")
        for member in self._running:
            member.result, member.failure = None, own_copy(failure)

    def _end(self) -> None:
        times = self._times
        times.end()
        for member in self._running:
            member.end(times.joining, times.splitting)

    def deliver(self) -> None:
        """Report the end of the batch, then deliver each outcome. On the event loop."""
        try:
            self._owner.on_end(self)  # First, so that the instance gets its next batch meanwhile.
        finally:
            self._deliver()

    def _deliver(self) -> None:
        times = self._times
        if self._running:
            times.count(self._running, self._counts)
        for member in self._members:
            if not times.began:
                member.refuse(Cancelled("the batch was cancelled before it began"))
            self._owner.deliver(member)


def check_answers(answers: Any, count: int) -> Sequence[Any]:
    """Return the result of `infer_batch`, if it is a list with one item for each of `count` requests.

    Raise, and logs, `Internal` for anything else.
    """
    if isinstance(answers, Sequence) and len(answers) == count:
        return answers
    got = f"{len(answers)}" if isinstance(answers, Sequence) else type(answers).__name__
    error = Internal(f"infer_batch returned {got}, expected a list of {count} results, one per request")
    log.error("%s", error.message)
    raise error
