"""What is variable in a small GrpsMessage: the packed floats of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from triglot.grps_types import LISTS, PACKED_FLOATS
from triglot.protocols.grps.codec import SCAN_FROM_BYTES, TENSOR, TENSORS
from triglot.protocols.grps.message import GrpsTensor
from triglot.protocols.grps.request import Form, Request
from triglot.protocols.templates import TemplateDecoder, Variables
from triglot.protocols.wire import LENGTH, fields


def request_decoder(decode: Callable[[bytes], Request]) -> TemplateDecoder[Request]:
    """`decode`, with a memory for small messages: what is like an earlier one has a `form`, and no message."""
    return TemplateDecoder(decode, _find, SCAN_FROM_BYTES)


def _find(data: bytes, request: Request) -> Variables[Request] | None:
    message = request.message
    if message is None or message.status is not None or not isinstance(message.data, list):
        return None
    tensors = message.data
    lists = [
        (number, slice(start, end))
        for gtensors in _places(data, TENSORS, slice(0, len(data)))
        for tensor in _places(data, TENSOR, gtensors)
        for number, wire_type, start, end in fields(data, tensor.start, tensor.stop)
        if wire_type == LENGTH and number in PACKED_FLOATS
    ]
    # One list for each tensor, the one that its dtype chooses, so that nothing is merged or left out.
    expected = [(_number_of(tensor), tensor.elements.nbytes) for tensor in tensors]
    if [(number, place.stop - place.start) for number, place in lists] != expected:
        return None
    form = Form(message, tensors)
    places = [place for _, place in lists]

    def make(data: bytes) -> Request:
        return Request(form.model, None, None, None, None, form, [data[place] for place in places])

    return Variables(places, make, places)


def _places(data: bytes, wanted: int, within: slice) -> Iterator[slice]:
    for number, wire_type, start, end in fields(data, within.start, within.stop):
        if number == wanted and wire_type == LENGTH:
            yield slice(start, end)


def _number_of(tensor: GrpsTensor) -> int:
    row = LISTS.get(tensor.dtype)
    return row.number if row is not None and row.number in PACKED_FLOATS and tensor.elements.size else 0
