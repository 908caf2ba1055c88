"""A Predict call as its service takes it, and what many small ones have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from triglot.core.errors import ServingError
from triglot.core.http import HttpRequest
from triglot.core.tensor import array_over
from triglot.core.types import InputTensor
from triglot.model.signature import Signature
from triglot.protocols.grps.message import GrpsTensor, Message


class Form:
    """Small messages that differ in nothing but their tensors' floats, of `message`'s model, names and shapes.

    `signature` is the one that the tensors were bound to as they are; then their bytes are its inputs.
    """

    __slots__ = ("_heads", "_inputs", "model", "signature")

    def __init__(self, message: Message, tensors: list[GrpsTensor]) -> None:
        self.model = message.model
        self.signature: Signature | None = None
        # Copied out: whoever has the message may change it.
        self._heads = [
            (tensor.name, tensor.dtype, tensor.shape, tensor.elements.dtype, tensor.elements.shape)
            for tensor in tensors
        ]
        self._inputs: list[tuple[str, str, tuple[int, ...]]] = []

    def message(self, values: Sequence[bytes]) -> Message:
        """The message with these floats."""
        tensors = [
            GrpsTensor(name, dtype, shape, array_over(value, wire, count))
            for (name, dtype, shape, wire, count), value in zip(self._heads, values, strict=True)
        ]
        return Message(self.model, tensors)

    def learn(self, signature: Signature, message: Message, inputs: list[InputTensor]) -> None:
        """A message of this form gave these inputs; what was cast depends on its values, and is not kept."""
        tensors = message.data
        if isinstance(tensors, list) and [id(one.data) for one in inputs] == [id(one.elements) for one in tensors]:
            self._inputs = [(one.name, one.datatype, one.shape) for one in inputs]
            self.signature = signature

    def inputs(self, values: Sequence[bytes]) -> list[InputTensor]:
        """The inputs of `signature` with these floats."""
        return [
            InputTensor(name, datatype, shape, value)
            for (name, datatype, shape), value in zip(self._inputs, values, strict=True)
        ]


@dataclass(slots=True)
class Request:
    """A Predict call: the `message`, decoded or `encoded`, or why there is none, and the model that it names.

    The `error` is never raised itself: its traceback would hold the frames that hold the request.
    `form`: that of a small message, which then are `values`. `http`: the request of customised HTTP, which has no
    message (grps 3.6).
    """

    model: str = ""
    message: Message | None = None
    encoded: bytes | None = None
    error: ServingError | None = None
    http: HttpRequest | None = None
    form: Form | None = None
    values: Sequence[bytes] = ()
