"""Small requests that differ only in their tensors' values and their id: parsed once.

Strategy: a client sends the same message again and again with other numbers in it. The bytes between the
numbers are kept as a template; a message of the same length with the same bytes in those places can only mean
the same request, so its values are sliced out and nothing is parsed. Everything else takes the whole way.
"""

from __future__ import annotations

from dataclasses import dataclass

from triglot.core.tensor import DATATYPES
from triglot.core.types import InferenceRequest, InputTensor
from triglot.protocols.kserve.codec import ID, RAW_INPUTS, SCAN_FROM_BYTES, decode_infer
from triglot.protocols.wire import top_level_payloads

MAX_TEMPLATES = 256


@dataclass(frozen=True, slots=True)
class _Template:
    """`literals` are what must be equal, `values` where each input's bytes are, `id` where the id is."""

    literals: tuple[tuple[slice, bytes], ...]
    values: tuple[tuple[InputTensor, slice], ...]
    id: slice | None
    request: InferenceRequest

    def fill(self, data: bytes) -> InferenceRequest | None:
        """The request of `data`; None when it is no message of this template."""
        for place, literal in self.literals:
            if data[place] != literal:
                return None
        request = self.request
        request_id = ""
        if self.id is not None:
            try:
                request_id = data[self.id].decode()
            except UnicodeDecodeError:
                return None
        return InferenceRequest(
            request.model_name,
            request.model_version,
            request_id,
            [InputTensor(one.name, one.datatype, one.shape, data[place]) for one, place in self.values],
            request.outputs,
        )


class InferDecoder:
    """`codec.decode_infer`, with a memory for small messages. Not for use by several threads."""

    def __init__(self) -> None:
        self._by_length: dict[int, _Template] = {}

    def __call__(self, data: bytes) -> InferenceRequest:
        """As `codec.decode_infer`."""
        template = self._by_length.get(len(data))
        if template is not None:
            request = template.fill(data)
            if request is not None:
                return request
        request = decode_infer(data)
        if len(data) < SCAN_FROM_BYTES:
            self._learn(data, request)
        return request

    def _learn(self, data: bytes, request: InferenceRequest) -> None:
        if request.parameters or not all(_fixed_size(tensor) for tensor in request.inputs):
            return
        payloads = [
            (number, start, end) for number, start, end in top_level_payloads(data) if number in (ID, RAW_INPUTS)
        ]
        values = [slice(start, end) for number, start, end in payloads if number == RAW_INPUTS]
        ids = [slice(start, end) for number, start, end in payloads if number == ID]
        if len(values) != len(request.inputs) or len(ids) > 1:
            return
        literals = []
        at = 0
        for _, start, end in [*payloads, (0, len(data), len(data))]:
            literals.append((slice(at, start), data[at:start]))
            at = end
        if len(self._by_length) >= MAX_TEMPLATES:
            self._by_length.clear()
        self._by_length[len(data)] = _Template(
            tuple((place, literal) for place, literal in literals if literal),
            tuple(zip(request.inputs, values, strict=True)),
            ids[0] if ids else None,
            request,
        )


def _fixed_size(tensor: InputTensor) -> bool:
    datatype = DATATYPES.get(tensor.datatype)
    return datatype is not None and bool(datatype.itemsize) and isinstance(tensor.data, bytes)
