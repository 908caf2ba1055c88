"""Answers that are kept for equal requests (spec 5.4): one store for all models, bounded by bytes.

Strategy: a model version has a cache of its own, so another version, or the same one loaded again, never finds its
answers. What is kept is a read-only copy: a model may go on writing into what it gave. Of equal requests that run
at the same time each is executed, since none depends on the end of another's call then. Everything but copying and
digesting belongs to the loop.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from triglot.core.call import Call
from triglot.core.readings import Reading
from triglot.core.tensor import Array, raw_buffer
from triglot.core.types import InferenceRequest, OutputTensor, ParameterValue

OFF_LOOP_BYTES = 128 * 1024
"""More than this takes longer to digest or to copy than the way to a thread and back."""
ELEMENT_BYTES = 256
"""An element of BYTES takes as long as so many bytes of numbers, about."""
ENTRY_BYTES = 1024
"""What an answer needs besides its tensors, about."""
_SCHEDULING = ("priority", "timeout")

Key = tuple[int, bytes]
Copies = tuple[list[OutputTensor], int]
"""Copies of outputs, and the bytes that they need."""


@dataclass(frozen=True, slots=True)
class _Entry:
    outputs: Sequence[OutputTensor]
    size: int
    owner: ModelCache


class ResponseCache:
    """The answers of all models, at most so many bytes of them: the one that was not asked for longest goes."""

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self.bytes = 0
        self._entries: OrderedDict[Key, _Entry] = OrderedDict()
        self._numbers = itertools.count()

    def for_model(self, *, ordered: bool = False) -> ModelCache:
        """A place for the answers of one loaded version of a model; `ordered`: the order of its inputs counts."""
        return ModelCache(self, next(self._numbers), ordered)

    def get(self, key: Key) -> _Entry | None:
        """What is kept, and was asked for last now."""
        entry = self._entries.get(key)
        if entry is not None:
            self._entries.move_to_end(key)
        return entry

    def put(self, key: Key, entry: _Entry) -> None:
        """Keep it, in the place of what has to go for it."""
        if key in self._entries:
            self.drop(key)  # Two equal requests ran at the same time.
        self._entries[key] = entry
        self.bytes += entry.size
        entry.owner.bytes += entry.size
        entry.owner.keys.add(key)
        while self.bytes > self.most_bytes:
            oldest = next(iter(self._entries))
            self._entries[oldest].owner.evictions += 1
            self.drop(oldest)

    def drop(self, key: Key) -> None:
        """Keep it no longer."""
        entry = self._entries.pop(key)
        self.bytes -= entry.size
        entry.owner.bytes -= entry.size
        entry.owner.keys.discard(key)


class ModelCache:
    """The kept answers of one loaded version of a model."""

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
        """Whether `key` is to be called on a thread."""
        return _work(inputs) > OFF_LOOP_BYTES

    def key(self, inputs: Mapping[str, Array], call: Call, request: InferenceRequest) -> Key:
        """What is the same for equal requests: signature, inputs, parameters, and which outputs are wanted."""
        order = tuple(inputs) if self._ordered else ()
        asked = (
            call.signature_name,
            tuple(request.outputs),
            request.lenient_shapes,
            order,
            _custom(call.parameters),
            _by_input(call),
        )
        return self._number, digest(asked, inputs)

    def find(self, key: Key) -> list[OutputTensor] | None:
        """The outputs of an equal request that went well before."""
        entry = self._cache.get(key)
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        return list(entry.outputs)

    def takes_long(self, outputs: Sequence[OutputTensor]) -> bool:
        """Whether `copied` is to be called on a thread."""
        return OFF_LOOP_BYTES < _size(outputs) <= self._cache.most_bytes - ENTRY_BYTES

    def keep(self, key: Key, outputs: Sequence[OutputTensor]) -> None:
        """Keep a copy of these outputs, unless they are too large, or have elements that somebody could change."""
        self.store(key, self.copied(outputs))

    def copied(self, outputs: Sequence[OutputTensor]) -> Copies | None:
        """What `store` takes; None for what is not to be kept. On any thread."""
        if _size(outputs) + ENTRY_BYTES > self._cache.most_bytes:
            return None
        try:
            return _copied(outputs)
        except MemoryError:
            return None  # The answer itself is there.

    def store(self, key: Key, copied: Copies | None) -> None:
        """Keep these copies."""
        if copied is None or self._closed:
            return
        entry = _Entry(*copied, self)
        if entry.size <= self._cache.most_bytes:
            self._cache.put(key, entry)

    def close(self) -> None:
        """Keep nothing any more."""
        self._closed = True
        for key in tuple(self.keys):
            self._cache.drop(key)

    def readings(self) -> Iterator[Reading]:
        """Hits, misses, and what is kept."""
        hits = "Response cache hits."
        misses = "Response cache misses."
        evictions = "Responses evicted from the response cache to make room."
        yield Reading("response_cache_hits", hits, self.hits, counter=True)
        yield Reading("response_cache_misses", misses, self.misses, counter=True)
        yield Reading("response_cache_evictions", evictions, self.evictions, counter=True)
        yield Reading("response_cache_bytes", "Bytes of the model's responses in the response cache.", self.bytes)


def _work(inputs: Mapping[str, Array]) -> int:
    """What there is to digest, in bytes of numbers, about."""
    return sum(
        [array.size * ELEMENT_BYTES if array.dtype.hasobject else array.nbytes for array in inputs.values()]
    )


def _custom(parameters: Mapping[str, ParameterValue]) -> list[tuple[str, ParameterValue]]:
    """What a request says to the model: not when it is to be executed."""
    return sorted(item for item in parameters.items() if item[0] not in _SCHEDULING)


def _by_input(call: Call) -> list[tuple[str, list[tuple[str, ParameterValue]]]]:
    return sorted((name, sorted(values.items())) for name, values in call.input_parameters.items())


def digest(asked: object, inputs: Mapping[str, Array]) -> bytes:
    """Of everything that an answer depends on; `asked` tells it all by its `repr`. Runs on any thread."""
    # Each `repr` and each tensor's bytes end where they say, so two different requests never look the same.
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
    """Read-only copies and the bytes that they need; None for elements that somebody could change."""
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
        copies.append(OutputTensor(output.name, output.datatype, array))
    return copies, size
