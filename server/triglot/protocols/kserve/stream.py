"""ModelStreamInfer: many requests and their answers on one call (spec 2.8).

Strategy: the next request is read while earlier ones run, each in a task of its own. Their answers meet in one
bounded queue, which holds the models up when the client reads slowly. Answers of ordinary models leave in the
order of the requests; those of decoupled models leave as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing

from triglot.core.call import Call
from triglot.core.errors import Code, Internal, ServingError, as_serving_error, outcome
from triglot.core.tensor import LONG_BYTES
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.dataplane import DataPlane
from triglot.protocols.kserve.codec import (
    StreamError,
    encode_stream_infer,
    identify,
    packing_size,
)
from triglot.protocols.kserve.errors import name_request
from triglot.protocols.kserve.extended_plane import ExtendedPlane
from triglot.telemetry.observation import Observation
from triglot.telemetry.store import Endpoint

MAX_IN_FLIGHT = 64
"""Requests of one stream that may run at the same time; the next is not read before one has ended."""
MAX_UNSENT = 16
"""Answers of one stream that may wait for the client."""
FINAL = "triton_final_response"
WANTS_EMPTY_FINAL = "triton_enable_empty_final_response"
_VALIDATION = (Code.INVALID_ARGUMENT, Code.NOT_FOUND)


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
        self._answers: asyncio.Queue[bytes | ServingError | None] = asyncio.Queue(MAX_UNSENT)
        self._running: set[asyncio.Task[None]] = set()

    async def run(self, requests: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
        """The answers, encoded. Closing the generator cancels every request that still runs."""
        reader = asyncio.ensure_future(self._read(requests))
        try:
            while (answer := await self._answers.get()) is not None:
                if isinstance(answer, ServingError):
                    try:
                        raise answer
                    finally:
                        del answer  # Its traceback has this frame.
                yield answer
        finally:
            tasks = [reader, *self._running]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _read(self, requests: AsyncIterator[bytes]) -> None:
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        turn.set_result(None)
        try:
            async for data in requests:
                while len(self._running) >= MAX_IN_FLIGHT:
                    await asyncio.wait(self._running, return_when=asyncio.FIRST_COMPLETED)
                my_turn, turn = turn, loop.create_future()
                task = loop.create_task(self._answer(data, my_turn, turn))
                self._running.add(task)
                task.add_done_callback(self._running.discard)
            # The client has sent everything: what runs is finished, then the call ends (spec 0.12).
            while self._running:
                await asyncio.wait(tuple(self._running))
            await self._answers.put(None)
        except Exception as error:
            await self._answers.put(as_serving_error(error, "reading a stream"))

    async def _answer(self, data: bytes, my_turn: asyncio.Future[None], next_turn: asyncio.Future[None]) -> None:
        request, in_order = None, True
        call = self._call.child()
        call.size = len(data)
        observed = Observation(self._endpoint, call, len(data))
        code = Code.OK
        try:
            request = self._decode(data)
            observed.decoded()
            servable = self._dataplane.servable_of(request)
            if servable.decoupled:
                # It keeps no order, but what comes after it must not overtake what came before it.
                in_order = False
                my_turn.add_done_callback(lambda _: _pass_on(next_turn))
                await self._answer_decoupled(request, call, observed)
                return
            if request.options is None:
                with servable:
                    response = await self._dataplane.infer_on(servable, request, call)
            else:
                response = await self._extended.infer(request, call)
            response.parameters[FINAL] = True
            if not my_turn.done():
                await asyncio.shield(my_turn)
            await self._send(response, observed)
        except Exception as error:
            request = request or identify(data)
            call.model_name = request.model_name
            code = outcome(error)
            if in_order:
                await asyncio.shield(my_turn)
            await self._tell(error, request, call, observed)
        except BaseException as error:
            code = outcome(error)
            raise
        finally:
            observed.end(code)
        if in_order:
            _pass_on(next_turn)

    async def _tell(self, error: Exception, request: InferenceRequest, call: Call, observed: Observation) -> None:
        # A function of its own: a frame that the error came through would keep it, and it the frame.
        failure = name_request(as_serving_error(error, "ModelStreamInfer"), request.id)
        # What is wrong with a request stays in band; a model may raise the same codes (spec 2.8).
        if not self._end_on_error or (failure.code in _VALIDATION and not call.began):
            await self._send(StreamError(request, failure), observed)
        else:
            await self._answers.put(failure)

    async def _answer_decoupled(self, request: InferenceRequest, call: Call, observed: Observation) -> None:
        ended = False
        plane = self._dataplane if request.options is None else self._extended
        async with aclosing(plane.infer_stream(request, call)) as responses:
            async for response in responses:
                if ended:
                    raise Internal(f"model '{response.model_name}' has answered after its final answer")
                response.parameters[FINAL] = ended = response.final
                await self._send(response, observed)
        if not ended and request.parameters.get(WANTS_EMPTY_FINAL):
            end = InferenceResponse(request.model_name, request.model_version, request.id, [], {FINAL: True})
            await self._send(end, observed)

    async def _send(self, answer: InferenceResponse | StreamError, observed: Observation) -> None:
        """Encoded here, where it is known whose answer it is."""
        observed.answered()
        if packing_size(answer) > LONG_BYTES:
            encoded = await asyncio.to_thread(encode_stream_infer, answer)
        else:
            encoded = encode_stream_infer(answer)
        observed.encoded(len(encoded))
        if self._answers.full():
            await self._answers.put(encoded)
        else:
            self._answers.put_nowait(encoded)


def _pass_on(turn: asyncio.Future[None]) -> None:
    if not turn.done():
        turn.set_result(None)
