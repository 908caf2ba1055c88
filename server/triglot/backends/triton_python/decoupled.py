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
from collections.abc import AsyncGenerator, Sequence, Sized
from concurrent.futures import Future
from functools import partial
from typing import Any

from triglot.backends.triton_python.context import ModelContext
from triglot.backends.triton_python.errors import TritonModelException
from triglot.backends.triton_python.instance import Instance
from triglot.backends.triton_python.model import Inputs, TritonModel
from triglot.backends.triton_python.names import TritonModules
from triglot.backends.triton_python.sender import UNSENT, ResponseChannel
from triglot.core.call import Call
from triglot.core.current_calls import RunningFor
from triglot.core.errors import Cancelled, Internal, ServingError, is_serving_error, own_copy, queue_full
from triglot.core.response_buffer import MAX_UNREAD_BYTES, NOTHING, ResponseBuffer, StreamEnd
from triglot.core.types import Answer
from triglot.model.config import ModelConfig
from triglot.model.model import kind_in_lists
from triglot.scheduling.forming import Rules, Waiting
from triglot.scheduling.thread_queue import ThreadQueue

log = logging.getLogger(__name__)


class _Responses:
    """An `Outlet` that keeps the responses of a request.

    Strategy: senders wait for a slow client only where no other work needs their thread: in the `execute` of this
    request alone, on `thread`, while `queue` is empty. There they raise an error, too, if responses exceed what is
    kept. On another thread an error might end what serves all requests, so responses are dropped, as for a client
    that has left.
    """

    __slots__ = ("_queue", "buffer", "thread")

    def __init__(self, buffer: ResponseBuffer, queue: Sized) -> None:
        self.buffer = buffer
        self.thread = 0
        self._queue = queue

    def put(self, answer: Answer | ServingError) -> None:
        if isinstance(answer, ServingError):
            self.buffer.end(answer)
        else:
            self.buffer.put(answer, self._waits)
            exceeded = self.buffer.exceeded
            if exceeded is not None and self.thread == threading.get_ident():
                raise TritonModelException(f"{UNSENT} {exceeded.message}")

    def end(self) -> None:
        self.buffer.end()

    def _waits(self) -> bool:
        return self.thread == threading.get_ident() and not self._queue


class _QueuedRequest:
    __slots__ = ("call", "inputs", "queued", "responses")

    def __init__(self, inputs: Inputs, call: Call, responses: _Responses) -> None:
        self.inputs = inputs
        self.call = call
        self.responses = responses
        self.queued = time.perf_counter()


class DecoupledModel(TritonModel):
    """See the module docstring. `execute` gets at most `max_rows` rows together; 0: one request at a time.

    `max_unread_bytes`: of a request's responses, see `ResponseBuffer`.
    """

    def __init__(
        self,
        instances: Sequence[Instance],
        modules: TritonModules,
        context: ModelContext,
        max_rows: int = 0,
        max_unread_bytes: int = MAX_UNREAD_BYTES,
    ) -> None:
        super().__init__(instances, modules, context)
        self._max_unread_bytes = max_unread_bytes
        self._max_rows = max_rows
        self._queue = ThreadQueue(Rules(max_rows))
        self._closed = False
        self._leaving: set[Instance] = set()
        self._threads: dict[Instance, threading.Thread] = {}
        self._start_lock = threading.Lock()

    def start_instance(self, call: Call) -> None:
        """See `Model`: start all instances, whose threads call `initialize`. Raise `ModelLoadError`."""
        self._context.start_serving(call)
        self._start()

    def _start(self) -> None:
        with self._start_lock:
            if self._threads:
                return
            for instance in self._instances:
                self._start_instance(instance)

    def _start_instance(self, instance: Instance) -> None:
        started = Future[None]()
        thread = threading.Thread(target=self._run, args=(instance, started), name=instance.name, daemon=True)
        self._threads[instance] = thread
        thread.start()
        started.result()

    def change_instances(self, config: ModelConfig) -> tuple[int, int] | None:
        """See `Model`: it owns the threads. Raise an exception of `initialize` after ending the new instances."""
        with self._start_lock:
            started_now: list[Instance] = []
            added = self._add_instances(config)
            try:
                for instance in added:
                    self._start_instance(instance)
                    started_now.append(instance)
            except BaseException:
                self._instances = [instance for instance in self._instances if instance not in added]
                self.instances = len(self._instances)
                self._end(started_now)
                raise
            self._end([instance for instance in list(self._instances) if self._end_if_due(instance)])
        return 0, 0

    def queued_requests(self) -> int:
        """See `Model`: requests that no instance has taken yet."""
        return len(self._queue)

    def _end(self, instances: Sequence[Instance]) -> None:
        self._leaving.update(instances)
        self._queue.wake()
        for instance in instances:
            self._threads.pop(instance).join()

    async def infer(self, inputs: Inputs, call: Call) -> AsyncGenerator[Answer, None]:
        """Yield the responses as they are sent. Raise the error of a response, which is the last one then."""
        if not self._threads:
            await asyncio.to_thread(self._start)
        arrived = asyncio.Event()
        buffer = ResponseBuffer(call, self._max_unread_bytes, asyncio.get_running_loop(), arrived.set)
        responses = _Responses(buffer, self._queue)
        rows = min([array.shape[0] if array.ndim else 1 for array in inputs.values()], default=1)
        kind = kind_in_lists(self.equal_shapes, inputs) if self._max_rows else None
        place = Waiting(_QueuedRequest(inputs, call, responses), rows, kind, time.monotonic())
        limit = 0 if self.dynamic_batching is None else self.dynamic_batching.policy.max_queue_size
        if limit and len(self._queue) >= limit:
            raise queue_full(f"{limit} requests are queued, the most that max_queue_size allows")
        self._queue.put(place)
        del inputs
        try:
            while True:
                while (item := buffer.take()) is NOTHING:
                    arrived.clear()
                    await arrived.wait()
                if isinstance(item, StreamEnd):
                    break
                yield item
            if item.error is not None:
                try:
                    raise item.error
                finally:
                    del item  # Its traceback refers to this frame.
        finally:
            buffer.abandon()
            self._queue.discard(place)

    # --- on an instance's thread ---

    def _run(self, instance: Instance, started: Future[None]) -> None:
        try:
            self._initialize(instance)
        except BaseException as error:
            self._threads.pop(instance, None)
            started.set_exception(error)
            return
        started.set_result(None)
        while batch := self._queue.take(lambda: self._ends(instance)):
            works = [request.work for request in batch.members]
            del batch
            self._execute(instance, works)
            works.clear()  # Released while this thread waits.
        self._leaving.discard(instance)
        instance.finalize()

    def _ends(self, instance: Instance) -> bool:
        """Whether the instance takes no more requests; a closed model's take those that are queued."""
        return instance in self._leaving or (self._closed and not self._queue)

    def _execute(self, instance: Instance, works: list[_QueuedRequest]) -> None:
        works[:] = [work for work in works if not work.call.cancelled]
        if not works:
            return
        for work in works:
            work.call.execution_waited(work.queued)
            work.call.batch_size = len(works)
        channels = [
            ResponseChannel(work.call, work.responses, decoupled=True, reshaping=self.reshaping) for work in works
        ]
        requests = [
            self._request(work.inputs, work.call, channel) for work, channel in zip(works, channels, strict=True)
        ]
        if len(works) == 1:
            works[0].responses.thread = threading.get_ident()
        try:
            returned = instance.execute(requests, [work.call for work in works])
            if isinstance(returned, Future):
                # It continues while this thread takes the next requests.
                returned.add_done_callback(partial(_on_done, instance, channels))
            elif returned is not None:
                raise unexpected_result(instance, returned)
        except BaseException as error:
            _fail(instance, channels, error)
        finally:
            for work in works:
                work.responses.thread = 0

    def close(self) -> None:
        """Let each instance's thread call `finalize`, and remove the model's modules."""
        self._closed = True
        self._queue.wake()
        for thread in self._threads.values():
            thread.join()
        super().close()


def _on_done(instance: Instance, channels: Sequence[ResponseChannel], done: Future[Any]) -> None:
    """Handle the end of a coroutine of `execute`."""
    if done.cancelled():
        _fail(instance, channels, Cancelled("the model was closed while it ran the request"))
    elif (error := done.exception()) is not None:
        _fail(instance, channels, error)
    elif (returned := done.result()) is not None:
        _fail(instance, channels, unexpected_result(instance, returned))


def _fail(instance: Instance, channels: Sequence[ResponseChannel], error: BaseException) -> None:
    with RunningFor(channel.call for channel in channels):
        failure = error if is_serving_error(error) else instance.failure(error)
    for channel in channels:
        channel.fail(own_copy(failure))


def unexpected_result(instance: Instance, returned: object) -> Internal:
    """Return, and log, the error for an `execute` that returned something."""
    text = (
        f"Python model '{instance.name}' is using the decoupled mode and the execute function must return None, "
        f"got {type(returned).__name__}"
    )
    log.error("%s", text)
    return Internal(text)
