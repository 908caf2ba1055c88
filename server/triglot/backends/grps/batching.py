"""Dynamic batching of a model inside a DAG of several (grps 6.5); a single model uses the server's own batching.

There is no batcher thread. The threads of the queued requests wait until one of them takes a batch, by the
server's own rules; it runs the batch for all members. Several batches may run concurrently.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from copy import copy
from typing import Any

from triglot.backends.grps.context import GrpsContext
from triglot.core.call import Call
from triglot.core.current_calls import RunningFor
from triglot.core.errors import Cancelled, ServingError
from triglot.core.statistics import BatchCounts
from triglot.scheduling.forming import Rules, Waiting, latest_start_of
from triglot.scheduling.thread_queue import ThreadQueue

Run = Callable[[list[Any], list[GrpsContext]], list[Any]]
"""Runs messages with their contexts, and returns one output each."""
Explain = Callable[[BaseException], ServingError]
"""Converts an exception of the project's code to the error for its callers."""
_ANY = "any"
"""The same kind for all requests: combining them is up to the project."""


def reason_to_skip(call: Call, awaited: str) -> ServingError:
    """Return the error of a call that timed out or was cancelled while it waited for `awaited`."""
    if call.expired:
        return call.overdue(f"while the request waited for {awaited}")
    return Cancelled(f"the request was cancelled while it waited for {awaited}")


class Member:
    """A request in the batcher; once it is in a batch, its thread waits for `done`."""

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
    """Batches requests that arrive at about the same time, at most `max_batch_size` of them. Thread-safe."""

    def __init__(self, max_batch_size: int, timeout_us: int, run: Run, explain: Explain) -> None:
        self._queue = ThreadQueue(Rules(max_batch_size, delay=timeout_us / 1e6))
        self._run = run
        self._explain = explain
        self.counts = BatchCounts()
        self._counting = threading.Lock()

    def infer(self, message: Any, context: GrpsContext) -> Any:
        """Return the request's own output once its batch has run; None once its final response is sent.

        Blocks. Raise a separate `ServingError` per request if the batch failed.
        """
        member, now = Member(message, context), time.monotonic()
        deadline = None if context.call is None else context.call.deadline
        place = Waiting(member, 1, _ANY, now, latest_start=latest_start_of(deadline, now))
        self._queue.put(place, wakes=False)
        try:
            while (batch := self._queue.take(lambda: place.is_removed)) is not None:
                self._execute([member.work for member in batch.members], batch.reason)
        finally:
            self._queue.discard(place)
        member.done.wait()
        if member.error is not None:
            raise member.error
        return member.output

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
            with self._counting:
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
