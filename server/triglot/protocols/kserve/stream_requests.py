"""The requests of a ModelStreamInfer call: each from its bytes to those of its responses (spec 2.8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.coroutine_work import CoroutineWork, IteratedWork
from triglot.core.errors import (
    Code,
    Internal,
    ModelNotLoaded,
    ServingError,
    as_serving_error,
    outcome,
    refusal_of,
)
from triglot.core.model_loading import when_loaded
from triglot.core.roles import Cancellable
from triglot.core.running import CallCancelled, Defer, Running, Sink
from triglot.core.tensor import LONG_BYTES
from triglot.core.trace_context import TRACEPARENT
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane.dataplane import DataPlane
from triglot.protocols.kserve.codec import (
    FINAL,
    StreamError,
    encode_stream_infer,
    identify,
    name_request,
    packing_size,
    small_answer,
)
from triglot.protocols.kserve.extended_plane import ExtendedPlane
from triglot.protocols.kserve.parameters import wants_typed
from triglot.telemetry.calls import Endpoint

WANTS_EMPTY_FINAL = "triton_enable_empty_final_response"


class ResponseSlot:
    """A request's slot in the order of responses; holds its encoded response, or the error that ends the call.

    `size` is the request's length in bytes.
    """

    __slots__ = ("answer", "size")

    def __init__(self, size: int) -> None:
        self.size = size
        self.answer: bytes | ServingError | None = None


class StreamOutput(Protocol):
    """Sink for a stream's responses, and owner of what runs for it. On the event loop."""

    def defer(self, work: Callable[[], None], /) -> None:
        """Call `work` once all requests that have arrived are started."""

    def start_task(self, work: Coroutine[Any, Any, None], never_began: Callable[[], None], /) -> None:
        """Run `work`, which raises nothing, as a task. If it is cancelled before it starts, call `never_began`."""

    def track(self, running: Cancellable, /) -> None:
        """Register a running request."""

    def untrack(self, running: Any, /) -> None:
        """Remove a request that has ended."""

    def set_response(self, slot: ResponseSlot, answer: bytes | ServingError, /) -> None:
        """Set the response to the request of this slot, or the error that ends the call."""

    def release_slot(self, slot: ResponseSlot, /) -> None:
        """Free a slot: its request's responses are `put` without an order, until it calls `finish`."""

    def put(self, answer: bytes | ServingError, resume: Callable[[], None], /) -> bool:
        """Send one response, or the error that ends the call.

        Return False if the next one has to wait until `resume` is called.
        """

    def finish(self, size: int, /) -> None:
        """Note that all responses of the request, of `size` bytes, were `put`."""


class StreamRequests:
    """Runs the requests of one call, and counts them with `endpoint`. On the event loop.

    `decode` decodes a request; `extended` runs those with options of single tensors. `end_on_error`: an
    execution's first error ends the call instead of being sent in band.
    """

    def __init__(
        self,
        decode: Callable[[bytes], InferenceRequest],
        dataplane: DataPlane,
        extended: ExtendedPlane,
        call: Call,
        endpoint: Endpoint,
        *,
        end_on_error: bool,
        typed: bool,
    ) -> None:
        self._decode = decode
        self._dataplane = dataplane
        self._extended = extended
        self._call = call
        self._endpoint = endpoint
        self._end_on_error = end_on_error
        self.typed = typed
        """Default for outputs as `contents`, for requests without that parameter."""
        self.sequences: dict[tuple[str, Any], _DecoupledRequest] = {}
        """The last request of each sequence that is being answered, by model and sequence id."""

    def begin(self, data: bytes, slot: ResponseSlot, output: StreamOutput) -> None:
        """Start one request; it may be answered when this returns."""
        call = self._call.child()
        call.size = len(data)
        self._endpoint.begin(call, call.size)
        request: InferenceRequest | None = None
        try:
            call.permission.count()
            request = self._decode(data)
            if TRACEPARENT in request.parameters:
                self._endpoint.continue_trace(call, request.parameters)
            call.decoded()
            self._start(request, call, slot, output, output.defer)
        except ModelNotLoaded:
            assert request is not None
            starting = self._start_when_loaded(request, call, slot, output)
            output.start_task(starting, partial(self.end, call, Code.CANCELLED))
        except Exception as error:
            output.set_response(slot, self.failed(error, request or identify(data), call))

    async def _start_when_loaded(
        self, request: InferenceRequest, call: Call, slot: ResponseSlot, output: StreamOutput
    ) -> None:
        async def start() -> None:
            self._start(request, call, slot, output)

        try:
            await when_loaded(call, start)
        except asyncio.CancelledError:
            self.end(call, Code.CANCELLED)
        except Exception as error:
            output.set_response(slot, self.failed(error, request, call))

    def _start(
        self,
        request: InferenceRequest,
        call: Call,
        slot: ResponseSlot,
        output: StreamOutput,
        defer: Defer | None = None,
    ) -> None:
        servable = self._dataplane.servable_of(call, request)
        if servable.decoupled:
            output.release_slot(slot)
            several = _DecoupledRequest(self, request, output, call, slot.size)
            if request.options is not None:
                answers = partial(self._extended.infer_stream, request, call)
                several.started(IteratedWork(answers, several, "ModelStreamInfer"))
            else:
                several.started(self._dataplane.start(servable, request, call, several, streams=True))
            return
        request_run = _UnaryRequest(self, request, slot, output, call)
        if request.options is not None:
            request_run.started(CoroutineWork(self._extended.infer(request, call), request_run))
        else:
            request_run.started(self._dataplane.start(servable, request, call, request_run, defer))

    def end(self, call: Call, code: Code) -> None:
        """Count a request that has ended."""
        self._endpoint.end(call, code)

    def failed(self, error: Exception, request: InferenceRequest, call: Call) -> bytes | ServingError:
        """Return the encoded response for an error, or the error that ends the call."""
        # A separate function: in the frame that the error passed, a variable for it would be a reference cycle.
        code, refusal = outcome(error), refusal_of(error)
        call.model_name, call.request_id = request.model_name, request.id
        failure = name_request(as_serving_error(error, "ModelStreamInfer"), request.id)
        call.answered()
        # Only an execution's error ends the call, and the call's own deadline, as gRPC has it: rejections are sent
        # in band, whatever the code (spec 2.8).
        if self._call.expired or (self._end_on_error and (call.queued or call.began)):
            self._endpoint.end(call, code, refusal)
            return failure
        encoded = encode_stream_infer(StreamError(request, failure))
        call.encoded(len(encoded))
        self._endpoint.end(call, code, refusal)
        return encoded


class _DecoupledRequest(Sink):
    """A request of `size` bytes with any number of responses.

    Those to a request of a sequence follow those to the request before it. The spec leaves that order open (spec
    2.8).
    """

    __slots__ = (
        "_after",
        "_before",
        "_call",
        "_encoding",
        "_end",
        "_finished",
        "_held",
        "_is_final",
        "_key",
        "_output",
        "_request",
        "_requests",
        "_running",
        "_size",
    )

    def __init__(
        self, requests: StreamRequests, request: InferenceRequest, output: StreamOutput, call: Call, size: int
    ) -> None:
        self._requests = requests
        self._request = request
        self._output = output
        self._call = call
        self._size = size
        self._running: Running | None = None
        self._is_final = False
        """Whether the model has sent its final response."""
        self._encoding = False
        """Whether a response is being encoded on a thread."""
        self._end: tuple[Exception | None] | None = None
        """How the work has ended: with an error, or None; None if it has not."""
        self._finished = False
        self._held: list[bytes | ServingError] = []
        """Responses that wait for those to the request before it in its sequence."""
        self._key = request.model_name, request.parameters.get("sequence_id")
        self._before: _DecoupledRequest | None = None
        self._after: _DecoupledRequest | None = None
        if self._key[1]:
            self._before = before = requests.sequences.get(self._key)
            if before is not None:
                before._after = self
            requests.sequences[self._key] = self
        output.track(self)

    def started(self, running: Running) -> None:
        """Note that the request was started; it may already have ended."""
        if self._end is None:
            self._running = running
        elif not running.over:
            running.cancel()

    def cancel(self) -> None:
        """Cancel the request; what it waits for is dropped."""
        self._held.clear()
        if self._running is not None:
            self._running.cancel()
        elif self._end is not None:
            self._finish()

    def send(self, response: InferenceResponse, /) -> bool:
        """See `Sink`."""
        if self._end is not None:
            return False
        if self._is_final:
            name = response.model_name
            self._end_with_error(Internal(f"model '{name}' sent a response after its final response"))
            return False
        self._is_final = response.final
        response.typed = wants_typed(self._request, self._requests.typed)
        if packing_size(response) > LONG_BYTES:
            self._encoding = True
            self._output.start_task(self._encode_long(response), self._encoding_cancelled)
            return False
        try:
            return self._put(_encoded(response, self._call, final=response.final))
        except Exception as error:
            self._end_with_error(error)
            return False

    async def _encode_long(self, response: InferenceResponse) -> None:
        try:
            encoded = await asyncio.to_thread(_encoded, response, self._call, final=response.final)
        except asyncio.CancelledError:
            self._encoding_cancelled()
        except Exception as error:
            self._encoding = False
            self._end_with_error(error)
        else:
            self._encoding = False  # First: to resume may start to encode the next response.
            has_room = self._put(encoded)
            if self._end is not None:
                self._conclude(*self._end)
            elif has_room:
                self._resume()

    def _encoding_cancelled(self) -> None:
        """Note that the stream was cancelled, and this request with it."""
        self._encoding = False
        if self._end is not None:
            self._conclude(CallCancelled("the call was cancelled"))

    def _end_with_error(self, error: Exception) -> None:
        running = self._running
        self._conclude(error)
        if running is not None:
            running.cancel()

    def end(self, error: ServingError | None, /) -> None:
        """See `Sink`."""
        if self._end is None:
            self._conclude(error)

    def _conclude(self, error: Exception | None) -> None:
        """Note the end of the work, and send an error or the empty final response."""
        self._end, self._running = (error,), None
        if self._encoding:
            return
        if isinstance(error, CallCancelled):
            self._requests.end(self._call, Code.CANCELLED)
        elif error is not None:
            self._put(self._requests.failed(error, self._request, self._call))
        else:
            request = self._request
            if not self._is_final and request.parameters.get(WANTS_EMPTY_FINAL):
                end = InferenceResponse(request.model_name, request.model_version, request.id, [])
                self._put(_encoded(end, self._call, final=True))
            self._requests.end(self._call, Code.OK)
        self._end = (None,)  # An error's frames may refer to this object.
        if self._before is None or isinstance(error, CallCancelled):
            self._finish()

    def _put(self, answer: bytes | ServingError) -> bool:
        if self._before is None:
            return self._output.put(answer, self._resume)
        self._held.append(answer)
        return False

    def _resume(self) -> None:
        if self._running is not None:
            self._running.resume()

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        before, after, sequences = self._before, self._after, self._requests.sequences
        self._before = self._after = None
        if before is not None:
            before._after = after
        if after is not None:
            after._before = before
        elif sequences.get(self._key) is self:
            del sequences[self._key]
            if before is not None:
                sequences[self._key] = before
        self._output.finish(self._size)
        self._output.untrack(self)
        if after is not None and before is None:
            after._send_held()

    def _send_held(self) -> None:
        """Send what waited for the request before it."""
        held, self._held = self._held, []
        room = True
        for answer in held:
            room = self._output.put(answer, self._resume)
        if self._end is not None and not self._encoding:
            self._finish()
        elif held and room:
            self._resume()


class _UnaryRequest(Sink):
    """A request with one response, until that is set in its slot."""

    __slots__ = ("_call", "_output", "_request", "_requests", "_running", "_slot")

    def __init__(
        self,
        requests: StreamRequests,
        request: InferenceRequest,
        slot: ResponseSlot,
        output: StreamOutput,
        call: Call,
    ) -> None:
        self._requests = requests
        self._request = request
        self._slot = slot
        self._output: StreamOutput | None = output
        self._call = call
        self._running: Cancellable | None = None

    def started(self, running: Cancellable) -> None:
        """Note that the request was started; it may already have ended."""
        if self._output is not None:
            self._running = running
            self._output.track(self)

    def cancel(self) -> None:
        """Cancel the request."""
        if self._running is not None:
            self._running.cancel()

    def end(self, error: ServingError | None, /) -> None:
        """See `Sink`."""
        if isinstance(error, CallCancelled):
            self._end_cancelled()
        elif error is not None:
            self._fail(error)

    def send(self, response: InferenceResponse, /) -> bool:
        """See `Sink`: the only response."""
        response.typed = wants_typed(self._request, self._requests.typed)
        if packing_size(response) > LONG_BYTES:
            assert self._output is not None
            self._output.start_task(self._encode_long(response), self._end_cancelled)
            return True
        try:
            encoded = _encoded(response, self._call, final=True)
        except Exception as problem:
            self._fail(problem)
        else:
            self._send(encoded)
        return True

    async def _encode_long(self, response: InferenceResponse) -> None:
        try:
            self._send(await _encoded_sized(response, self._call, final=True))
        except asyncio.CancelledError:
            self._end_cancelled()
        except Exception as error:
            self._fail(error)

    def _end_cancelled(self) -> None:
        self._requests.end(self._call, Code.CANCELLED)
        self._end(None)

    def _send(self, encoded: bytes) -> None:
        # Before it is sent, so that the client's next request finds it counted.
        self._requests.end(self._call, Code.OK)
        self._end(encoded)

    def _fail(self, error: Exception) -> None:
        self._end(self._requests.failed(error, self._request, self._call))

    def _end(self, answer: bytes | ServingError | None) -> None:
        output, self._output, self._running = self._output, None, None
        assert output is not None
        if answer is not None:
            output.set_response(self._slot, answer)
        output.untrack(self)


def _encoded(response: InferenceResponse, call: Call, *, final: bool) -> bytes:
    """Encode a response at once, while `call` measures it."""
    call.answered()
    encoded = small_answer(response, final=final)
    if encoded is None:
        response.parameters[FINAL] = final
        encoded = encode_stream_infer(response)
    call.encoded(len(encoded))
    return encoded


async def _encoded_sized(response: InferenceResponse, call: Call, *, final: bool) -> bytes:
    """Encode as `_encoded`; on a thread if packing the elements takes long."""
    if packing_size(response) > LONG_BYTES:
        return await asyncio.to_thread(_encoded, response, call, final=final)
    return _encoded(response, call, final=final)
