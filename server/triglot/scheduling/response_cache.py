"""The response cache: responses that are reused for equal requests (spec 5.4); one store for all models.

Strategy: each loaded model version has a cache of its own, so another version, or a reloaded one, never finds
its responses. Entries are read-only copies: a model may keep writing into the arrays it returned. Of equal
requests that run at the same time each is executed, so that none depends on how another's call ends. Everything
but copying and digesting belongs to the event loop.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from triglot.core.call import Call
from triglot.core.statistics import Reading
from triglot.core.tensor import Array, raw_buffer
from triglot.core.types import InferenceRequest, OutputTensor, ParameterValue, TensorParameters

OFF_LOOP_BYTES = 128 * 1024
"""Above this size, digesting or copying on a thread is faster than on the event loop, switches included."""
ELEMENT_BYTES = 256
"""A BYTES element takes about as long to digest as this many bytes of numbers."""
ENTRY_BYTES = 1024
"""Approximate size of an entry besides its tensors."""
_SCHEDULING = ("priority", "timeout")

Key = tuple[int, bytes]
Copies = tuple[list[OutputTensor], int]
"""Copies of outputs, and their size in bytes."""


@dataclass(frozen=True, slots=True)
class _Entry:
    outputs: Sequence[OutputTensor]
    size: int
    owner: ModelCache


class ResponseCache:
    """The cached responses of all models, up to `max_bytes`; the least recently used entry is evicted first."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._numbers = itertools.count()

    def for_model(self, *, ordered: bool = False) -> ModelCache:
        """Return a cache for one loaded model version; `ordered`: the order of inputs is part of the key."""
        return ModelCache(self, next(self._numbers), ordered)

    def get(self, key: Key) -> _Entry | None:
        """Return an entry, and mark it as most recently used."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: Key, entry: _Entry) -> None:
        """Store an entry, and evict others until it fits."""
        if key in self._entries:
            self.drop(key)  # Two equal requests ran at the same time.
        self._entries[key] = entry
        self.bytes += entry.size
        entry.owner.bytes += entry.size
        entry.owner.keys.add(key)
        while self.bytes > self.max_bytes:
            oldest = next(iter(self._entries))
            self._entries[oldest].owner.evictions += 1
            self.drop(oldest)

    def drop(self, key: Key) -> None:
        """Remove an entry."""
        entry = self._entries.pop(key)
        self.bytes -= entry.size
        entry.owner.bytes -= entry.size
        entry.owner.keys.discard(key)


class ModelCache:
    """The cached responses of one loaded model version."""

    def __init__(self, cache: ResponseCache, number: int, ordered: bool) -> None:
        self._cache = cache
        self._number = number
        self._ordered = ordered
        self._closed = False
        self.keys: set[Key] = set()
        self.bytes = 0
        self.hits = 0
        self.misses = 0
        self.evictions = 0

    def digests_long(self, inputs: Mapping[str, Array]) -> bool:
        """Return whether `key` should be called on a thread."""
        return _work(inputs) > OFF_LOOP_BYTES

    def key(self, inputs: Mapping[str, Array], call: Call, request: InferenceRequest) -> Key:
        """Return the key of a request: a digest of signature, inputs, parameters and requested outputs."""
        order = tuple(inputs) if self._ordered else ()
        asked = (
            call.signature_name,
            tuple(request.outputs),
            request.lenient_shapes,
            order,
            _custom(call.parameters),
            _by_tensor(call.input_parameters),
            _by_tensor(call.output_parameters),
        )
        return self._number, digest(asked, inputs)

    def find(self, key: Key) -> list[OutputTensor] | None:
        """Return the cached outputs for an equal request, or None."""
        entry = self._cache.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        return list(entry.outputs)

    def takes_long(self, outputs: Sequence[OutputTensor]) -> bool:
        """Return whether `copied` should be called on a thread."""
        return OFF_LOOP_BYTES < _size(outputs) <= self._cache.max_bytes - ENTRY_BYTES

    def store_copy(self, key: Key, outputs: Sequence[OutputTensor]) -> None:
        """Store a copy of these outputs, unless they are too large or have mutable elements."""
        self.store(key, self.copied(outputs))

    def copied(self, outputs: Sequence[OutputTensor]) -> Copies | None:
        """Return copies for `store`, or None if they cannot be cached. On any thread."""
        if _size(outputs) + ENTRY_BYTES > self._cache.max_bytes:
            return None
        try:
            return _copied(outputs)
        except MemoryError:
            return None  # Without it the response can still be sent.

    def store(self, key: Key, copied: Copies | None) -> None:
        """Store these copies, unless the cache was closed meanwhile."""
        if copied is None or self._closed:
            return
        entry = _Entry(*copied, self)
        if entry.size <= self._cache.max_bytes:
            self._cache.put(key, entry)

    def close(self) -> None:
        """Remove all entries, and store nothing further."""
        self._closed = True
        for key in tuple(self.keys):
            self._cache.drop(key)

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics: hits, misses, evictions, bytes."""
        hits = "Response cache hits."
        misses = "Response cache misses."
        evictions = "Responses evicted from the response cache to make room."
        yield Reading("response_cache_hits", hits, self.hits, counter=True)
        yield Reading("response_cache_misses", misses, self.misses, counter=True)
        yield Reading("response_cache_evictions", evictions, self.evictions, counter=True)
        yield Reading("response_cache_bytes", "Bytes of the model's responses in the response cache.", self.bytes)


def _work(inputs: Mapping[str, Array]) -> int:
    """Return about how much there is to digest, in bytes of numbers."""
    return sum(
        [array.size * ELEMENT_BYTES if array.dtype.hasobject else array.nbytes for array in inputs.values()]
    )


def _custom(parameters: Mapping[str, ParameterValue]) -> list[tuple[str, ParameterValue]]:
    """Return the parameters that the model sees, without those for scheduling."""
    return sorted(item for item in parameters.items() if item[0] not in _SCHEDULING)


def _by_tensor(parameters: TensorParameters) -> list[tuple[str, list[tuple[str, ParameterValue]]]]:
    return sorted((name, sorted(values.items())) for name, values in parameters.items())


def digest(asked: object, inputs: Mapping[str, Array]) -> bytes:
    """Return a digest of all that a response depends on; `asked` is digested by its `repr`. On any thread."""
    # Each `repr`, and each tensor's bytes, have a known end, so different requests never have the same digest
    # input.
    summary = hashlib.blake2b(repr(asked).encode(), digest_size=32)
    for name in sorted(inputs):
        array = inputs[name]
        summary.update(repr((name, array.dtype.str, array.shape)).encode())
        raw = raw_buffer(array)
        summary.update(raw if isinstance(raw, bytes | bytearray | memoryview) else raw.reshape(-1).view("u1").data)
    return summary.digest()


def _size(outputs: Sequence[OutputTensor]) -> int:
    return sum([output.array.nbytes for output in outputs])


def _copied(outputs: Sequence[OutputTensor]) -> Copies | None:
    """Return read-only copies and their size; None if elements are mutable."""
    copies = []
    size = ENTRY_BYTES
    for output in outputs:
        array = output.array.copy()
        size += array.nbytes
        if array.dtype.hasobject:
            elements = array.ravel().tolist()
            if not all(isinstance(element, bytes | str) for element in elements):
                return None
            size += sum(map(sys.getsizeof, elements))
        array.flags.writeable = False
        copies.append(OutputTensor(output.name, output.datatype, array, output.parameters))
    return copies, size
