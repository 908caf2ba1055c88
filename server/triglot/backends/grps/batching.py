"""Dynamic batching of a model inside a DAG of several (grps 6.5); that of a model alone is the server's own.

Strategy: there is no thread of its own. The first request opens a batch and leads it: its thread waits until the
batch is full or the window ends, and then runs it for all. A full batch is closed at once, so the next request
opens another, and several batches may run at the same time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import copy
from typing import Any

from triglot.backends.grps.context import GrpsContext
from triglot.core.batch_counts import BatchCounts
from triglot.core.call import Call
from triglot.core.errors import Cancelled, ServingError

Run = Callable[[list[Any], list[GrpsContext]], list[Any]]
"""Messages and contexts in, an output for each out."""
Explain = Callable[[BaseException], ServingError]
"""What the callers are told of an exception of the project's code."""


def reason_to_skip(call: Call, awaited: str) -> ServingError:
    """Why nobody waits any more for a call that waited for `awaited`."""
    if call.expired:
        return call.overdue(f"while the request waited for {awaited}")
    return Cancelled(f"the caller left while the request waited for {awaited}")


class _Member:
    """One request of a batch."""

    __slots__ = ("context", "done", "error", "joined", "message", "output")

    def __init__(self, message: Any, context: GrpsContext) -> None:
        self.message = message
        self.context = context
        self.output: Any = None
        self.error: ServingError | None = None
        self.done = threading.Event()
        self.joined = time.perf_counter()
        context.on_finish(self.done.set)


class DynamicBatcher:
    """Puts requests that come at about the same time into one batch, at most `max_batch_size` of them."""

    def __init__(self, max_batch_size: int, timeout_us: int, run: Run, explain: Explain) -> None:
        self._max_batch_size = max_batch_size
        self._window = timeout_us / 1e6
        self._run = run
        self._explain = explain
        self.counts = BatchCounts()
        self._open: list[_Member] | None = None
        self._closed = threading.Condition()

    def infer(self, message: Any, context: GrpsContext) -> Any:
        """The request's own output, once its batch has run; None once its final answer is sent.

        Raises a `ServingError` of its own for what the batch raised.
        """
        member = _Member(message, context)
        batch, leads = self._join(member)
        if leads:
            self._wait_until_closed(batch)
            self._execute(batch)
        member.done.wait()
        if member.error is not None:
            raise member.error
        return member.output

    def _join(self, member: _Member) -> tuple[list[_Member], bool]:
        """The batch that the request is in now, and whether it leads it."""
        with self._closed:
            leads = self._open is None
            batch = self._open = [] if self._open is None else self._open
            batch.append(member)
            if len(batch) == self._max_batch_size:
                self._close("full")
                self._closed.notify_all()
            return batch, leads

    def _wait_until_closed(self, batch: list[_Member]) -> None:
        with self._closed:
            self._closed.wait_for(lambda: self._open is not batch, self._window)
            if self._open is batch:
                self._close("delay")

    def _close(self, reason: str) -> None:
        assert self._open is not None
        self.counts.add(reason, len(self._open), len(self._open))
        self._open = None

    def _execute(self, batch: list[_Member]) -> None:
        members = []
        for member in batch:
            call = member.context.call
            if call is not None and call.cancelled:
                member.error = reason_to_skip(call, "its batch")
                member.done.set()
            else:
                members.append(member)
        try:
            if members:
                self._fill(members)
        finally:
            for member in members:
                member.done.set()

    def _fill(self, members: list[_Member]) -> None:
        for member in members:
            if (call := member.context.call) is not None:
                call.waited(member.joined)
                call.batch_size = len(members)
        try:
            outputs = self._run([member.message for member in members], [member.context for member in members])
            for member, output in zip(members, outputs, strict=True):
                member.output = output
        except BaseException as error:  # Whatever it is, the others must not wait for ever.
            failure = self._explain(error)
            for member in members:
                # An exception belongs to one thread: each gets its own.
                member.error = copy(failure)
