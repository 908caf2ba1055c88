"""Dynamic batching of a model inside a DAG of several (grps 6.5); that of a model alone is the server's own.

Strategy: there is no thread of its own. The oldest request that waits leads: its thread asks the server's own
rules until there is a batch, and then runs it for all; whoever is the oldest then leads the next one, and several
batches may run at the same time.
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
from triglot.scheduling.forming import Lane, Rules, Wait, Waiting, form, hurry_of

Run = Callable[[list[Any], list[GrpsContext]], list[Any]]
"""Messages and contexts in, an output for each out."""
Explain = Callable[[BaseException], ServingError]
"""What the callers are told of an exception of the project's code."""
_ANY = "any"
"""All requests can share a batch: to join them is the project's own work."""


def reason_to_skip(call: Call, awaited: str) -> ServingError:
    """Why nobody waits any more for a call that waited for `awaited`."""
    if call.expired:
        return call.overdue(f"while the request waited for {awaited}")
    return Cancelled(f"the request was cancelled while it waited for {awaited}")


class Member:
    """One request of a batch. `called`: it leads, or is in a batch."""

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
        self.place = Waiting(self, 1, _ANY, now, hurry=hurry_of(deadline, now))
        context.on_finish(self.done.set)


class DynamicBatcher:
    """Puts requests that come at about the same time into one batch, at most `max_batch_size` of them."""

    def __init__(self, max_batch_size: int, timeout_us: int, run: Run, explain: Explain) -> None:
        self._rules = Rules(max_batch_size, delay=timeout_us / 1e6)
        self._run = run
        self._explain = explain
        self.counts = BatchCounts()
        self._waiting: list[Waiting] = []
        self._changed = threading.Condition()

    def infer(self, message: Any, context: GrpsContext) -> Any:
        """The request's own output, once its batch has run; None once its final answer is sent.

        Raises a `ServingError` of its own for what the batch raised.
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
            if len(self._waiting) >= self._rules.max_rows or member.place.hurry < inf:
                self._changed.notify()
            return self._waiting[0] is member.place

    def _batch(self) -> tuple[list[Member], str]:
        """The batch of the oldest request, which asks for it, once it is closed, and why it was."""
        with self._changed:
            try:
                while not isinstance(then := self._next(), forming.Run):
                    self._changed.wait(then)
                self._take(len(then.members))
            except BaseException:  # The others go on without it.
                self._take(1)
                raise
        members: list[Member] = [one.work for one in then.members]
        for one in then.members:
            one.work = None  # Who has a place would be in a circle with it.
        return members, then.reason

    def _next(self) -> forming.Run | float:
        """What is executed now, or how many seconds to wait for it."""
        now = time.monotonic()
        then = form([Lane(waiting=self._waiting)], now, self._rules).then
        assert then is not None  # Somebody waits.
        return max(0.0, then.until - now) if isinstance(then, Wait) else then

    def _take(self, count: int) -> None:
        """The oldest ones wait no more, and the next one leads."""
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
                call.times.waited(member.joined)
                call.times.batch_size = len(members)
        contexts = [member.context for member in members]
        with RunningFor(context.call for context in contexts if context.call is not None):
            try:
                outputs = self._run([member.message for member in members], contexts)
                for member, output in zip(members, outputs, strict=True):
                    member.output = output
            except BaseException as error:  # Whatever it is, the others must not wait for ever.
                failure = self._explain(error)
                for member in members:
                    # An exception belongs to one thread: each gets its own.
                    member.error = copy(failure)
