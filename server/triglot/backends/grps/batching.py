"""Dynamic batching of a model inside a DAG of several (grps 6.5); a single model uses the server's own batching.

There is no batcher thread. The thread of the oldest queued request leads: it asks the server's own batch rules
until a batch is formed, and then runs it for all members. The next oldest request then leads the next batch;
several batches may run concurrently.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import copy
from math import inf
from typing import Any

from triglot.backends.grps.context import GrpsContext
from triglot.core.batch_counts import BatchCounts
from triglot.core.call import Call
from triglot.core.current_calls import RunningFor
from triglot.core.errors import Cancelled, ServingError
from triglot.scheduling import forming
from triglot.scheduling.forming import Lane, Rules, Wait, Waiting, form, latest_start_of

Run = Callable[[list[Any], list[GrpsContext]], list[Any]]
"""Runs messages with their contexts, and returns one output each."""
Explain = Callable[[BaseException], ServingError]
"""Converts an exception of the project's code to the error for its callers."""
_ANY = "any"
"""The same kind for all requests: combining them is up to the project."""


def reason_to_skip(call: Call, awaited: str) -> ServingError:
    """Returns the error of a call that timed out or was cancelled while it waited for `awaited`."""
    if call.expired:
        return call.overdue(f"while the request waited for {awaited}")
    return Cancelled(f"the request was cancelled while it waited for {awaited}")


class Member:
    """A request in the batcher; its thread waits for these events. `called`: it leads, or is in a batch."""

    __slots__ = ("called", "context", "done", "error", "joined", "message", "output", "place")

    def __init__(self, message: Any, context: GrpsContext) -> None:
        self.message = message
        self.context = context
        self.output: Any = None
        self.error: ServingError | None = None
        self.called = threading.Event()
        self.done = threading.Event()
        self.joined = time.perf_counter()
        now = time.monotonic()
        deadline = None if context.call is None else context.call.deadline
        self.place = Waiting(self, 1, _ANY, now, latest_start=latest_start_of(deadline, now))
        context.on_finish(self.done.set)


class DynamicBatcher:
    """Batches requests that arrive at about the same time, at most `max_batch_size` of them. Thread-safe."""

    def __init__(self, max_batch_size: int, timeout_us: int, run: Run, explain: Explain) -> None:
        self._rules = Rules(max_batch_size, delay=timeout_us / 1e6)
        self._run = run
        self._explain = explain
        self.counts = BatchCounts()
        self._waiting: list[Waiting] = []
        self._changed = threading.Condition()

    def infer(self, message: Any, context: GrpsContext) -> Any:
        """Returns the request's own output once its batch has run; None once its final response is sent.

        Blocks. Raises a separate `ServingError` per request if the batch failed.
        """
        member = Member(message, context)
        if not self._leads(member):
            member.called.wait()
        if not member.place.gone:
            self._execute(*self._batch())
        member.done.wait()
        if member.error is not None:
            raise member.error
        return member.output

    def _leads(self, member: Member) -> bool:
        with self._changed:
            self._waiting.append(member.place)
            if len(self._waiting) >= self._rules.max_rows or member.place.latest_start < inf:
                self._changed.notify()
            return self._waiting[0] is member.place

    def _batch(self) -> tuple[list[Member], str]:
        """Returns the batch that the oldest request leads, once it is closed, and the reason for closing it."""
        with self._changed:
            try:
                while not isinstance(then := self._next(), forming.Run):
                    self._changed.wait(then)
                self._take(len(then.members))
            except BaseException:  # The others continue without this request.
                self._take(1)
                raise
        members: list[Member] = [one.work for one in then.members]
        for one in then.members:
            one.work = None  # Breaks the reference cycle between a member and its place.
        return members, then.reason

    def _next(self) -> forming.Run | float:
        """Returns the batch to execute now, or the seconds to wait."""
        now = time.monotonic()
        then = form([Lane(waiting=self._waiting)], now, self._rules).then
        assert then is not None  # The queue is not empty.
        return max(0.0, then.until - now) if isinstance(then, Wait) else then

    def _take(self, count: int) -> None:
        """Removes the oldest requests from the queue and wakes them up, and the next one to lead."""
        taken, self._waiting = self._waiting[:count], self._waiting[count:]
        for one in taken:
            one.gone = True
        for one in [*taken, *self._waiting[:1]]:
            one.work.called.set()

    def _execute(self, batch: list[Member], reason: str) -> None:
        members = []
        for member in batch:
            call = member.context.call
            if call is not None and call.cancelled:
                member.error = reason_to_skip(call, "its batch")
                member.done.set()
            else:
                members.append(member)
        if not members:
            return
        try:
            with self._changed:
                self.counts.add(reason, len(members), len(members))
            self._fill(members)
        finally:
            for member in members:
                member.done.set()

    def _fill(self, members: list[Member]) -> None:
        for member in members:
            if (call := member.context.call) is not None:
                call.execution_waited(member.joined)
                call.batch_size = len(members)
        contexts = [member.context for member in members]
        with RunningFor(context.call for context in contexts if context.call is not None):
            try:
                outputs = self._run([member.message for member in members], contexts)
                for member, output in zip(members, outputs, strict=True):
                    member.output = output
            except BaseException as error:  # The other threads must not wait forever.
                failure = self._explain(error)
                for member in members:
                    # An exception must not be raised by several threads: each gets a copy.
                    member.error = copy(failure)
