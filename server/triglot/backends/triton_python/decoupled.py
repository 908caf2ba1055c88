"""A decoupled Triton Python model: any number of responses to each request, at any time.

A request is an async generator on the server's loop, which waits for responses from the model's senders. Each
instance has a thread that passes queued requests to `execute`: so each instance runs one `execute` at a time,
while many requests are still open.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Collection, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from triglot.backends.triton_python.answers import Answers
from triglot.backends.triton_python.home import Home
from triglot.backends.triton_python.instance import Instance
from triglot.backends.triton_python.model import Inputs, TritonModel
from triglot.backends.triton_python.names import TritonModules
from triglot.backends.triton_python.sender import Line
from triglot.core.call import Call
from triglot.core.current_calls import RunningFor
from triglot.core.errors import Cancelled, Internal, is_serving_error, own_copy, queue_full
from triglot.core.types import Answer
from triglot.model.config import ModelConfig
from triglot.model.model import kind_in_lists

log = logging.getLogger(__name__)


class _Work:
    """A queued request; `rows` is its batch size, and only requests of the same `kind` are passed together."""

    __slots__ = ("answers", "call", "inputs", "kind", "queued", "rows")

    def __init__(self, inputs: Inputs, call: Call, answers: Answers, rows: int, kind: Hashable) -> None:
        self.inputs = inputs
        self.call = call
        self.answers = answers
        self.rows = rows
        self.kind = kind
        self.queued = time.perf_counter()


class _Waiting:
    """The queue of the instances. At most `most` rows are passed together; 0: one request at a time."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._works: deque[_Work] = deque()
        self._there = threading.Condition()
        self._closed = False
        self._going: set[Instance] = set()

    def __len__(self) -> int:
        return len(self._works)

    def put(self, work: _Work, limit: int) -> None:
        """Queues a request. Raises `QueueFull` if `limit` are queued; 0: no limit."""
        with self._there:
            if limit and len(self._works) >= limit:
                raise queue_full(f"{limit} requests are queued, the most that max_queue_size allows")
            self._works.append(work)
            self._there.notify()

    def discard(self, work: _Work) -> None:
        with self._there:
            if work in self._works:
                self._works.remove(work)

    def take(self, instance: Instance) -> list[_Work]:
        """Returns the next requests for this instance; an empty list once it has to end."""
        with self._there:
            while not self._works and not self._closed and instance not in self._going:
                self._there.wait()
            works: list[_Work] = []
            if instance in self._going:
                self._going.remove(instance)
                self._there.notify()  # This thread may have been woken for a request.
                return works
            rows = 0
            while self._works and (not works or self._fits(self._works[0], works[0].kind, rows)):
                works.append(self._works.popleft())
                rows += works[-1].rows
            return works

    def _fits(self, work: _Work, kind: Hashable, rows: int) -> bool:
        return self._most > 0 and rows + work.rows <= self._most and work.kind == kind

    def end(self, instances: Collection[Instance]) -> None:
        """Makes these instances end."""
        with self._there:
            self._going.update(instances)
            self._there.notify_all()

    def close(self) -> None:
        with self._there:
            self._closed = True
            self._there.notify_all()


class DecoupledModel(TritonModel):
    """See the module docstring. `execute` gets at most `most` rows together; 0: one request at a time."""

    def __init__(self, instances: Sequence[Instance], modules: TritonModules, home: Home, most: int = 0) -> None:
        super().__init__(instances, modules, home)
        self._waiting = _Waiting(most)
        self._threads: dict[Instance, threading.Thread] = {}
        self._starting = threading.Lock()

    def start_instance(self, call: Call) -> None:
        """See `Model`: starts all instances, whose threads call `initialize`. Raises `ModelLoadError`."""
        self._home.begin(call)
        self._start()

    def _start(self) -> None:
        with self._starting:
            if self._threads:
                return
            for instance in self._all:
                self._start_one(instance)

    def _start_one(self, instance: Instance) -> None:
        started = Future[None]()
        thread = threading.Thread(target=self._run, args=(instance, started), name=instance.name, daemon=True)
        self._threads[instance] = thread
        thread.start()
        started.result()

    def change_instances(self, config: ModelConfig) -> tuple[int, int] | None:
        """See `Model`: it owns the threads. Raises an exception of `initialize` after ending the new instances."""
        with self._starting:
            came: list[Instance] = []
            come = self._coming(config)
            try:
                for instance in come:
                    self._start_one(instance)
                    came.append(instance)
            except BaseException:
                self._all = [instance for instance in self._all if instance not in come]
                self.instances = len(self._all)
                self._end(came)
                raise
            self._end([instance for instance in list(self._all) if self._goes(instance)])
        return 0, 0

    def _end(self, instances: Sequence[Instance]) -> None:
        self._waiting.end(instances)
        for instance in instances:
            self._threads.pop(instance).join()

    async def infer(self, inputs: Inputs, call: Call) -> AsyncGenerator[Answer, None]:
        """Yields the responses as they are sent. Raises the error of a response, which is the last one then."""
        if not self._threads:
            await asyncio.to_thread(self._start)
        answers = Answers()
        rows = min([array.shape[0] if array.ndim else 1 for array in inputs.values()], default=1)
        work = _Work(inputs, call, answers, rows, kind_in_lists(self.equal_shapes, inputs))
        batching = self.dynamic_batching
        self._waiting.put(work, 0 if batching is None else batching.policy.max_queue_size)
        del inputs
        try:
            while (answer := await answers.take()) is not None:
                yield answer
        finally:
            answers.abandon()
            self._waiting.discard(work)

    # --- on an instance's thread ---

    def _run(self, instance: Instance, started: Future[None]) -> None:
        try:
            self._initialize(instance)
        except BaseException as error:
            self._threads.pop(instance, None)
            started.set_exception(error)
            return
        started.set_result(None)
        while works := self._waiting.take(instance):
            self._execute(instance, works)
            works.clear()  # Released while this thread waits.
        instance.finalize()

    def _execute(self, instance: Instance, works: list[_Work]) -> None:
        works[:] = [work for work in works if not work.call.cancelled]
        if not works:
            return
        for work in works:
            work.call.times.waited(work.queued)
            work.call.times.batch_size = len(works)
        lines = [Line(work.call, work.answers, decoupled=True, reshaping=self.reshaping) for work in works]
        requests = [self._request(work.inputs, work.call, line) for work, line in zip(works, lines, strict=True)]
        try:
            returned = instance.execute(requests, [work.call for work in works])
            if isinstance(returned, Future):
                # It continues while this thread takes the next requests.
                returned.add_done_callback(partial(_look_at, instance, lines))
            elif returned is not None:
                raise no_none(instance, returned)
        except BaseException as error:
            _fail(instance, lines, error)

    def close(self) -> None:
        """Lets each instance's thread call `finalize`, and removes the model's modules."""
        self._waiting.close()
        for thread in self._threads.values():
            thread.join()
        super().close()


def _look_at(instance: Instance, lines: Sequence[Line], done: Future[Any]) -> None:
    """Handles the end of a coroutine of `execute`."""
    if done.cancelled():
        _fail(instance, lines, Cancelled("the model was closed while it ran the request"))
    elif (error := done.exception()) is not None:
        _fail(instance, lines, error)
    elif (returned := done.result()) is not None:
        _fail(instance, lines, no_none(instance, returned))


def _fail(instance: Instance, lines: Sequence[Line], error: BaseException) -> None:
    with RunningFor(line.call for line in lines):
        failure = error if is_serving_error(error) else instance.failure(error)
    for line in lines:
        line.fail(own_copy(failure))


def no_none(instance: Instance, returned: object) -> Internal:
    """Returns, and logs, the error for an `execute` that returned something."""
    text = (
        f"Python model '{instance.name}' is using the decoupled mode and the execute function must return None, "
        f"got {type(returned).__name__}"
    )
    log.error("%s", text)
    return Internal(text)
