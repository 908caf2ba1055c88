"""A decoded Predict call, the layout that small ones share, and the decoder that parses each layout once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from triglot.core.errors import ServingError
from triglot.core.http import HttpRequest
from triglot.core.tensor import MessageBytes, array_over
from triglot.core.types import Exchange, InputTensor
from triglot.model.grps_types import LISTS, PACKED_FLOATS
from triglot.model.signature import Signature
from triglot.protocols.grps.codec import SCAN_FROM_BYTES, TENSOR, TENSORS
from triglot.protocols.grps.message import GrpsTensor, Message
from triglot.protocols.layouts import LayoutDecoder, Make, Rules, Values, length_tag
from triglot.protocols.wire import LENGTH, fields


class RequestLayout:
    """Small messages that differ only in their tensors' floats: same model, names and shapes as `message`.

    `signature` is the one that the tensors were bound to without a cast; their bytes are then its inputs.
    """

    __slots__ = ("_heads", "_inputs", "model", "signature")

    def __init__(self, message: Message, tensors: list[GrpsTensor]) -> None:
        self.model = message.model
        self.signature: Signature | None = None
        # Copied, since the message may be changed later.
        self._heads = [
            (tensor.name, tensor.dtype, tensor.shape, tensor.elements.dtype, tensor.elements.shape)
            for tensor in tensors
        ]
        self._inputs: list[tuple[str, str, tuple[int, ...]]] = []

    def message(self, values: Sequence[bytes]) -> Message:
        """Return the message with these floats."""
        tensors = [
            GrpsTensor(name, dtype, shape, array_over(value, wire, count))
            for (name, dtype, shape, wire, count), value in zip(self._heads, values, strict=True)
        ]
        return Message(self.model, tensors)

    def learn(self, signature: Signature, message: Message, inputs: list[InputTensor]) -> None:
        """Remember the inputs that such a message gave, unless they were cast, which depends on their values."""
        tensors = message.data
        if isinstance(tensors, list) and [id(tensor.data) for tensor in inputs] == [
            id(tensor.elements) for tensor in tensors
        ]:
            self._inputs = [(tensor.name, tensor.datatype, tensor.shape) for tensor in inputs]
            self.signature = signature

    def inputs(self, values: Sequence[bytes]) -> list[InputTensor]:
        """Return the inputs of `signature` with these floats."""
        return [
            InputTensor(name, datatype, shape, value)
            for (name, datatype, shape), value in zip(self._inputs, values, strict=True)
        ]


@dataclass(slots=True)
class Request:
    """A Predict call: the model that it names, and its `message`, decoded or `encoded`, or the `error` in it.

    The `error` itself is never raised: frames in its traceback would keep the request alive. `layout` is that
    of a small message, whose floats are `values`. `http` is the request of customised HTTP, which has no message
    (grps 3.6). `exchange` is that of a model that takes messages, once it was called.
    """

    model: str = ""
    message: Message | None = None
    encoded: MessageBytes | None = None
    error: ServingError | None = None
    http: HttpRequest | None = None
    layout: RequestLayout | None = None
    values: Sequence[bytes] = ()
    exchange: Exchange | None = None


_CUT: Final[Rules] = {
    length_tag(TENSORS): {length_tag(TENSOR): {length_tag(number): None for number in PACKED_FLOATS}}
}


class RequestDecoder(LayoutDecoder[Request]):
    """`decode` for small messages; one with a known layout gets a `layout` in place of a message."""

    def __init__(self, decode: Callable[[MessageBytes], Request]) -> None:
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
