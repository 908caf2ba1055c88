"""One request on its way through the data plane: bound to its version's signature, run, its answer checked."""

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
    """The signature that is called; the call learns what the model may ask about it.

    Raises `InvalidRequest` for a signature or outputs that do not exist.
    """
    name = request.signature_name or servable.default_signature
    signature = servable.signatures.get(name)
    if signature is None:
        raise InvalidRequest(
            f"model '{servable.name}' has no signature '{name}', only {', '.join(sorted(servable.signatures))}"
        )
    if request.outputs:
        check_requested_outputs(signature, request)
        call.requested_outputs = request.outputs
    call.request_id = request.id
    call.parameters = request.parameters
    if request.input_parameters is not None:
        call.input_parameters = request.input_parameters
    if request.parameters:
        call.scheduling = scheduling_of(request.parameters, call.scheduling)
        timeout = call.scheduling.timeout
        if timeout and servable.sequences is None and not _has_queue_policies(servable):
            call.limit(timeout, f"the request's timeout of {timeout:g} seconds")
    call.signature_name = name
    return signature


def _has_queue_policies(servable: Servable) -> bool:
    """Whether these say what a request's `timeout` means: how long it may wait, if it may say so (spec 5.1).

    Those that only bound how many wait do not.
    """
    batching = servable.model.dynamic_batching
    if batching is None:
        return False
    policies = (batching.policy, *batching.policies.values())
    return any(policy.timeout or policy.allow_timeout_override for policy in policies)


def takes_long(request: InferenceRequest) -> bool:
    """Whether BYTES inputs of so many bytes are too much for the loop, which looks at each element."""
    return sum([len(one.data) for one in request.inputs]) > LONG_BYTES


async def bind(signature: Signature, request: InferenceRequest) -> dict[str, Array]:
    """As `bind_inputs`, which it raises as; on a thread where that takes long."""
    if signature.takes_bytes and takes_long(request):
        return await asyncio.to_thread(bind_inputs, signature, request)
    return bind_inputs(signature, request)


def response_of(
    servable: Servable, signature: Signature, request: InferenceRequest, answer: object
) -> InferenceResponse:
    """The model's answer, checked.

    Raises `Internal` as `bind_outputs` and `check_parameters`; the log has it, too.
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
    """A request at a version of a model: bound to its signature, executed, its answer checked.

    It is its own `Outcome`, for which `done` is called once. `answer` is an `InferenceResponse`, or what a model
    that takes messages has returned: for that one there is no `request`.
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
        """Where the response cache is to keep the answer."""
        self.trace: Trace | None = None
        self.record: Record | None = None
        self._done: Done | None = done

    def reject(self, error: ServingError) -> None:
        """It ends before the model's queue has it."""
        self.over = True
        self.error = without_frames(error)
        self.conclude()

    def accept(self, answer: Any) -> None:
        """As `reject`, with an answer."""
        self.over = True
        self.answer = answer
        self.conclude()

    def leave(self) -> None:
        """As `reject`, since it was cancelled."""
        self.over = True
        self.call.cancel()
        self.dropped()

    def ended(self) -> None:
        """See the base class."""
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
            # The model's own code may be the first to look at the shapes.
            try:
                check_shapes(self.signature, self.request)
            except ServingError as error:
                self.error = without_frames(error)
        key, cache = self.cache_key, self.servable.answers
        if key is not None and cache is not None and self.error is None and not self.answer.parameters:
            if cache.takes_long(self.answer.outputs):
                self.task = asyncio.get_running_loop().create_task(self._keep())
                return
            began = perf_counter()
            cache.keep(key, self.answer.outputs)
            self.call.times.cache_seconds += perf_counter() - began
        self.conclude()

    async def _keep(self) -> None:
        """Copy a large answer on a thread: once it has left, the model may write into it."""
        key, cache = self.cache_key, self.servable.answers
        assert key is not None
        assert cache is not None
        began = perf_counter()
        with suppress(asyncio.CancelledError), self.servable:
            copied = await asyncio.to_thread(cache.copied, self.answer.outputs)
            cache.store(key, copied)
        self.call.times.cache_seconds += perf_counter() - began
        self.conclude()

    def dropped(self) -> None:
        """See the base class."""
        self.cancelled = True
        self.conclude()

    def conclude(self) -> None:
        """Report the outcome."""
        done, self._done = self._done, None
        if done is None:
            return
        if self.trace is not None:
            self.trace.end(self.answer)
        if self.record is not None:
            self.record.end(self.answer)
        done(self)


class Awaited:
    """The outcome of a coroutine that answers one request; see `Inference`."""

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
        if task.cancelled():  # Before it has begun.
            self.cancelled = True
            answering.close()
        done, self._done = self._done, None
        assert done is not None
        done(self)

    def cancel(self) -> None:
        """Have it cancelled, and wait for its end."""
        if not self.over:
            self.task.cancel()


class _Submitter(Protocol):
    """See `protocols.Inferring`."""

    def submit(self, request: Any, call: Call, done: Done, /) -> Any: ...

    def answer(self, outcome: Any, request: Any, /) -> Any: ...

    def map_error(self, error: ServingError, outcome: Any, request: Any, /) -> ServingError: ...


async def run(inference: _Submitter, request: Any, call: Call) -> Any:
    """What a row answers to one request. Raises `ServingError`."""
    outcome = await ended(partial(inference.submit, request, call))
    if outcome.error is not None:
        outcome.error = inference.map_error(outcome.error, outcome, request)
        raise_error(outcome)
    return inference.answer(outcome, request)


async def ended(start: Callable[[Done], Any]) -> Any:
    """The outcome of the `Inference`, or `Awaited`, that `start` starts.

    When this is cancelled, so is that, and its code on the loop is waited for.
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
