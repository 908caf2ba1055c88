"""ModelStreamInfer: many requests and their answers on one call (spec 2.8).

Strategy: requests begin as they come, so many at the same time. Answers of ordinary models stand in a line, in
the order of the requests, until it is their turn; those of decoupled models stand in none. What may leave is
offered to the transport, all that a burst of requests makes together. What the transport does not take waits for
it, and holds the models up.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, suppress

from triglot.core.call import Call
from triglot.core.duplex import Duplex, Running
from triglot.core.errors import Code, Internal, ServingError, as_serving_error, outcome
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
from triglot.telemetry.observation import Observation
from triglot.telemetry.store import Endpoint

MAX_IN_FLIGHT = 64
"""Requests of one stream that may run at the same time; the next is not read before one has ended."""
MAX_UNSENT = 16
"""Answers of one stream that may wait for the client before decoupled models are held up."""
WANTS_EMPTY_FINAL = "triton_enable_empty_final_response"
_VALIDATION = (Code.INVALID_ARGUMENT, Code.NOT_FOUND)


class _Place:
    """A request's place in the line, with its answer once that is there; an error ends the call."""

    __slots__ = ("answer",)

    def __init__(self) -> None:
        self.answer: bytes | ServingError | None = None


class InferStream:
    """One call; `decode` reads its requests, which are counted at `endpoint`.

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
    ) -> None:
        self._decode = decode
        self._dataplane = dataplane
        self._extended = extended
        self._call = call
        self._endpoint = endpoint
        self._end_on_error = end_on_error
        self._loop = asyncio.get_running_loop()
        self._running: set[Running] = set()
        self._line: deque[_Place] = deque()
        self._apart = 0
        """Requests to decoupled models that run."""
        self._ready: deque[bytes] = deque()
        self._room = asyncio.Event()
        """Set when there was room for answers of decoupled models."""
        self._failure: ServingError | None = None
        """What ends the call, after the answers that are ready."""
        self._taking = self._full = self._due = self._yielded = self._closed = False
        self._woken: asyncio.Future[None] | None = None
        self._rest: asyncio.Future[None] | None = None

    async def run(self, requests: Duplex) -> AsyncGenerator[bytes, None]:
        """The answers that `requests` does not take, encoded. Closing it cancels every request that still runs."""
        self._requests = requests
        try:
            requests.listen(self._take)
            while not self._is_over:
                if self._ready:
                    self._yielded = True
                    yield self._ready.popleft()
                    self._yielded = False
                    self._send()
                elif self._failure is not None:
                    self._raise()
                else:
                    self._woken = self._loop.create_future()
                    await self._woken
        finally:
            await self._close()

    @property
    def _is_over(self) -> bool:
        """Whether the client has sent everything, and all of it is answered (spec 0.12)."""
        return not (self._line or self._apart or self._ready or self._failure) and self._requests.ended

    def _raise(self) -> None:
        failure, self._failure = self._failure, None
        assert failure is not None
        try:
            raise failure
        finally:
            del failure  # Its traceback has this frame.

    async def _close(self) -> None:
        """Cancel what runs, and wait for its end; it is cancelled again when this is."""
        self._closed = True
        self._failure = None
        cancelled = False
        try:
            await self._requests.close()
        except asyncio.CancelledError:
            cancelled = True
        while self._running:
            for one in tuple(self._running):
                one.cancel()
            self._rest = self._loop.create_future()
            try:
                await self._rest
            except asyncio.CancelledError:
                cancelled = True
        for place in self._line:
            place.answer = None
        if cancelled:
            raise asyncio.CancelledError

    def _ended(self, one: Running) -> None:
        self._running.discard(one)
        if self._rest is not None and not self._running and not self._rest.done():
            self._rest.set_result(None)

    # --- requests ---

    def _take(self) -> None:
        """Begin the requests that are there, as many as may run."""
        if self._taking or self._closed:
            return
        if asyncio.current_task() is not None:
            # What a task begins runs a little later, and would be overtaken by what comes until then.
            self._loop.call_soon(self._take)
            return
        self._taking = True
        line, ready, requests = self._line, self._ready, self._requests
        try:
            while len(line) + self._apart < MAX_IN_FLIGHT and (data := requests.take()) is not None:
                place = _Place()
                line.append(place)
                requests.begin(self._answer(data, place), self._running, self._ended)
                if len(ready) >= MAX_IN_FLIGHT:
                    self._offer()
                    if len(ready) >= MAX_IN_FLIGHT:
                        break
            self._full = not self._has_room
        except Exception as error:
            self._fail(as_serving_error(error, "reading a stream"))
        finally:
            self._taking = False
        self._send()

    @property
    def _has_room(self) -> bool:
        """Whether one more request may run."""
        return len(self._line) + self._apart < MAX_IN_FLIGHT and len(self._ready) < MAX_IN_FLIGHT

    async def _answer(self, data: bytes, place: _Place) -> None:
        request = encoded = None
        call = self._call.child()
        call.size = len(data)
        observed = Observation(self._endpoint, call, call.size)
        try:
            request = self._decode(data)
            observed.decoded()
            servable = self._dataplane.servable_of(request)
            if servable.decoupled:
                self._step_out(place)
                await self._answer_apart(request, call, observed)
            else:
                if request.options is None:
                    with servable:
                        response = await self._dataplane.infer_on(servable, request, call)
                else:
                    response = await self._extended.infer(request, call)
                observed.answered()
                encoded = small_answer(response, final=True) or await _encoded(response, final=True)
                observed.encoded(len(encoded))
                # Before the client hears of it, so that who asks next finds it counted.
                observed.end(Code.OK)
        except Exception as error:
            self._say(place, self._told(error, request or identify(data), call, observed))
        except asyncio.CancelledError as error:
            observed.end(outcome(error))
        if encoded is not None:
            self._say(place, encoded)

    async def _answer_apart(self, request: InferenceRequest, call: Call, observed: Observation) -> None:
        """Of a decoupled model. Raises `CancelledError` only."""
        try:
            await as_task()
            await self._answer_each(request, call, observed)
        except Exception as error:
            with suppress(asyncio.CancelledError):
                await self._put(self._told(error, request, call, observed))
        else:
            observed.end(Code.OK)
        finally:
            self._apart -= 1
            self._soon()

    async def _answer_each(self, request: InferenceRequest, call: Call, observed: Observation) -> None:
        ended = False
        plane = self._dataplane if request.options is None else self._extended
        async with aclosing(plane.infer_stream(request, call)) as responses:
            async for response in responses:
                if ended:
                    raise Internal(f"model '{response.model_name}' has answered after its final answer")
                ended = response.final
                await self._put(await _observed(response, observed, final=ended))
        if not ended and request.parameters.get(WANTS_EMPTY_FINAL):
            end = InferenceResponse(request.model_name, request.model_version, request.id, [])
            await self._put(await _observed(end, observed, final=True))

    def _told(
        self, error: Exception, request: InferenceRequest, call: Call, observed: Observation
    ) -> bytes | ServingError:
        """The answer that tells of an error, or what ends the call."""
        # A function of its own: a frame that the error came through would keep it, and it the frame.
        code = outcome(error)
        call.model_name = request.model_name
        failure = name_request(as_serving_error(error, "ModelStreamInfer"), request.id)
        observed.answered()
        # What is wrong with a request stays in band; a model may raise the same codes (spec 2.8).
        if self._end_on_error and (failure.code not in _VALIDATION or call.began):
            observed.end(code)
            return failure
        encoded = encode_stream_infer(StreamError(request, failure))
        observed.encoded(len(encoded))
        observed.end(code)
        return encoded

    # --- answers ---

    def _step_out(self, place: _Place) -> None:
        """It keeps no order, but what comes after it must not overtake what came before it."""
        self._apart += 1
        self._line.remove(place)
        self._advance()

    def _say(self, place: _Place, answer: bytes | ServingError) -> None:
        place.answer = answer
        if self._line and self._line[0] is place:
            self._advance()

    def _advance(self) -> None:
        """Those at the head of the line that have their answers leave it."""
        line = self._line
        while line and (answer := line[0].answer) is not None:
            line.popleft().answer = None  # An error's frames have the place.
            if not isinstance(answer, bytes):
                self._fail(answer)
            elif self._failure is None:
                self._ready.append(answer)
        if len(self._running) == 1 and not self._taking:
            self._send()
        else:
            self._soon()

    async def _put(self, answer: bytes | ServingError) -> None:
        """One that stands in no line; waits until there is room."""
        while len(self._ready) >= MAX_UNSENT:
            self._room.clear()
            await self._room.wait()
        if not isinstance(answer, bytes):
            self._fail(answer)
        elif self._failure is None:
            self._ready.append(answer)
        self._soon()

    def _fail(self, failure: ServingError) -> None:
        if self._failure is None and not self._closed:
            self._failure = failure

    def _soon(self) -> None:
        """Send what is ready, together with what else there is by then."""
        if not self._taking and not self._due:
            self._due = True
            self._loop.call_soon(self._send)

    def _send(self) -> None:
        """What is ready leaves, or is yielded; then there may be room for more."""
        self._due = False
        if self._closed:
            return
        self._offer()
        if self._full and self._has_room:
            self._take()
        elif self._ready or self._failure is not None or self._is_over:
            self._wake()

    def _wake(self) -> None:
        if self._woken is not None and not self._woken.done():
            self._woken.set_result(None)

    def _offer(self) -> None:
        if self._ready and not self._yielded:
            self._requests.offer(self._ready)
        if len(self._ready) < MAX_UNSENT:
            self._room.set()


async def _encoded(response: InferenceResponse, *, final: bool) -> bytes:
    response.parameters[FINAL] = final
    if packing_size(response) > LONG_BYTES:
        return await asyncio.to_thread(encode_stream_infer, response)
    return encode_stream_infer(response)


async def _observed(response: InferenceResponse, observed: Observation, *, final: bool) -> bytes:
    """Encoded as soon as it is there, while it is known whose answer it is."""
    observed.answered()
    encoded = small_answer(response, final=final) or await _encoded(response, final=final)
    observed.encoded(len(encoded))
    return encoded
