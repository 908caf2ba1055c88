"""Answers of a call, and their bytes (grps 1, 3.5)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from triglot.core.scattering import may_scatter
from triglot.core.tensor import Scattered
from triglot.core.types import HttpChunk, InferenceResponse, OutputTensor
from triglot.protocols.grps.codec import (
    SUCCESS_FIELD,
    TENSOR,
    TENSORS,
    encode_message,
    encoding_size,
    failure,
    is_failure,
    with_success,
)
from triglot.protocols.grps.generic_tensor import MAX_CACHED, tensor_head
from triglot.protocols.grps.mapping import answer_message
from triglot.protocols.grps.message import Message
from triglot.protocols.grps.tensors import FLOATS
from triglot.protocols.wire import length_prefix


@dataclass(slots=True)
class Encoded:
    """A complete serialized message."""

    data: bytes | Scattered


Answer = Message | bytes | None
"""A message, or a serialized one; None: customised HTTP, see `Exchange.http_response`."""


def encoded_answer(response: InferenceResponse, request_message: Message | None) -> Encoded | Message:
    """Return what `answer_message` does, serialized already if that is quick."""
    scatters = may_scatter(response)
    pieces = _output_pieces(response.outputs)
    if pieces is None:
        return answer_message(response, request_message)
    return Encoded(Scattered(pieces) if scatters else b"".join(pieces))


def _output_pieces(outputs: Sequence[OutputTensor]) -> list[Any] | None:
    """Return a GrpsMessage with status OK in pieces to join, for the usual response: one output of floats.

    Return None for others: `encode_message` handles them all, but takes several times as long.
    """
    if len(outputs) != 1:
        return None
    output = outputs[0]
    array, row = output.array, FLOATS.get(output.datatype)
    if row is None or array.dtype is not row.wire or len(output.name) > MAX_CACHED:
        return None
    if not (array.size and array.flags.c_contiguous):
        return None
    return [_outputs_head(output.name, row.dtype, array.shape, array.nbytes), array]


@lru_cache(maxsize=1024)
def _outputs_head(name: str, dtype: int, shape: tuple[int, ...], float_bytes: int) -> bytes:
    """Return all bytes before the floats."""
    head = tensor_head(name, dtype, shape, float_bytes)
    size = len(head) + float_bytes
    prefix = length_prefix(TENSOR, size)
    return b"".join([SUCCESS_FIELD, length_prefix(TENSORS, len(prefix) + size), prefix, head])


def answer_size(answer: Encoded | Answer) -> int:
    """Estimates what `encode_answer` processes, in bytes of text."""
    return encoding_size(answer) if isinstance(answer, Message) else 0


def encode_answer(answer: Encoded | Answer) -> bytes:
    """Return a serialized GrpsMessage, with its status."""
    if isinstance(answer, Encoded):
        return bytes(answer.data)
    if isinstance(answer, Message):
        return encode_message(answer)
    return with_success(answer or b"")


def scatter_answer(answer: Encoded | Answer) -> bytes | Scattered:
    """Return what `encode_answer` does, but with large arrays sent in place."""
    return answer.data if isinstance(answer, Encoded) else encode_answer(answer)


def scatter_item(answer: Encoded | Message | bytes) -> bytes | Scattered:
    """Return what `encode_item` does, but with large arrays sent in place."""
    return answer.data if isinstance(answer, Encoded) else encode_item(answer)


def encode_item(answer: Encoded | Message | bytes) -> bytes:
    """Encode an answer of a stream as `encode_answer`, but keep a status FAILURE that a model sends (grps 3.5)."""
    if isinstance(answer, HttpChunk):
        return failure(500, "customized_http_stream_respond is for customized HTTP only")
    return answer if isinstance(answer, bytes) and is_failure(answer) else encode_answer(answer)
