"""The requests of a ModelStreamInfer call: each from its bytes to those of its answers (spec 2.8)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import Code, Internal, ServingError, as_serving_error, outcome, refusal_of
from triglot.core.running import Cancellable, Outcome
from triglot.core.tensor import LONG_BYTES
from triglot.core.trace_context import TRACEPARENT
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.inference import Awaited
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
from triglot.telemetry.calls import Endpoint, Observation

WANTS_EMPTY_FINAL = "triton_enable_empty_final_response"


class Place:
    """A request's place in the line, with its answer once that is there; an error ends the call."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: bytes | ServingError | None = None


class Apart(Protocol):
    """Where the answers go of requests that stand in no line."""

    async def put(self, answer: bytes | ServingError, /) -> None:
        """One of them; waits until there is room."""

    def left(self) -> None:
        """A request that stepped out has been answered."""


class Line(Apart, Protocol):
    """Where a stream's answers go, and what runs for it."""

    def defer(self, work: Callable[[], None], /) -> None:
        """Do it when all requests have begun that are there."""

    def begin(self, work: Coroutine[Any, Any, None], never_began: Callable[[], None], /) -> None:
        """Begin it soon; it raises nothing. `never_began` is called in its place where it is cancelled before."""

    def runs(self, one: Cancellable, /) -> None:
        """It runs from now on."""

    def ended(self, one: Any, /) -> None:
        """It runs no more."""

    def say(self, place: Place, answer: bytes | ServingError, /) -> None:
        """The answer to the request at this place, or what ends the call."""

    def step_out(self, place: Place, /) -> None:
        """The request keeps no order: its answers are `put`, until it has `left`."""


class _InSequence:
    """`Apart` for a request of a sequence: after the answers to the one before it (spec 2.8 leaves it open).

    They were made in this order; what runs for each request may take them in another one.
    """

    def __init__(self, line: Line, before: _InSequence | None) -> None:
        self._line = line
        self._before = before
        self._over = asyncio.Event()

    @property
    def before(self) -> _InSequence | None:
        """The last one before it that is being answered: one without answers may be over sooner."""
        while self._before is not None and self._before._over.is_set():
            self._before = self._before._before
        return self._before

    async def put(self, answer: bytes | ServingError, /) -> None:
        """See `Apart`."""
        while (before := self.before) is not None:
            await before._over.wait()
        await self._line.put(answer)

    def left(self) -> None:
        """See `Apart`."""
        self._before = self.before  # Of those that are over, none is kept for those after it.
        self._over.set()
        self._line.left()


class StreamRequests:
    """Runs the requests of one call, as `decode` reads them, and has `endpoint` count them.

    `extended` runs those with options of single tensors. `end_on_error`: an execution's first error ends the call
    instead of being sent in band.
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
        """Outputs are `contents` where a request does not say."""
        self._sequences: dict[tuple[str, Any], _InSequence] = {}
        """The last request of each that is being answered."""

    def begin(self, data: bytes, place: Place, line: Line) -> None:
        """Run one request; it may be answered when this returns."""
        call = self._call.child()
        call.size = len(data)
        observed = Observation(self._endpoint, call, call.size)
        request: InferenceRequest | None = None
        try:
            call.permission.count()
            request = self._decode(data)
            if TRACEPARENT in request.parameters:
                observed.received_context(request.parameters)
            observed.decoded()
            servable = self._dataplane.servable_of(call.permission, request)
            if servable.decoupled:
                line.step_out(place)
                line.begin(
                    self._answer_apart(request, line, call, observed), partial(_never_began, line, observed)
                )
                return
            one = _OneAnswer(self, request, place, line, call, observed)
            if request.options is not None:
                one.runs(Awaited(self._extended.infer(request, call), one.done))
            else:
                one.runs(self._dataplane.submit(servable, request, call, one.done, line.defer))
        except Exception as error:
            line.say(place, self.failed(error, request or identify(data), call, observed))

    @contextmanager
    def _apart(self, request: InferenceRequest, line: Line) -> Iterator[Apart]:
        """Where its answers go, until they have."""
        sequence = request.parameters.get("sequence_id")
        if not sequence:
            yield line
            return
        key = request.model_name, sequence
        turn = self._sequences[key] = _InSequence(line, self._sequences.get(key))
        try:
            yield turn
        finally:
            if self._sequences[key] is turn:
                del self._sequences[key]
                if turn.before is not None:
                    self._sequences[key] = turn.before

    async def _answer_apart(
        self, request: InferenceRequest, line: Line, call: Call, observed: Observation
    ) -> None:
        """Of a decoupled model. Raises nothing."""
        with self._apart(request, line) as apart:
            try:
                await self._answer_each(request, apart, call, observed)
                observed.end(Code.OK)
            except asyncio.CancelledError as error:
                observed.end(outcome(error))
            except Exception as error:
                with suppress(asyncio.CancelledError):
                    await apart.put(self.failed(error, request, call, observed))
            finally:
                apart.left()

    async def _answer_each(
        self, request: InferenceRequest, apart: Apart, call: Call, observed: Observation
    ) -> None:
        ended = False
        plane = self._dataplane if request.options is None else self._extended
        async with aclosing(plane.infer_stream(request, call)) as responses:
            async for response in responses:
                if ended:
                    raise Internal(f"model '{response.model_name}' sent a response after its final response")
                ended = response.final
                response.typed = wants_typed(request, self.typed)
                await apart.put(await _encoded_sized(response, observed, final=ended))
        if not ended and request.parameters.get(WANTS_EMPTY_FINAL):
            end = InferenceResponse(request.model_name, request.model_version, request.id, [])
            await apart.put(_encoded(end, observed, final=True))

    def failed(
        self, error: Exception, request: InferenceRequest, call: Call, observed: Observation
    ) -> bytes | ServingError:
        """The answer that tells of an error, or what ends the call."""
        # A function of its own: a frame that the error came through would keep it, and it the frame.
        code, refusal = outcome(error), refusal_of(error)
        call.model_name, call.request_id = request.model_name, request.id
        failure = name_request(as_serving_error(error, "ModelStreamInfer"), request.id)
        observed.answered()
        # Only an execution ends the call: what no queue has taken is told in band, whatever the code (spec 2.8).
        if self._end_on_error and (call.times.queued or call.times.began):
            observed.end(code, refusal)
            return failure
        encoded = encode_stream_infer(StreamError(request, failure))
        observed.encoded(len(encoded))
        observed.end(code, refusal)
        return encoded


class _OneAnswer:
    """A request with one answer, until that is in its place in the line."""

    __slots__ = ("_call", "_line", "_observed", "_place", "_request", "_requests", "_running")

    def __init__(
        self,
        requests: StreamRequests,
        request: InferenceRequest,
        place: Place,
        line: Line,
        call: Call,
        observed: Observation,
    ) -> None:
        self._requests = requests
        self._request = request
        self._place = place
        self._line: Line | None = line
        self._call = call
        self._observed = observed
        self._running: Cancellable | None = None

    def runs(self, running: Cancellable) -> None:
        """It was submitted; it may have ended."""
        if self._line is not None:
            self._running = running
            self._line.runs(self)

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        if self._running is not None:
            self._running.cancel()

    def done(self, ended: Outcome) -> None:
        """See `Done`."""
        if ended.cancelled:
            self._leave()
            return
        error, ended.error = ended.error, None
        if error is not None:
            self._fail(error)
            return
        response: InferenceResponse = ended.answer
        response.typed = wants_typed(self._request, self._requests.typed)
        if packing_size(response) > LONG_BYTES:
            assert self._line is not None
            self._line.begin(self._encode_long(response), self._leave)
            return
        try:
            encoded = _encoded(response, self._observed, final=True)
        except Exception as problem:
            self._fail(problem)
        else:
            self._send(encoded)

    async def _encode_long(self, response: InferenceResponse) -> None:
        try:
            self._send(await _encoded_sized(response, self._observed, final=True))
        except asyncio.CancelledError:
            self._leave()
        except Exception as error:
            self._fail(error)

    def _leave(self) -> None:
        self._observed.end(Code.CANCELLED)
        self._end(None)

    def _send(self, encoded: bytes) -> None:
        # Before the client hears of it, so that who asks next finds it counted.
        self._observed.end(Code.OK)
        self._end(encoded)

    def _fail(self, error: Exception) -> None:
        self._end(self._requests.failed(error, self._request, self._call, self._observed))

    def _end(self, answer: bytes | ServingError | None) -> None:
        line, self._line, self._running = self._line, None, None
        assert line is not None
        if answer is not None:
            line.say(self._place, answer)
        line.ended(self)


def _never_began(line: Line, observed: Observation) -> None:
    observed.end(Code.CANCELLED)
    line.left()


def _encoded(response: InferenceResponse, observed: Observation, *, final: bool) -> bytes:
    """Encoded as soon as it is there, while it is known whose answer it is."""
    observed.answered()
    encoded = small_answer(response, final=final)
    if encoded is None:
        response.parameters[FINAL] = final
        encoded = encode_stream_infer(response)
    observed.encoded(len(encoded))
    return encoded


async def _encoded_sized(response: InferenceResponse, observed: Observation, *, final: bool) -> bytes:
    """As `_encoded`; on a thread where the elements take long to pack."""
    if packing_size(response) > LONG_BYTES:
        return await asyncio.to_thread(_encoded, response, observed, final=final)
    return _encoded(response, observed, final=final)
