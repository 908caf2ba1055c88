"""Coroutines on the path of a request: what takes long is done on a thread, or waits for its sequence."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from time import perf_counter
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.errors import ServingError, Unavailable
from triglot.core.tensor import Array
from triglot.core.types import InferenceRequest, InferenceResponse
from triglot.executors.work import Work
from triglot.model.signature import Signature
from triglot.model.validation import bind_inputs, takes_long
from triglot.repository.manager.sequences import SequenceRoutes
from triglot.scheduling.loaded_version import LoadedVersion
from triglot.scheduling.response_cache import Key, ModelCache
from triglot.scheduling.servable import Servable


class Path(Protocol):
    """What these coroutines need of `RequestPath`, which starts them."""

    sequences: SequenceRoutes

    @property
    def stopping(self) -> bool:
        """Whether the server is shutting down."""

    def find_cached(
        self, cache: ModelCache, work: Work, request: InferenceRequest, key: Key | None = None, began: float = 0.0
    ) -> bool:
        """Look up the response in the cache, and end the work with it if it is there."""

    def fail(self, servable: Servable, work: Work, error: Exception) -> None:
        """End work that could not be submitted."""


async def submit_prepared(path: Path, servable: Servable, work: Work, request: InferenceRequest) -> None:
    """Bind the inputs, look the response up in the cache, and submit the work unless it was there."""
    try:
        if not work.inputs:
            began = perf_counter()
            work.inputs = await _bound(path, servable, work.signature, request, work.call)
            work.call.input_seconds += perf_counter() - began
        if (cache := servable.response_cache) is not None and not work.streams:
            began = perf_counter()
            key = await asyncio.to_thread(cache.key, work.inputs, work.call, request)
            if path.find_cached(cache, work, request, key, began):
                return
    except asyncio.CancelledError:
        return  # If raised, the task would keep it: a cycle of task, frames and work.
    except Exception as error:
        path.fail(servable, work, error)
        return
    work.task = work.defer = None  # Requests that arrived with it were started long ago.
    servable.submit(work)


async def _bound(
    path: Path, servable: Servable, signature: Signature, request: InferenceRequest, call: Call
) -> dict[str, Array]:
    """Return the bound inputs, and register a request that starts a sequence."""
    if servable.sequences is None:
        return await _bind(signature, request)
    # Requests of one sequence must not overtake each other on threads.
    async with servable.sequences.binding:
        inputs = await _bind(signature, request)
    if call.scheduling.sequence_start:
        if path.stopping:
            raise Unavailable("the server is shutting down: it continues open sequences and starts no new ones")
        path.sequences.begin(servable, call.scheduling.sequence_id)
    return inputs


async def _bind(signature: Signature, request: InferenceRequest) -> dict[str, Array]:
    """Return the bound inputs; raises as `bind_inputs`. Large BYTES inputs are bound on a thread."""
    if signature.takes_bytes and takes_long(request):
        return await asyncio.to_thread(bind_inputs, signature, request)
    return bind_inputs(signature, request)


async def store_copy(
    version: LoadedVersion,
    work: Work,
    cache: ModelCache,
    response: InferenceResponse,
    conclude: Callable[[Work, Any, ServingError | None], None],
) -> None:
    """Copy a large response for the cache on a thread.

    It is reported after that, as the model may reuse its memory.
    """
    assert work.cache_key is not None
    began = perf_counter()
    with suppress(asyncio.CancelledError), version:
        copied = await asyncio.to_thread(cache.copied, response.outputs)
        cache.store(work.cache_key, copied)
    work.call.cache_seconds += perf_counter() - began
    conclude(work, response, None)
