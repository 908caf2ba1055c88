"""One request to a version of a model: its inputs bound to a signature, run, and its response checked."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import Internal, ServingError, as_serving_error, without_frames
from triglot.core.request_scheduling import scheduling_of
from triglot.core.running import Defer, Done, cancel, raise_error
from triglot.core.tensor import LONG_BYTES, Array
from triglot.core.types import Answer, InferenceRequest, InferenceResponse
from triglot.dataplane.recorder import Record
from triglot.model.signature import Signature
from triglot.model.validation import (
    InvalidRequest,
    bind_inputs,
    bind_outputs,
    check_parameters,
    check_requested_outputs,
    check_shapes,
)
from triglot.scheduling.response_cache import Key
from triglot.scheduling.servable import Servable, Submission
from triglot.telemetry.tracing import Trace

log = logging.getLogger(__name__)


def admit(servable: Servable, request: InferenceRequest, call: Call) -> Signature:
    """Returns the signature that the request names, and sets the call's fields that the model may read.

    Raises `InvalidRequest` for a signature or requested outputs that do not exist.
    """
    name = request.signature_name or servable.default_signature
    signature = servable.signatures.get(name)
    if signature is None:
        has = ", ".join(sorted(servable.signatures))
        raise InvalidRequest(
            f"model '{servable.name}' has no signature '{name}', only {has}{servable.why_unservable(name)}"
        )
    if request.outputs or signature.unservable_outputs:
        check_requested_outputs(signature, request)
        call.requested_outputs = request.outputs
    call.request_id = request.id
    call.parameters = request.parameters
    if request.input_parameters is not None:
        call.input_parameters = request.input_parameters
    if request.parameters:
        call.scheduling = scheduling_of(request.parameters, call.scheduling)
    call.signature_name = name
    return signature


def takes_long(request: InferenceRequest) -> bool:
    """Returns whether the inputs have too many bytes to bind BYTES elements, one by one, on the event loop."""
    return sum([len(one.data) for one in request.inputs]) > LONG_BYTES


async def bind(signature: Signature, request: InferenceRequest) -> dict[str, Array]:
    """Returns the bound inputs; raises as `bind_inputs`. Large BYTES inputs are bound on a thread."""
    if signature.takes_bytes and takes_long(request):
        return await asyncio.to_thread(bind_inputs, signature, request)
    return bind_inputs(signature, request)


def response_of(
    servable: Servable, signature: Signature, request: InferenceRequest, answer: object
) -> InferenceResponse:
    """Returns the checked response for what the model returned.

    Raises `Internal` as `bind_outputs` and `check_parameters`, and logs it.
    """
    try:
        lenient = request.lenient_shapes or servable.any_output_shapes
        outputs = bind_outputs(signature, answer, request.outputs, servable.name, lenient_shapes=lenient)
        response = InferenceResponse(servable.name, str(servable.version), request.id, outputs)
        if not servable.on_loop:
            response.answer = answer
        if type(answer) is not dict and isinstance(answer, Answer):
            response.parameters = check_parameters(answer.parameters, servable.name)
            response.final = answer.final
    except Internal as error:
        log.error("%s", error.message)
        raise
    return response


class Inference(Submission):
    """One request to a version of a model, and its own `Outcome`. On the event loop.

    `done` is called with it once. `answer` is an `InferenceResponse`; for a model that takes a protocol's messages
    it is what the model returned, and `request` is None.
    """

    __slots__ = ("_done", "answer", "cache_key", "cancelled", "record", "request", "signature", "trace")
    servable: Servable
    signature: Signature

    def __init__(
        self, servable: Servable, request: InferenceRequest | None, call: Call, done: Done, defer: Defer | None
    ) -> None:
        super().__init__(servable, {}, call, defer)
        self.request = request
        self.answer: Any = None
        self.cancelled = False
        self.cache_key: Key | None = None
        """Key under which the response cache stores the response; None if it is not cached."""
        self.trace: Trace | None = None
        self.record: Record | None = None
        self._done: Done | None = done

    def reject(self, error: ServingError) -> None:
        """End it with an error before it is queued."""
        self.over = True
        self.error = without_frames(error)
        self.conclude()

    def accept(self, answer: Any) -> None:
        """End it with a response before it is queued."""
        self.over = True
        self.answer = answer
        self.conclude()

    def abandon(self) -> None:
        """End it as cancelled before it is queued."""
        self.over = True
        self.call.cancel()
        self.dropped()

    def ended(self) -> None:
        """Check the response, store it in the response cache if enabled, and report the outcome."""
        if self.request is None:
            self.answer = self.result
        elif self.error is None:
            began = perf_counter()
            try:
                self.answer = response_of(self.servable, self.signature, self.request, self.result)
            except ServingError as error:
                self.error = without_frames(error)
            self.call.times.output_seconds += perf_counter() - began
        elif self.request.lenient_shapes and isinstance(self.error, Internal):
            # The model's own code may have seen the shapes before they were checked.
            try:
                check_shapes(self.signature, self.request)
            except ServingError as error:
                self.error = without_frames(error)
        key, cache = self.cache_key, self.servable.response_cache
        if key is not None and cache is not None and self.error is None and not self.answer.parameters:
            if cache.takes_long(self.answer.outputs):
                self.task = asyncio.get_running_loop().create_task(self._store_copy())
                return
            began = perf_counter()
            cache.store_copy(key, self.answer.outputs)
            self.call.times.cache_seconds += perf_counter() - began
        self.conclude()

    async def _store_copy(self) -> None:
        """Copy a large response for the cache on a thread.

        It is reported after that, as the model may reuse its memory.
        """
        key, cache = self.cache_key, self.servable.response_cache
        assert key is not None
        assert cache is not None
        began = perf_counter()
        with suppress(asyncio.CancelledError), self.servable:
            copied = await asyncio.to_thread(cache.copied, self.answer.outputs)
            cache.store(key, copied)
        self.call.times.cache_seconds += perf_counter() - began
        self.conclude()

    def dropped(self) -> None:
        """Report that it was cancelled."""
        self.cancelled = True
        self.conclude()

    def conclude(self) -> None:
        """Call `done`, and end the trace and the record; later calls do nothing."""
        done, self._done = self._done, None
        if done is None:
            return
        if self.trace is not None:
            self.trace.end(self.answer)
        if self.record is not None:
            self.record.end(self.answer)
        done(self)


class Awaited:
    """The outcome of a coroutine that answers one request; has the interface of `Inference`."""

    __slots__ = ("_done", "answer", "cancelled", "error", "over", "task")

    def __init__(self, answering: Coroutine[Any, Any, Any], done: Done) -> None:
        self.answer: Any = None
        self.error: ServingError | None = None
        self.cancelled = self.over = False
        self._done: Done | None = done
        self.task = asyncio.get_running_loop().create_task(self._run(answering))
        self.task.add_done_callback(partial(self._end, answering))

    async def _run(self, answering: Coroutine[Any, Any, Any]) -> None:
        try:
            self.answer = await answering
        except asyncio.CancelledError:
            self.cancelled = True  # Not raised: see `DataPlane._prepare`.
        except Exception as error:
            self.error = without_frames(as_serving_error(error, "the request"))

    def _end(self, answering: Coroutine[Any, Any, Any], task: asyncio.Task[None]) -> None:
        self.over = True
        if task.cancelled():  # Before its first step.
            self.cancelled = True
            answering.close()
        done, self._done = self._done, None
        assert done is not None
        done(self)

    def cancel(self) -> None:
        """Cancel the coroutine; `done` is called when it has ended."""
        if not self.over:
            self.task.cancel()


class _Submitter(Protocol):
    """The same as `protocols.rows.Inferring`, which this layer may not import."""

    def submit(self, request: Any, call: Call, done: Done, /) -> Any: ...

    def answer(self, outcome: Any, request: Any, /) -> Any: ...

    def map_error(self, error: ServingError, outcome: Any, request: Any, /) -> ServingError: ...


async def run(inference: _Submitter, request: Any, call: Call) -> Any:
    """Returns a row's response to one request. Raises `ServingError`."""
    outcome = await ended(partial(inference.submit, request, call))
    if outcome.error is not None:
        outcome.error = inference.map_error(outcome.error, outcome, request)
        raise_error(outcome)
    return inference.answer(outcome, request)


async def ended(start: Callable[[Done], Any]) -> Any:
    """Await the outcome of the `Inference`, or `Awaited`, that `start` returns.

    If this is cancelled, the inference is cancelled too, and its code on the loop is awaited.
    """
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(_: object) -> None:
        if not future.done():
            future.set_result(None)

    running = start(done)
    try:
        await future
    except asyncio.CancelledError:
        await cancel(running)
        raise
    return running
