"""A servable: one loaded version of a model, its instances and its queue."""

from __future__ import annotations

import asyncio
import inspect
import logging
import sys
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import aclosing
from typing import Any

from triglot.core.errors import DeadlineExceeded, QueueFull, ServingError, as_serving_error
from triglot.core.model import Model
from triglot.core.readings import Reading
from triglot.core.signature import default_of, signatures_of
from triglot.core.types import Call
from triglot.engine.instance import Instance
from triglot.engine.queue import RETRY_AFTER_SECONDS
from triglot.engine.schedule import schedule_for
from triglot.engine.work import (
    NOTHING,
    Around,
    Execution,
    Explain,
    Function,
    Inputs,
    InstanceExecution,
    Stream,
    StreamEnd,
)

log = logging.getLogger(__name__)

UNLOAD_PATIENCE_SECONDS = 2.0


def takes_call(infer: Callable[..., Any]) -> bool:
    """Whether `infer` wants the call after the inputs.

    Raises `ValueError` when it can be called neither way. A second parameter with a default is the model's own
    unless it is named `call`.
    """
    signature = inspect.signature(infer)
    if any(parameter.kind is parameter.VAR_POSITIONAL for parameter in signature.parameters.values()):
        return True
    for arguments in (1, 2):
        try:
            signature.bind(*range(arguments))
        except TypeError:
            continue
        return arguments == 2 or list(signature.parameters)[1:2] == ["call"]
    raise ValueError(f"infer: expected infer(self, inputs) or infer(self, inputs, call), got infer{signature}")


def check_declarations(model: Model) -> None:
    """Raises `ValueError` for what a model's class cannot have, and warns of what it seems to have forgotten."""
    for kind in () if model.signatures or model.any_tensors else ("inputs", "outputs"):
        if not getattr(model, kind):
            log.warning("class %s declares no %s", type(model).__name__, kind)
    for name, least in (("max_batch_size", 0), ("instances", 1), ("max_queue_size", 1)):
        value = getattr(model, name)
        if not isinstance(value, int) and not (name == "max_queue_size" and value is None):
            raise ValueError(f"{name}: expected an integer, got {value!r}")
        if value is not None and value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")


def _without_call(infer: Callable[[Inputs], Any]) -> Callable[[Inputs, Call], Any]:
    return lambda inputs, _: infer(inputs)


def _as_it_is(answer: Any) -> Any:
    return answer


def is_cancelled(error: BaseException) -> bool:
    """Whether `error` is the cancellation of this very task."""
    task = asyncio.current_task()
    return isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling() > 0


class Servable:
    """Runs one model. Made, used and closed on the event loop; the model is loaded already.

    Blocking code runs on the threads of the instances, `async def` code on the loop, which `on_loop` says. Work
    that nobody waits for any more is never started.
    """

    def __init__(self, name: str, version: int, model: Model, *, max_queue_size: int) -> None:
        check_declarations(model)
        self.name = name
        self.version = version
        self.model = model
        self.platform = model.platform
        self.signatures = signatures_of(model)
        self.default_signature = default_of(self.signatures)
        self.signature = self.signatures[self.default_signature]
        infer = model.infer
        self.function: Function = infer if takes_call(infer) else _without_call(infer)
        self.on_loop = inspect.iscoroutinefunction(infer) or inspect.isasyncgenfunction(infer)
        self.decoupled = inspect.isgeneratorfunction(infer) or inspect.isasyncgenfunction(infer)
        self._limit = max_queue_size if model.max_queue_size is None else model.max_queue_size
        self._loop = asyncio.get_running_loop()
        self._schedule = schedule_for(model, self._limit, self._loop.call_soon, self._add_instances)
        self._instances: list[Instance] = []
        if not self.on_loop:
            # The others are started when there is work for them: a thread that never runs is dear, too.
            self._add_instances(1)
        self._leases = 0
        self._drained: asyncio.Event | None = None
        self._idle = threading.Event()

    def __str__(self) -> str:
        return f"{self.name} version {self.version}"

    def _add_instances(self, wanted: int) -> None:
        for _ in range(min(wanted, self.model.instances - len(self._instances))):
            number = len(self._instances)
            name = f"{self.name}/{self.version}#{number}"
            self._instances.append(
                Instance(name, number, self._schedule, self.function, self._explain, self._loop)
            )

    @property
    def alive(self) -> bool:
        """Whether an instance is there to run the next request."""
        return self.on_loop or any(instance.alive for instance in self._instances)

    @property
    def queue_depth(self) -> int:
        """Requests in the queue."""
        return len(self._schedule)

    def readings(self) -> Iterator[Reading]:
        """What its schedule counts."""
        return self._schedule.readings()

    @property
    def leases(self) -> int:
        """Calls that hold this version at the moment."""
        return self._leases

    def __enter__(self) -> Servable:
        """Take a lease: one more call holds this version."""
        self._leases += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._leases -= 1
        if self._drained is not None and not self._leases:
            self._drained.set()
            self._idle.set()

    async def drained(self) -> None:
        """Wait until no call holds this version; nobody takes a lease any more."""
        self._drained = asyncio.Event()
        if self._leases:
            await self._drained.wait()

    async def infer(self, inputs: Inputs, call: Call) -> Any:
        """What the model answers.

        Raises `QueueFull`, `DeadlineExceeded`, the model's own `ServingError`, or `Internal`.
        """
        try:
            if self.on_loop:
                if self._leases > self._limit or call.deadline is not None:
                    self._admit_on_loop(call)
                return await self._run_on_loop(inputs, call)
            execution = Execution(inputs, call, self._loop.create_future())
            self._schedule.put(execution)
            try:
                return await execution.future
            except asyncio.CancelledError:
                self._schedule.discard(execution)
                raise
            finally:
                del execution  # It has the error, whose traceback has this frame.
        except BaseException as error:
            raise self._outcome(error, call) from None

    async def _run_on_loop(self, inputs: Inputs, call: Call) -> Any:
        call.started(time.perf_counter())
        try:
            return await self.function(inputs, call)
        finally:
            call.ended()

    def _admit_on_loop(self, call: Call) -> None:
        # Calls of `async def` code do not wait; the bound is on how many run.
        if self._leases > self._limit:
            raise QueueFull(
                f"Exceeds maximum queue size: {self._limit} requests run", retry_after=RETRY_AFTER_SECONDS
            )
        if call.expired:
            raise DeadlineExceeded("the deadline passed before the request was started")

    def stream(
        self, inputs: Inputs, call: Call, convert: Callable[[Any], Any] = _as_it_is
    ) -> AsyncGenerator[Any, None]:
        """The answers of a decoupled model as it yields them, or the one answer of another model, converted.

        A plain function may also send answers by `call.respond`. Closing the generator stops the model at its
        next answer. Raises as `infer`.
        """
        stream = self._stream_on_loop if self.on_loop else self._stream_from_thread
        return stream(inputs, call, convert)

    async def _stream_on_loop(
        self, inputs: Inputs, call: Call, convert: Callable[[Any], Any]
    ) -> AsyncGenerator[Any, None]:
        self._admit_on_loop(call)
        call.started(time.perf_counter())
        try:
            if self.decoupled:
                async with aclosing(self.function(inputs, call)) as answers:
                    async for answer in answers:
                        yield convert(answer)
            else:
                yield convert(await self.function(inputs, call))
        except BaseException as error:
            raise self._outcome(error, call) from None
        finally:
            call.ended()
            call.cancel()

    async def _stream_from_thread(
        self, inputs: Inputs, call: Call, convert: Callable[[Any], Any]
    ) -> AsyncGenerator[Any, None]:
        stream = Stream(inputs, call, self._loop)
        self._schedule.put(stream)
        try:
            while True:
                while (item := stream.take()) is NOTHING:
                    await stream.arrival()
                if isinstance(item, StreamEnd):
                    break
                yield convert(item)
            if item.error is not None:
                try:
                    raise item.error
                finally:
                    del item  # It has the error, whose traceback has this frame.
        finally:
            stream.abandon()
            self._schedule.discard(stream)

    async def on_every_instance(self, inputs: Inputs, around: Around, explain: Explain) -> None:
        """Have `around` call blocking code once on each instance's thread, on all of them at the same time.

        All instances are started for it; the queue's limit does not hold. Raises the first error, as `explain`
        says it; then, and when this is cancelled, what still runs sees that its call is cancelled.
        """
        self._add_instances(self.model.instances)
        together = threading.Barrier(len(self._instances))
        executions = [
            InstanceExecution(inputs, self._loop.create_future(), together, around, explain)
            for _ in self._instances
        ]
        try:
            self._put_beyond_limit(executions)
            await asyncio.gather(*[execution.future for execution in executions])
        finally:
            for execution in executions:
                execution.call.cancel()
                self._schedule.discard(execution)
            together.abort()

    def _put_beyond_limit(self, executions: Sequence[Execution]) -> None:
        # Nobody else puts before this returns.
        limit, self._schedule.limit = self._schedule.limit, sys.maxsize
        try:
            for execution in executions:
                self._schedule.put(execution)
        finally:
            self._schedule.limit = limit

    def _outcome(self, error: BaseException, call: Call) -> BaseException:
        """What leaves a call on the loop: its own cancellation as it is, everything else explained.

        A model that raises `CancelledError` or `SystemExit` by itself has failed like any other.
        """
        if isinstance(error, GeneratorExit) or is_cancelled(error):
            call.cancel()
            return error
        return self._explain(error)

    def _explain(self, error: BaseException) -> ServingError:
        return as_serving_error(error, str(self))

    async def close(self, *, at_once: bool = False) -> None:
        """End the instances and close the model; the transports let no call through any more.

        A model that still runs is given `UNLOAD_PATIENCE_SECONDS`, and then left alone: it is closed when its last
        call has ended. `at_once`: code on the loop is not waited for; nobody runs that any more.
        """
        self._schedule.close()
        self._drained = self._drained or asyncio.Event()
        if at_once or not self._leases:
            self._idle.set()
        unloaded: Future[None] = Future()

        def unload() -> None:
            self._unload()
            # Of a future that nobody waits for any more there is nothing to tell.
            if unloaded.set_running_or_notify_cancel():
                unloaded.set_result(None)

        # A daemon, like the instances: a model that never returns must not keep a stopped server alive.
        threading.Thread(target=unload, daemon=True).start()
        waiting = asyncio.wrap_future(unloaded)
        await asyncio.wait([waiting], timeout=UNLOAD_PATIENCE_SECONDS)
        if not waiting.done():
            waiting.cancel()
            log.warning("%s still runs; the server does not wait for it", self)

    def _unload(self) -> None:
        for instance in self._instances:
            instance.join()
        if self.on_loop:
            self._idle.wait()
        try:
            self.model.close()
        except Exception:
            log.exception("%s failed to close", self)
        # They refer to this, and would keep the model until the garbage collector comes by.
        self._instances.clear()
