"""What is variable in a small GrpsMessage: the packed floats of its tensors."""

from __future__ import annotations

from collections.abc import Iterator

from triglot.core.tensor import array_over
from triglot.grps_types import LISTS, PACKED_FLOATS
from triglot.protocols.grps.codec import SCAN_FROM_BYTES, decode_message
from triglot.protocols.grps.message import GrpsTensor, Message
from triglot.protocols.templates import TemplateDecoder, Variables
from triglot.protocols.wire import LENGTH, fields

_GTENSORS, _TENSOR = 5, 1


def message_decoder() -> TemplateDecoder[Message]:
    """`codec.decode_message`, with a memory for small messages."""
    return TemplateDecoder(decode_message, _find, SCAN_FROM_BYTES)


def _find(data: bytes, message: Message) -> Variables[Message] | None:
    tensors = message.data
    if not isinstance(tensors, list) or message.status is not None:
        return None
    lists = [
        (number, slice(start, end))
        for gtensors in _places(data, _GTENSORS, slice(0, len(data)))
        for tensor in _places(data, _TENSOR, gtensors)
        for number, wire_type, start, end in fields(data, tensor.start, tensor.stop)
        if wire_type == LENGTH and number in PACKED_FLOATS
    ]
    # One list for each tensor, the one that its dtype chooses, so that nothing is merged or left out.
    expected = [(_number_of(tensor), tensor.elements.nbytes) for tensor in tensors]
    if [(number, place.stop - place.start) for number, place in lists] != expected:
        return None
    model = message.model
    # Copied out: whoever has the message may change it.
    heads = [
        (tensor.name, tensor.dtype, tensor.shape, tensor.elements.dtype, tensor.elements.shape)
        for tensor in tensors
    ]

    def make(values: list[bytes]) -> Message:
        made = [
            GrpsTensor(name, dtype, shape, array_over(value, wire, count))
            for (name, dtype, shape, wire, count), value in zip(heads, values, strict=True)
        ]
        return Message(model, made)

    return Variables([place for _, place in lists], make)


def _places(data: bytes, wanted: int, within: slice) -> Iterator[slice]:
    for number, wire_type, start, end in fields(data, within.start, within.stop):
        if number == wanted and wire_type == LENGTH:
            yield slice(start, end)


def _number_of(tensor: GrpsTensor) -> int:
    row = LISTS.get(tensor.dtype)
    return row.number if row is not None and row.number in PACKED_FLOATS and tensor.elements.size else 0
