"""Decoder for small GrpsMessages that parses all but the tensors' packed floats once per layout."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from triglot.model.grps_types import LISTS, PACKED_FLOATS
from triglot.protocols.grps.codec import SCAN_FROM_BYTES, TENSOR, TENSORS
from triglot.protocols.grps.message import GrpsTensor
from triglot.protocols.grps.request import Request, RequestLayout
from triglot.protocols.layouts import LayoutDecoder, Make, Rules, Values, length_tag
from triglot.protocols.wire import LENGTH, fields

_CUT: Rules = {length_tag(TENSORS): {length_tag(TENSOR): {length_tag(number): None for number in PACKED_FLOATS}}}


class RequestDecoder(LayoutDecoder[Request]):
    """`decode` for small messages; one with a known layout gets a `layout` in place of a message."""

    def __init__(self, decode: Callable[[bytes], Request]) -> None:
        super().__init__(decode, _CUT, _learn, SCAN_FROM_BYTES)


def _learn(data: bytes, request: Request) -> Make[Request] | None:
    message = request.message
    if message is None or message.status is not None or not isinstance(message.data, list):
        return None
    tensors = message.data
    lists = [
        (number, end - start)
        for gtensors in _places(data, TENSORS, slice(0, len(data)))
        for tensor in _places(data, TENSOR, gtensors)
        for number, wire_type, start, end in fields(data, tensor.start, tensor.stop)
        if wire_type == LENGTH and number in PACKED_FLOATS
    ]
    # Exactly one list per tensor, the one of its dtype, so that nothing is merged or ignored.
    if lists != [(_number_of(tensor), tensor.elements.nbytes) for tensor in tensors]:
        return None
    layout = RequestLayout(message, tensors)

    def make(values: Values) -> Request:
        return Request(layout.model, layout=layout, values=values)

    return make


def _places(data: bytes, wanted: int, within: slice) -> Iterator[slice]:
    for number, wire_type, start, end in fields(data, within.start, within.stop):
        if number == wanted and wire_type == LENGTH:
            yield slice(start, end)


def _number_of(tensor: GrpsTensor) -> int:
    row = LISTS.get(tensor.dtype)
    return row.number if row is not None and row.number in PACKED_FLOATS and tensor.elements.size else 0
