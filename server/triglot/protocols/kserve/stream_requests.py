"""The requests of a ModelStreamInfer call: each from its bytes to those of its responses (spec 2.8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import Code, Internal, ServingError, as_serving_error, outcome, refusal_of
from triglot.core.running import CallCancelled, Cancellable, Sink
from triglot.core.tensor import LONG_BYTES
from triglot.core.trace_context import TRACEPARENT
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.inference import CoroutineWork
from triglot.protocols.kserve.codec import (
    FINAL,
    StreamError,
    encode_stream_infer,
    identify,
    packing_size,
    small_answer,
)
from triglot.protocols.kserve.errors import name_request
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


class ResponseSink(Protocol):
    """Sink for the responses of a request that keep no order with other requests' responses."""

    async def put(self, answer: bytes | ServingError, /) -> None:
        """Send one response, or the error that ends the call; waits until there is room."""

    def finish(self, size: int, /) -> None:
        """Note that all responses of the request, of `size` bytes, were sent."""


class StreamOutput(ResponseSink, Protocol):
    """Sink for a stream's responses, and owner of what runs for it. On the event loop."""

    def defer(self, work: Callable[[], None], /) -> None:
        """Call `work` once all requests that have arrived are started."""

    def start_task(self, work: Coroutine[Any, Any, None], never_began: Callable[[], None], /) -> None:
        """Run `work`, which raises nothing, as a task. If it is cancelled before it starts, call `never_began`."""

    def track(self, one: Cancellable, /) -> None:
        """Register a running request."""

    def untrack(self, one: Any, /) -> None:
        """Remove a request that has ended."""

    def set_response(self, slot: ResponseSlot, answer: bytes | ServingError, /) -> None:
        """Set the response to the request of this slot, or the error that ends the call."""

    def release_slot(self) -> None:
        """Free the newest slot: its request's responses are `put` without an order, until it calls `finish`."""


class _SequenceSink:
    """`ResponseSink` for a request of a sequence: its responses follow those of the request before it.

    The spec leaves that order open (spec 2.8). Responses are made in this order, but the tasks that send them may
    run in another one.
    """

    def __init__(self, output: StreamOutput, before: _SequenceSink | None) -> None:
        self._output = output
        self._before = before
        self._over = asyncio.Event()

    @property
    def before(self) -> _SequenceSink | None:
        """The previous request that is still being answered, skipping those that have ended."""
        while self._before is not None and self._before._over.is_set():
            self._before = self._before._before
        return self._before

    async def put(self, answer: bytes | ServingError, /) -> None:
        while (before := self.before) is not None:
            await before._over.wait()
        await self._output.put(answer)

    def finish(self, size: int, /) -> None:
        self._before = self.before  # Requests that have ended must not be kept by those after them.
        self._over.set()
        self._output.finish(size)


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
        self._sequences: dict[tuple[str, Any], _SequenceSink] = {}
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
            servable = self._dataplane.servable_of(call.permission, request)
            if servable.decoupled:
                output.release_slot()
                output.start_task(
                    self._answer_decoupled(request, output, call, slot.size),
                    partial(self._never_began, output, call, slot.size),
                )
                return
            one = _UnaryRequest(self, request, slot, output, call)
            if request.options is not None:
                one.started(CoroutineWork(self._extended.infer(request, call), one))
            else:
                one.started(self._dataplane.start(servable, request, call, one, output.defer))
        except Exception as error:
            output.set_response(slot, self.failed(error, request or identify(data), call))

    @contextmanager
    def _sink(self, request: InferenceRequest, output: StreamOutput) -> Iterator[ResponseSink]:
        """Context manager for the sink of a request's responses."""
        sequence = request.parameters.get("sequence_id")
        if not sequence:
            yield output
            return
        key = request.model_name, sequence
        sequenced = self._sequences[key] = _SequenceSink(output, self._sequences.get(key))
        try:
            yield sequenced
        finally:
            if self._sequences[key] is sequenced:
                del self._sequences[key]
                if sequenced.before is not None:
                    self._sequences[key] = sequenced.before

    async def _answer_decoupled(
        self, request: InferenceRequest, output: StreamOutput, call: Call, size: int
    ) -> None:
        """Answer a request of `size` bytes to a decoupled model. Raises nothing."""
        with self._sink(request, output) as sink:
            try:
                await self._answer_each(request, sink, call)
                self._endpoint.end(call, Code.OK)
            except asyncio.CancelledError as error:
                self._endpoint.end(call, outcome(error))
            except Exception as error:
                with suppress(asyncio.CancelledError):
                    await sink.put(self.failed(error, request, call))
            finally:
                sink.finish(size)

    async def _answer_each(self, request: InferenceRequest, sink: ResponseSink, call: Call) -> None:
        ended = False
        plane = self._dataplane if request.options is None else self._extended
        async with aclosing(plane.infer_stream(request, call)) as responses:
            async for response in responses:
                if ended:
                    raise Internal(f"model '{response.model_name}' sent a response after its final response")
                ended = response.final
                response.typed = wants_typed(request, self.typed)
                await sink.put(await _encoded_sized(response, call, final=ended))
        if not ended and request.parameters.get(WANTS_EMPTY_FINAL):
            end = InferenceResponse(request.model_name, request.model_version, request.id, [])
            await sink.put(_encoded(end, call, final=True))

    def _never_began(self, output: StreamOutput, call: Call, size: int) -> None:
        self._endpoint.end(call, Code.CANCELLED)
        output.finish(size)

    def end(self, call: Call, code: Code) -> None:
        """Count a request that has ended."""
        self._endpoint.end(call, code)

    def failed(self, error: Exception, request: InferenceRequest, call: Call) -> bytes | ServingError:
        """Returns the encoded response for an error, or the error that ends the call."""
        # A separate function: in the frame that the error passed, a variable for it would be a reference cycle.
        code, refusal = outcome(error), refusal_of(error)
        call.model_name, call.request_id = request.model_name, request.id
        failure = name_request(as_serving_error(error, "ModelStreamInfer"), request.id)
        call.answered()
        # Only an execution's error ends the call: rejections are sent in band, whatever the code (spec 2.8).
        if self._end_on_error and (call.queued or call.began):
            self._endpoint.end(call, code, refusal)
            return failure
        encoded = encode_stream_infer(StreamError(request, failure))
        call.encoded(len(encoded))
        self._endpoint.end(call, code, refusal)
        return encoded


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
