"""A request bound to a model's signature, and its checked response."""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import Any, Final

from triglot.core.call import Call
from triglot.core.errors import Internal, ServingError, without_frames
from triglot.core.request_scheduling import scheduling_of
from triglot.core.response_buffer import NOTHING
from triglot.core.tensor import LONG_BYTES, Array
from triglot.core.types import Answer, InferenceRequest, InferenceResponse
from triglot.executors.work import Receiver, Work
from triglot.model.signature import Signature
from triglot.model.validation import (
    InvalidRequest,
    bind_inputs,
    bind_outputs,
    check_parameters,
    check_requested_outputs,
    check_shapes,
)
from triglot.scheduling.response_cache import ModelCache
from triglot.scheduling.servable import Servable

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


class CheckedResponses(Receiver):
    """Checks what a model returned against its signature, and stores responses in the response cache."""

    __slots__ = ()

    def respond(self, work: Work, answer: Any) -> bool:
        """See `Receiver`. Raises as `response_of`."""
        if (times := work.times) is not None:
            response = times.convert(partial(_checked, work), answer)
        else:
            response = _checked(work, answer)
        for watcher in work.watchers or ():
            watcher.on_response(response)
        return work.sink.send(response)

    def finish(self, work: Work, error: ServingError | None) -> None:
        """See `Receiver`."""
        response: Any = NOTHING
        request = work.request
        if error is None:
            if work.answers_once:
                began = perf_counter()
                try:
                    response = _checked(work, None if work.result is NOTHING else work.result)
                except ServingError as failure:
                    error = without_frames(failure)
                work.call.output_seconds += perf_counter() - began
        elif request is not None and request.lenient_shapes and isinstance(error, Internal):
            # The model's own code may have seen the shapes before they were checked.
            try:
                check_shapes(work.signature, request)
            except ServingError as failure:
                error = without_frames(failure)
        if work.cache_key is not None and error is None and not response.parameters:
            cache = _servable(work).response_cache
            assert cache is not None
            if cache.takes_long(response.outputs):
                work.task = asyncio.get_running_loop().create_task(self._store_copy(work, cache, response))
                return
            began = perf_counter()
            cache.store_copy(work.cache_key, response.outputs)
            work.call.cache_seconds += perf_counter() - began
        self.conclude(work, response, error)

    async def _store_copy(self, work: Work, cache: ModelCache, response: InferenceResponse) -> None:
        """Copy a large response for the cache on a thread.

        It is reported after that, as the model may reuse its memory.
        """
        assert work.cache_key is not None
        began = perf_counter()
        with suppress(asyncio.CancelledError), _servable(work):
            copied = await asyncio.to_thread(cache.copied, response.outputs)
            cache.store(work.cache_key, copied)
        work.call.cache_seconds += perf_counter() - began
        self.conclude(work, response, None)

    def conclude(self, work: Work, response: Any, error: ServingError | None) -> None:
        """End the traces and records, and pass the response, unless it is `NOTHING`, and the end to the sink."""
        for watcher in work.watchers or ():
            if work.streams and response is not NOTHING:
                watcher.on_response(response)
            watcher.on_end(None if work.streams or response is NOTHING else response)
        work.watchers = None
        sink = work.sink
        if response is not NOTHING:
            sink.send(response)
        sink.end(error)


CHECKED: Final = CheckedResponses()


def _servable(work: Work) -> Servable:
    servable = work.owner
    assert isinstance(servable, Servable)
    return servable


def _checked(work: Work, answer: Any) -> Any:
    """Returns the response for what the model returned; an answer to a protocol's message is one already."""
    if work.request is None:
        return answer
    return response_of(_servable(work), work.signature, work.request, answer)
