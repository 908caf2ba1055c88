"""Models that call other models of this server: `Call.infer` and `Call.infer_stream` (spec 5.3).

Strategy: a model's call takes the same path as a client's, from the lease to the statistics, in a task of its
own on the event loop. Code on the loop gets the task; code on a thread blocks until it has ended. Each call has
a `_Link` to the call on whose behalf it is made, back to the client's, which makes cycles visible. Arrays become
request tensors, and a response's tensors arrays.
"""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections import Counter
from collections.abc import AsyncGenerator, Coroutine, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import aclosing, contextmanager
from typing import Any, TypeVar

import numpy as np

from triglot.core.call import MAX_MODEL_CALLS, Call, ModelCall, ModelTask, Reach
from triglot.core.errors import (
    RETRY_AFTER_SECONDS,
    Cancelled,
    Code,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    QueueFull,
    ServingError,
    Unavailable,
    outcome,
)
from triglot.core.model_loading import when_loaded
from triglot.core.operation import EVERYTHING
from triglot.core.tensor import Array, bytes_elements, datatype_of, native, object_array
from triglot.core.types import Answer, InferenceRequest, InferenceResponse, InputTensor
from triglot.dataplane.dataplane import DataPlane
from triglot.scheduling.servable import Servable
from triglot.telemetry.calls import Endpoint
from triglot.telemetry.store import Telemetry

T = TypeVar("T")

STOPPED = "the server has stopped"


LONG_TEXTS = 4096
"""BYTES tensors with at least this many elements are converted on a thread."""


async def request_of(parent: Call, wanted: ModelCall) -> InferenceRequest:
    """Return the request of a model's call. Raise `InvalidArgument` for values that cannot be inputs."""
    if not isinstance(wanted.inputs, Mapping):
        raise InvalidArgument(f"inputs: expected a dict of arrays by name, got {type(wanted.inputs).__name__}")
    # Inputs must not change while the other model reads them, or while its response cache digests them.
    copied = any(member.borrows for member in parent.members)
    arrays = {name: _array(name, value, copied=copied) for name, value in wanted.inputs.items()}
    texts = sum([array.size for array in arrays.values() if array.dtype.kind in "OSUT"])

    def tensors() -> list[InputTensor]:
        return [_tensor(name, array) for name, array in arrays.items()]

    return InferenceRequest(
        wanted.model,
        str(wanted.version or ""),
        wanted.request_id or parent.request_id,
        await asyncio.to_thread(tensors) if texts >= LONG_TEXTS else tensors(),
        tuple(wanted.outputs),
        dict(parent.parameters if wanted.parameters is None else wanted.parameters),
        wanted.signature_name,
    )


def _array(name: object, value: Any, *, copied: bool) -> Array:
    if not isinstance(name, str):
        raise InvalidArgument(f"inputs: expected names, got {name!r}")
    try:
        return np.array(value) if copied else np.asarray(value)
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"input '{name}': expected an array: {error}") from None


def _tensor(name: str, array: Array) -> InputTensor:
    """Return the array as a flat tensor: a view, unless its memory layout is not that of a client's tensor."""
    try:
        datatype = datatype_of(array)
    except TypeError as error:
        raise InvalidArgument(f"input '{name}': {error}") from None
    array = _texts(array) if datatype == "BYTES" else native(array)
    return InputTensor(name, datatype, array.shape, array.reshape(-1))


def _texts(array: Array) -> Array:
    """Return the BYTES elements as `bytes` objects: the array itself if it holds only these."""
    if array.dtype.hasobject and all(type(item) is bytes for item in array.flat):
        return array
    return object_array(bytes_elements(array), array.shape)


def arrays_of(response: InferenceResponse) -> dict[str, Array]:
    outputs = {output.name: output.array for output in response.outputs}
    return Answer(outputs, response.parameters) if response.parameters else outputs


# --- calls ---


class _Link:
    """A call that a model makes, and the chain of calls on whose behalf it is made.

    `caller`: name and version of the calling model. `before`: the link of the call that the caller serves; None
    if a client made it. `waits`: the caller waits for another instance of its own model. Calling the link runs
    a `ModelCall` or `ModelTask`: it is the `reach` of the called model's call.
    """

    __slots__ = ("before", "caller", "calls", "depth", "waits")

    def __init__(self, calls: ModelCalls, caller: tuple[str, int], before: _Link | None) -> None:
        self.calls = calls
        self.caller = caller
        self.before = before
        self.waits = False
        self.depth: int = 1 if before is None else before.depth + 1

    def __call__(self, call: Call, wanted: ModelCall | ModelTask) -> Any:
        return self.calls.run(call, wanted, self)

    @property
    def detached(self) -> Reach:
        """The `reach` of a model's calls on behalf of no request."""
        return self.calls.reach

    def chain(self) -> list[_Link]:
        """Return this link and all before it."""
        links, link = [], self.before
        links.append(self)
        while link is not None:
            links.append(link)
            link = link.before
        return links

    def path(self, last: str) -> str:
        """Return the names of the models in the chain and `last`, for error messages."""
        # A warm-up has no name.
        return " -> ".join([*(link.caller[0] for link in reversed(self.chain()) if link.caller[0]), last])


class ModelCalls:
    """Runs the calls of models to other models. Created on the event loop; `run` may be called on any thread.

    `telemetry` counts them as calls of the called model, apart from clients' calls; None: they are not counted.
    `most`: how many are made on behalf of one request of a client; 0: any number.
    """

    def __init__(self, dataplane: DataPlane, telemetry: Telemetry | None, most: int = 0) -> None:
        self._dataplane = dataplane
        self._most = most
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()
        self._held: Counter[tuple[str, int]] = Counter()
        self._unary_endpoint = self._stream_endpoint = None
        if telemetry is not None:
            self._unary_endpoint = telemetry.endpoint("internal", "MODEL", "infer", inference=True, internal=True)
            self._stream_endpoint = telemetry.endpoint(
                "internal", "MODEL", "infer_stream", inference=True, internal=True
            )

    def reach(self, call: Call, wanted: ModelCall | ModelTask) -> Any:
        """Implement `Call.infer` and `Call.infer_stream` for calls made by clients."""
        return self.run(call, wanted, None)

    def run(self, parent: Call, wanted: ModelCall | ModelTask, before: _Link | None) -> Any:
        """Return a task or an async iterator on the event loop; on other threads the result or an iterator."""
        on_loop = threading.get_ident() == self._thread
        if isinstance(wanted, ModelTask):
            done = self._run_task(wanted)
            return self._loop.create_task(done) if on_loop else self._wait(done)
        link = _Link(self, (parent.model_name, parent.model_version), before)
        if wanted.stream:
            answers = self._stream(parent, wanted, link)
            return answers if on_loop else self._pull(parent, answers)
        if not on_loop:
            return self._wait(self._infer(parent, wanted, link))
        task = self._loop.create_task(self._infer(parent, wanted, link))
        task.add_done_callback(_retrieve_exception)
        return task

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        """Block this thread until the event loop has run `work`; returns its result."""
        try:
            future = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:
            work.close()
            raise Unavailable(STOPPED) from None
        try:
            return future.result()
        except CancelledError:
            raise Unavailable(STOPPED) from None
        finally:
            del future  # It refers to the error, whose traceback refers to this frame.

    def _pull(self, parent: Call, answers: AsyncGenerator[T, None]) -> Iterator[T]:
        """Yield the responses on a thread; closing the generator stops the called model."""
        try:
            while True:
                try:
                    yield self._wait(_next(parent, answers))
                except StopAsyncIteration:
                    return
        finally:
            if threading.get_ident() == self._thread:  # The garbage collector closes it here.
                closing = self._loop.create_task(answers.aclose())
                closing.add_done_callback(_retrieve_exception)
            else:
                self._wait(_closed(answers))

    # --- on the loop ---

    async def _run_task(self, task: ModelTask) -> bool:
        """Run the task; returns whether the model is ready afterwards. Raise `ServingError` as for a client."""
        if task.action == "load":
            await self._dataplane.load_model(EVERYTHING, task.model, task.config)
        elif task.action == "unload":
            await self._dataplane.unload_model(EVERYTHING, task.model, dependents=task.dependents)
        try:
            return await self._dataplane.check_ready(EVERYTHING, task.model, task.version)
        except NotFound:
            return False

    async def _infer(self, parent: Call, wanted: ModelCall, link: _Link) -> dict[str, Array]:
        child = self._child(parent, wanted, link)
        with _count_call(self._unary_endpoint, child), _name_model(wanted.model), _cancel_with(parent):
            request = await request_of(parent, wanted)
            servable = await when_loaded(child, self._find, child, request)
            with servable, self._track_instances(link, servable):
                return arrays_of(await self._dataplane.infer_on(servable, request, child))

    async def _find(self, child: Call, request: InferenceRequest) -> Servable:
        return self._dataplane.servable_of(child, request)

    async def _stream(
        self, parent: Call, wanted: ModelCall, link: _Link
    ) -> AsyncGenerator[dict[str, Array], None]:
        child = self._child(parent, wanted, link)
        with _count_call(self._stream_endpoint, child), _name_model(wanted.model):
            request = await request_of(parent, wanted)
            servable = await when_loaded(child, self._find, child, request)
            with servable, self._track_instances(link, servable):
                responses = self._dataplane.infer_stream_on(servable, request, child)
                async with aclosing(responses):
                    async for response in responses:
                        yield arrays_of(response)

    def _child(self, parent: Call, wanted: ModelCall, link: _Link) -> Call:
        child = parent.child()
        child.reach = link
        child.permission = EVERYTHING  # The code of a model may call any model.
        child.model_name = wanted.model
        child.scheduling = parent.scheduling
        # In a batch, any of the calls may be traced.
        child.trace = next((member.trace for member in parent.members if member.trace is not None), None)
        child.inner_calls = self._count(parent, link.path(wanted.model))
        return child

    def _count(self, parent: Call, path: str) -> list[int] | None:
        """Count one more call on behalf of a client's request; returns the count that these share.

        Calls outside of any request (`Call.detached`, warm-ups) are not bounded. Raise `FailedPrecondition`.
        """
        if parent.inner_calls is None:
            if not any(member.is_counted for member in parent.members):
                return None
            parent.inner_calls = [0]
        made = parent.inner_calls
        made[0] += 1
        if self._most and made[0] > self._most:
            raise FailedPrecondition(
                f"the request makes more than {self._most} calls to other models, the most that "
                f"max_inner_calls allows: {path}"
            )
        return made

    @contextmanager
    def _track_instances(self, link: _Link, servable: Servable) -> Iterator[None]:
        """Track calls that wait for an instance of a model while holding other instances of it.

        Raise `FailedPrecondition` when the chain holds all instances of the model, and `QueueFull` when it
        does together with other calls.
        """
        if link.depth > MAX_MODEL_CALLS:
            raise FailedPrecondition(
                f"model calls are nested more than {MAX_MODEL_CALLS} deep: {link.path(servable.name)}"
            )
        key, instances = (servable.name, servable.version), servable.model.instances
        own = [caller_link for caller_link in link.chain() if caller_link.caller == key]
        if not own or (servable.direct and not servable.model.holds_instances):
            yield
            return
        if servable.sequences is not None:
            raise FailedPrecondition(f"the call could deadlock on its own sequence: {link.path(servable.name)}")
        new = [own_link for own_link in own if not own_link.waits]
        if self._held[key] + len(new) >= instances:
            text = (
                f"the call would deadlock: {link.path(servable.name)}, and every instance of '{servable.name}' "
                f"({instances}) waits for such a call; configure more instances"
            )
            raise (
                FailedPrecondition(text)
                if len(own) >= instances
                else QueueFull(text, retry_after=RETRY_AFTER_SECONDS)
            )
        self._held[key] += len(new)
        for own_link in new:
            own_link.waits = True
        try:
            yield
        finally:
            for own_link in new:
                own_link.waits = False
            self._held[key] -= len(new)
            if not self._held[key]:
                del self._held[key]


def _retrieve_exception(task: asyncio.Task[Any]) -> None:
    """Retrieve the exception of a task, so that asyncio does not log it if no code awaited the task."""
    if not task.cancelled():
        task.exception()


async def _closed(answers: AsyncGenerator[Any, None]) -> None:
    await answers.aclose()


@contextmanager
def _cancel_with(parent: Call) -> Iterator[None]:
    """Cancel the current task, which must do nothing else, when the parent call is cancelled.

    Raise `Cancelled` or `DeadlineExceeded` then.
    """
    if parent.cancelled:
        raise _cancelled_error(parent)
    running = asyncio.current_task()
    assert running is not None
    # The task keeps the error in the end, whose traceback refers to this frame.
    task = weakref.ref(running)
    del running
    disconnected = False

    def end() -> None:
        nonlocal disconnected
        # A batch is cancelled when all of its members are.
        if parent.cancelled and not disconnected and (followed := task()) is not None:
            disconnected = True
            followed.cancel()

    parent.follow(end)
    try:
        yield
    except asyncio.CancelledError:
        if not disconnected:
            raise
        raise _cancelled_error(parent) from None
    finally:
        parent.unfollow(end)


async def _next(parent: Call, answers: AsyncGenerator[T, None]) -> T:
    with _cancel_with(parent):
        return await anext(answers)


def _cancelled_error(parent: Call) -> ServingError:
    when = "while it called another model"
    return parent.overdue(when) if parent.expired else Cancelled(f"the request was cancelled {when}")


@contextmanager
def _count_call(endpoint: Endpoint | None, child: Call) -> Iterator[None]:
    if endpoint is None:
        yield
        return
    endpoint.begin(child)
    code = Code.OK
    try:
        yield
    except BaseException as error:
        # A caller that has read enough closes the stream.
        code = Code.OK if isinstance(error, GeneratorExit) else outcome(error)
        raise
    finally:
        endpoint.end(child, code)


@contextmanager
def _name_model(model: object) -> Iterator[None]:
    """Name the called model in error messages that do not name it yet."""
    try:
        yield
    except ServingError as error:
        if f"'{model}'" not in error.message and f"{model} version " not in error.message:
            error.message = f"model '{model}': {error.message}"
        raise
