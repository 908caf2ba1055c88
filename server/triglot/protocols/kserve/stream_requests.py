"""The requests of a ModelStreamInfer call: each from its bytes to those of its answers (spec 2.8)."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import aclosing, contextmanager, suppress
from functools import partial
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.duplex import Running
from triglot.core.errors import Code, Internal, ServingError, as_serving_error, outcome
from triglot.core.repeated import Repeated
from triglot.core.tensor import LONG_BYTES
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane import DataPlane
from triglot.engine.own_task import as_task
from triglot.protocols.kserve.codec import (
    StreamError,
    encode_stream_infer,
    identify,
    packing_size,
)
from triglot.protocols.kserve.errors import name_request
from triglot.protocols.kserve.extended_plane import ExtendedPlane
from triglot.protocols.kserve.small_answers import FINAL, small_answer
from triglot.protocols.repeats import Repeats
from triglot.telemetry.observation import Observation
from triglot.telemetry.store import Endpoint

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

    def begin(self, work: Coroutine[Any, Any, None], /) -> None:
        """Begin it; it raises nothing."""

    def runs(self, one: Running, /) -> None:
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

    `repeats` finds those that repeat others. `extended` runs those with options of single tensors. `end_on_error`:
    an execution's first error ends the call instead of being sent in band.
    """

    def __init__(
        self,
        decode: Callable[[bytes], InferenceRequest],
        repeats: Repeats[InferenceRequest],
        dataplane: DataPlane,
        extended: ExtendedPlane,
        call: Call,
        endpoint: Endpoint,
        *,
        end_on_error: bool,
    ) -> None:
        self._decode = decode
        self._repeats = repeats
        self._dataplane = dataplane
        self._extended = extended
        self._call = call
        self._endpoint = endpoint
        self._end_on_error = end_on_error
        self._sequences: dict[tuple[str, Any], _InSequence] = {}
        """The last request of each that is being answered."""

    def begin(self, data: bytes, place: Place, line: Line) -> None:
        """Run one request; it may be answered when this returns."""
        pattern = self._repeats(data)
        if pattern is None:
            line.begin(self._answer(data, place, line))
            return
        call, observed = self._observed(data)
        reply = _Reply(self, place, line, call, pattern.request)
        repeated = pattern.begin(data, call, observed, reply)
        if not repeated.over:
            reply.repeated = repeated
            line.runs(repeated)

    def _observed(self, data: bytes) -> tuple[Call, Observation]:
        call = self._call.child()
        call.size = len(data)
        return call, Observation(self._endpoint, call, call.size)

    async def _answer(self, data: bytes, place: Place, line: Line) -> None:
        call, observed = self._observed(data)
        answer = self._called(data, place, line, call, observed)
        await self.conclude(answer, place, line, call, observed, partial(identify, data))

    async def _called(
        self, data: bytes, place: Place, line: Line, call: Call, observed: Observation
    ) -> InferenceResponse | None:
        """The one answer, or None. Raises `ServingError`."""
        request = self._decode(data)
        observed.decoded()
        servable = self._dataplane.servable_of(request)
        if servable.decoupled:
            line.step_out(place)
            with self._apart(request, line) as apart:
                await self._answer_apart(request, apart, call, observed)
            return None
        if request.options is not None:
            return await self._extended.infer(request, call)
        with servable:
            return await self._dataplane.infer_on(servable, request, call)

    async def conclude(
        self,
        answer: Awaitable[InferenceResponse | None],
        place: Place,
        line: Line,
        call: Call,
        observed: Observation,
        identity: Callable[[], InferenceRequest],
    ) -> None:
        """Send the answer, or the error that it raises; `identity` says of which model and request it is."""
        encoded = None
        try:
            if (response := await answer) is None:
                return
            encoded = await _encoded(response, observed, final=True)
            # Before the client hears of it, so that who asks next finds it counted.
            observed.end(Code.OK)
        except Exception as error:
            line.say(place, self._told(error, identity(), call, observed))
        except asyncio.CancelledError as error:
            observed.end(outcome(error))
        if encoded is not None:
            line.say(place, encoded)

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
        self, request: InferenceRequest, apart: Apart, call: Call, observed: Observation
    ) -> None:
        """Of a decoupled model. Raises `CancelledError` only."""
        try:
            await as_task()
            await self._answer_each(request, apart, call, observed)
        except Exception as error:
            with suppress(asyncio.CancelledError):
                await apart.put(self._told(error, request, call, observed))
        else:
            observed.end(Code.OK)
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
                    raise Internal(f"model '{response.model_name}' has answered after its final answer")
                ended = response.final
                await apart.put(await _encoded(response, observed, final=ended))
        if not ended and request.parameters.get(WANTS_EMPTY_FINAL):
            end = InferenceResponse(request.model_name, request.model_version, request.id, [])
            await apart.put(await _encoded(end, observed, final=True))

    def _told(
        self, error: Exception, request: InferenceRequest, call: Call, observed: Observation
    ) -> bytes | ServingError:
        """The answer that tells of an error, or what ends the call."""
        # A function of its own: a frame that the error came through would keep it, and it the frame.
        code = outcome(error)
        call.model_name = request.model_name
        failure = name_request(as_serving_error(error, "ModelStreamInfer"), request.id)
        observed.answered()
        # Only an execution ends the call: what no queue has taken is told in band, whatever the code (spec 2.8).
        if self._end_on_error and (call.queued or call.began):
            observed.end(code)
            return failure
        encoded = encode_stream_infer(StreamError(request, failure))
        observed.encoded(len(encoded))
        observed.end(code)
        return encoded


class _Reply:
    """To a request that repeats another one: see `Reply`."""

    __slots__ = ("_call", "_line", "_place", "_request", "_requests", "repeated")

    def __init__(
        self, requests: StreamRequests, place: Place, line: Line, call: Call, request: InferenceRequest
    ) -> None:
        self._requests = requests
        self._place = place
        self._line = line
        self._call = call
        self._request = request
        self.repeated: Repeated | None = None

    @property
    def defer(self) -> Callable[[Callable[[], None]], object]:
        """See `Reply`."""
        return self._line.defer

    def respond(self, message: bytes) -> None:
        """See `Reply`."""
        self._line.say(self._place, message)
        self._line.ended(self.repeated)

    def conclude(self, answer: Awaitable[Any], observed: Observation) -> None:
        """See `Reply`."""
        work = self._requests.conclude(
            answer, self._place, self._line, self._call, observed, lambda: self._request
        )
        self._line.begin(work)
        self._line.ended(self.repeated)

    def given_up(self) -> Code:
        """See `Reply`."""
        self._line.ended(self.repeated)
        return Code.CANCELLED


async def _encoded(response: InferenceResponse, observed: Observation, *, final: bool) -> bytes:
    """Encoded as soon as it is there, while it is known whose answer it is."""
    observed.answered()
    encoded = small_answer(response, final=final)
    if encoded is None:
        response.parameters[FINAL] = final
        if packing_size(response) > LONG_BYTES:
            encoded = await asyncio.to_thread(encode_stream_infer, response)
        else:
            encoded = encode_stream_infer(response)
    observed.encoded(len(encoded))
    return encoded
