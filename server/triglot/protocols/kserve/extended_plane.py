"""Inference with tensor options: tensors in shared memory, and classification (spec 2.6, 2.7).

Strategy: this wraps the data plane, for such requests only. Inputs are copied out of their regions before the
model sees them: whatever a client does to a region later, a model, a batch or a cache has the data of the time of
the request. Only for a model that declares it safe (`inputs_in_place`), large inputs are read in place. Outputs
are copied into their regions when the response is complete.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from functools import partial

import numpy as np

from triglot.core.call import Call
from triglot.core.errors import Internal, ServingError
from triglot.core.tensor import DATATYPES, Array, element_count, raw_buffer
from triglot.core.types import (
    InferenceRequest,
    InferenceResponse,
    InputTensor,
    OutputOptions,
    OutputTensor,
    RegionSlice,
)
from triglot.dataplane.dataplane import DataPlane
from triglot.platform.cpus import cpu_count
from triglot.protocols.kserve.classification import classify
from triglot.protocols.kserve.regions import Checkout, Region, Regions
from triglot.scheduling.servable import Servable

OFF_LOOP_BYTES = 2 * 1024 * 1024
"""To copy more bytes takes longer than switching to a thread and back."""
ONE_CORE_BYTES = 16 * 1024 * 1024
"""The same on a single CPU, where a thread does not run in parallel to the loop; blocks it for 1 to 2 ms."""
ELEMENT_WORK = 1024
"""Cost of processing or printing a single element, in bytes copied."""
_LENT = ("FP16", "FP32", "FP64", "BF16")
"""Datatypes lent in place. Integers and booleans are often indices, checked before use; BYTES are unpacked."""


@dataclass(frozen=True, slots=True)
class _Target:
    """Destination of an output; keeps the region open while the request runs."""

    options: OutputOptions
    region: Region | None


Targets = Mapping[str, _Target]
Sources = Sequence[tuple[int, Region, RegionSlice]]
"""Inputs in shared memory: position in the request, region and slice."""


class ExtendedPlane:
    """`infer` and `infer_stream` with the `DataPlane`'s interface. On the event loop."""

    def __init__(self, dataplane: DataPlane, regions: Regions) -> None:
        self._dataplane = dataplane
        self._regions = regions
        self._most_on_loop = ONE_CORE_BYTES if cpu_count() == 1 else OFF_LOOP_BYTES

    async def infer(self, request: InferenceRequest, call: Call) -> InferenceResponse:
        """Run as `DataPlane.infer`.

        Raise also `NotFound` for an unknown region, and as `Regions` and `Region`.
        """
        call.model_name, call.request_id = request.model_name, request.id
        with self._dataplane.servable_of(call, request) as servable:
            targets, sources = self._targets(request), self._sources(request)
            separate_from = targets if _may_borrow(servable) else None
            checkouts = await self._read(servable, request, call, sources, separate_from)
            with _checked(checkouts):
                response = await self._dataplane.infer_on(servable, request, call)
                return await self._finished(servable, targets, response, checkouts)

    async def infer_stream(self, request: InferenceRequest, call: Call) -> AsyncGenerator[InferenceResponse, None]:
        """Run as `DataPlane.infer_stream`; in a region, every response overwrites the previous one."""
        call.model_name, call.request_id = request.model_name, request.id
        with self._dataplane.servable_of(call, request) as servable:
            targets, sources = self._targets(request), self._sources(request)
            await self._read(servable, request, call, sources)
            async with aclosing(self._dataplane.infer_stream_on(servable, request, call)) as responses:
                async for response in responses:
                    yield await self._finished(servable, targets, response)

    def _targets(self, request: InferenceRequest) -> Targets:
        """Return the destinations of outputs with options, by name. Raise as `Regions.find`."""
        assert request.options is not None  # Callers pass only requests with options.
        return {
            name: _Target(options, None if options.region is None else self._regions.find(options.region))
            for name, options in request.options.outputs.items()
        }

    def _sources(self, request: InferenceRequest) -> Sources:
        """Return inputs in shared memory: position, region and slice.

        The regions stay open as long as this exists.
        """
        assert request.options is not None
        return [(at, self._regions.find(part), part) for at, part in request.options.inputs.items()]

    async def _read(
        self,
        servable: Servable,
        request: InferenceRequest,
        call: Call,
        sources: Sources,
        separate_from: Targets | None = None,
    ) -> Sequence[Checkout]:
        """Fill the inputs from their regions.

        With `separate_from`, large ones are lent unless they share a file with one of these targets. Return what
        was lent.
        """
        size = sum(part.size for _, _, part in sources)
        self._regions.check_total(size)
        call.size += size
        reads, checkouts = [], []
        written = {lent.region.file for lent in (separate_from or {}).values() if lent.region is not None}
        for at, region, part in sources:
            if not _can_fit(request.inputs[at], part.size):
                request.inputs[at].data = np.broadcast_to(np.uint8(0), part.size).data
                continue  # The validator reports what is wrong; nothing is copied for that.
            lends = (
                separate_from is not None and request.inputs[at].datatype in _LENT and region.file not in written
            )
            if lends and (checkout := region.lend(part.offset, part.size)) is not None:
                request.inputs[at].data = checkout.data
                checkouts.append(checkout)
                call.borrows = True
                continue
            memory = np.empty(part.size, np.uint8).data
            request.inputs[at].data = memory
            reads.append(partial(region.read, memory, part.offset))
        # Requests of a sequence must not overtake each other on a thread.
        work = size - sum(len(checkout.data) for checkout in checkouts)
        await self._run(work if servable.sequences is None else 0, partial(_run_all, reads))
        return checkouts

    async def _finished(
        self, servable: Servable, targets: Targets, response: InferenceResponse, checkouts: Sequence[Checkout] = ()
    ) -> InferenceResponse:
        """Return the response with its outputs converted, and moved, as requested."""
        work = sum(_work(output, targets.get(output.name), checkouts) for output in response.outputs)
        await self._run(work, partial(_finish, servable, targets, response, checkouts))
        return response

    async def _run(self, work: int, function: Callable[[], None]) -> None:
        if work > self._most_on_loop:
            await self._dataplane.off_loop(function)
        else:
            function()


def _may_borrow(servable: Servable) -> bool:
    """Whether nothing reads the inputs once the response exists, or compares them with other requests' inputs."""
    return servable.model.inputs_in_place and servable.sequences is None and servable.response_cache is None


@contextmanager
def _checked(checkouts: Iterable[Checkout]) -> Iterator[None]:
    """Context manager that raises as `Checkout.check` if lent memory was lost, whatever the model made of it."""
    try:
        yield
    except ServingError:
        _run_all(checkout.check for checkout in checkouts)
        raise
    _run_all(checkout.check for checkout in checkouts)


def _is_lent(array: Array, checkouts: Iterable[Checkout]) -> bool:
    return any(np.may_share_memory(np.frombuffer(checkout.data, np.uint8), array) for checkout in checkouts)


def _can_fit(tensor: InputTensor, size: int) -> bool:
    """Whether a tensor of this shape and datatype can have `size` bytes."""
    datatype = DATATYPES.get(tensor.datatype)
    if datatype is None or any(dim < 0 for dim in tensor.shape):
        return False
    return datatype.dtype.hasobject or size == element_count(tensor.shape) * datatype.itemsize


def _run_all(functions: Iterable[Callable[[], None]]) -> None:
    for function in functions:
        function()


def _work(output: OutputTensor, target: _Target | None, checkouts: Iterable[Checkout]) -> int:
    """Estimates the work for an output, in bytes to copy."""
    if target is None:
        return output.array.nbytes if _is_lent(output.array, checkouts) else 0
    by_element = target.region is None or output.datatype == "BYTES"
    return output.array.size * ELEMENT_WORK if by_element else output.array.nbytes


def _finish(
    servable: Servable, targets: Targets, response: InferenceResponse, checkouts: Sequence[Checkout]
) -> None:
    """Convert and write the outputs.

    Raise `Internal`, before any is written, if one exceeds its slice (spec 2.6).
    """
    writes = []
    # The response's outputs are changed, not the arrays, which may be in the response cache.
    for at, output in enumerate(response.outputs):
        target = targets.get(output.name)
        if (target is None or target.region is None) and _is_lent(output.array, checkouts):
            # Printing, sorting and sending need data that does not change.
            output.array = output.array.copy()
        if target is None:
            continue
        if target.region is None or target.options.region is None:
            labels = servable.labels.get(output.name, ())
            batched = servable.model.max_batch_size > 0
            response.outputs[at] = classify(output, target.options.classes, labels, batched=batched)
            continue
        part, data = target.options.region, _bytes_of(output)
        if len(data) > part.size:
            raise Internal(
                f"shared memory size specified with the request for output '{output.name}' ({part.size} bytes) "
                f"should be at least {len(data)} bytes to hold the results"
            )
        writes.append((output.name, partial(target.region.write, data, part.offset)))
    _run_all(write for _, write in writes)
    response.placed = frozenset(name for name, _ in writes)


def _bytes_of(output: OutputTensor) -> memoryview:
    buffer = raw_buffer(output.array)
    return buffer.reshape(-1).view(np.uint8).data if isinstance(buffer, np.ndarray) else memoryview(buffer)
