"""Requests with options of single tensors: in regions of shared memory, or classified (spec 2.6, 2.7).

Strategy: this stands in front of the data plane, for such requests only. Inputs are copied out of their regions
before the model sees them: whatever their owner does to a region later, a model, a batch or a cache has what was
there when the request came. Outputs are copied into theirs when the answer is complete.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import numpy as np

from triglot.core.call import Call
from triglot.core.cpus import usable_cpus
from triglot.core.errors import Internal
from triglot.core.tensor import DATATYPES, element_count, raw_buffer
from triglot.core.types import InferenceRequest, InferenceResponse, InputTensor, OutputTensor, OutputWish
from triglot.dataplane import DataPlane
from triglot.engine.servable import Servable
from triglot.protocols.kserve.classification import classify
from triglot.protocols.kserve.regions import Region, Regions

OFF_LOOP_BYTES = 2 * 1024 * 1024
"""To copy more takes longer than the way to a thread and back."""
ONE_CORE_BYTES = 16 * 1024 * 1024
"""The same where a thread would only run in place of the loop, not beside it; it is held up for 1 to 2 ms."""
ELEMENT_WORK = 1024
"""An element that is looked at, or printed, for itself takes as long as so many bytes that are copied."""


@dataclass(frozen=True, slots=True)
class _Target:
    """What becomes of an output; the region stays open as long as somebody has it."""

    wish: OutputWish
    region: Region | None


Targets = Mapping[str, _Target]


class ExtendedPlane:
    """`infer` and `infer_stream` as the `DataPlane` has them."""

    def __init__(self, dataplane: DataPlane, regions: Regions) -> None:
        self._dataplane = dataplane
        self._regions = regions
        self._most_on_loop = ONE_CORE_BYTES if len(usable_cpus()) == 1 else OFF_LOOP_BYTES

    async def infer(self, request: InferenceRequest, call: Call) -> InferenceResponse:
        """As `DataPlane.infer`. Raises `NotFound` for a region, too, and whatever else is wrong with it."""
        call.model_name = request.model_name
        with self._dataplane.servable_of(request) as servable:
            targets = await self._read(servable, request, call)
            return await self._finished(servable, targets, await self._dataplane.infer_on(servable, request, call))

    async def infer_stream(self, request: InferenceRequest, call: Call) -> AsyncGenerator[InferenceResponse, None]:
        """As `DataPlane.infer_stream`; in a region, every answer takes the place of the one before."""
        call.model_name = request.model_name
        with self._dataplane.servable_of(request) as servable:
            targets = await self._read(servable, request, call)
            async with aclosing(await self._dataplane.infer_stream_on(servable, request, call)) as responses:
                async for response in responses:
                    yield await self._finished(servable, targets, response)

    async def _read(self, servable: Servable, request: InferenceRequest, call: Call) -> Targets:
        """Fill the inputs that are in regions, and find what the answers need."""
        assert request.options is not None  # Else it would not be here.
        targets = {
            name: _Target(wish, None if wish.region is None else self._regions.find(wish.region))
            for name, wish in request.options.outputs.items()
        }
        sources = [(at, self._regions.find(place), place) for at, place in request.options.inputs.items()]
        size = sum(place.size for _, _, place in sources)
        self._regions.check_total(size)
        call.size += size
        reads = []
        for at, region, place in sources:
            if not _can_fit(request.inputs[at], place.size):
                request.inputs[at].data = np.broadcast_to(np.uint8(0), place.size).data
                continue  # Whoever checks it says what is wrong; nothing is copied for that.
            memory = self._regions.memory(place.size)
            request.inputs[at].data = memory
            reads.append(partial(region.read, memory, place.offset))
        # Requests of a sequence must not overtake each other on a thread.
        await self._run(size if servable.sequences is None else 0, partial(_all, reads))
        return targets

    async def _finished(
        self, servable: Servable, targets: Targets, response: InferenceResponse
    ) -> InferenceResponse:
        """The answer, its outputs where they are wanted and as they are wanted."""
        work = sum(_work(output, targets[output.name]) for output in response.outputs if output.name in targets)
        await self._run(work, partial(_finish, servable, targets, response))
        return response

    async def _run(self, work: int, function: Callable[[], None]) -> None:
        if work > self._most_on_loop:
            await self._dataplane.off_loop(function)
        else:
            function()


def _can_fit(tensor: InputTensor, size: int) -> bool:
    """Whether a tensor of this shape and datatype may have so many bytes."""
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None or any(dim < 0 for dim in tensor.shape):
        return False
    return datatype.dtype.hasobject or size == element_count(tensor.shape) * datatype.itemsize


def _all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _work(output: OutputTensor, target: _Target) -> int:
    """What there is to do with an output, in bytes to copy, about."""
    by_element = target.region is None or output.datatype == "BYTES"
    return output.array.size * ELEMENT_WORK if by_element else output.array.nbytes


def _finish(servable: Servable, targets: Targets, response: InferenceResponse) -> None:
    """Raises `Internal` for an output that is larger than its place, before any is written (spec 2.6)."""
    writes = []
    # The outputs themselves may be in the response cache.
    for at, output in enumerate(response.outputs):
        target = targets.get(output.name)
        if target is None:
            continue
        if target.region is None or target.wish.region is None:
            labels = servable.labels.get(output.name, ())
            batched = servable.model.max_batch_size > 0
            response.outputs[at] = classify(output, target.wish.classes, labels, batched=batched)
            continue
        place, data = target.wish.region, _bytes_of(output)
        if len(data) > place.size:
            raise Internal(
                f"shared memory size specified with the request for output '{output.name}' ({place.size} bytes) "
                f"should be at least {len(data)} bytes to hold the results"
            )
        writes.append((output.name, partial(target.region.write, data, place.offset)))
    _all(write for _, write in writes)
    response.placed = frozenset(name for name, _ in writes)


def _bytes_of(output: OutputTensor) -> memoryview:
    buffer = raw_buffer(output.array)
    return buffer.reshape(-1).view(np.uint8).data if isinstance(buffer, np.ndarray) else memoryview(buffer)
