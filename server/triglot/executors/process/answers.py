"""Encoding of responses for frames: the tensors in a region, and the other fields as the frame's JSON text.

The fields of a response are its `parameters`, and whether it is `final` or `partial`, unless they are empty. A
list of responses has, for each in order, its fields with the number of its tensors, or the error of its request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

from triglot.core.errors import Internal
from triglot.core.tensor import Array
from triglot.core.types import Answer
from triglot.executors.process.channel import Message
from triglot.executors.process.failures import failure_fields
from triglot.executors.process.shared_memory import Row, packed
from triglot.executors.process.values import dumps

_NON_TENSOR_FIELDS = ("parameters", "final", "partial")


def rows_of(answer: object, model: str) -> list[Row]:
    """Returns the rows of what this model's `infer` returned. Raises `Internal` for an invalid response."""
    if not isinstance(answer, Mapping):
        raise Internal(f"model '{model}' returned {type(answer).__name__}, expected a dict of outputs by name")
    try:
        return packed(answer)
    except TypeError as error:
        raise Internal(f"model '{model}' returned output {error}") from None


def non_tensor_fields(answer: object) -> dict[str, Any]:
    """Returns the fields of a response besides its tensors."""
    if not isinstance(answer, Answer):
        return {}
    fields = {"parameters": answer.parameters, "final": answer.final, "partial": answer.partial}
    return {name: value for name, value in fields.items() if value}


def text_of(fields: Mapping[str, Any], model: str) -> bytes:
    """Returns the fields as JSON, nothing without any. Raises `Internal` for parameters that cannot be sent."""
    try:
        return dumps(fields) if fields else b""
    except TypeError as error:
        raise Internal(f"model '{model}' returned response parameters: {error}") from None


def answer_of(message: Message) -> Any:
    """Returns the received response as a dict; the result of a `ModelTask`; None if there is neither."""
    tensors = message.tensors
    if not message.text:
        return tensors
    return message.fields.get("said") if tensors is None else _whole(tensors, message.fields)


def _whole(tensors: dict[str, Array], fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields.keys().isdisjoint(_NON_TENSOR_FIELDS):
        return tensors
    final, partial = fields.get("final", False), fields.get("partial", False)
    return Answer(tensors, fields.get("parameters", {}), final=final, partial=partial)


# --- lists ---


def grouped(named: Iterable[tuple[str, Array]], counts: Iterable[int]) -> Iterator[dict[str, Array]]:
    """Yields the tensors of each of several requests or responses. `counts`: their numbers of tensors."""
    tensors = iter(named)
    for count in counts:
        yield dict(islice(tensors, count))


def list_rows(answers: Sequence[Any], model: str) -> tuple[list[Row], list[dict[str, Any]]]:
    """Returns the rows of what this model's `infer_batch` returned, and the fields of each response.

    An invalid response fails only its own request.
    """
    rows: list[Row] = []
    fields: list[dict[str, Any]] = []
    for answer in answers:
        try:
            if isinstance(answer, BaseException):
                raise answer
            own, other = rows_of(answer, model), non_tensor_fields(answer)
            text_of(other, model)
        except BaseException as error:  # Fails this request only.
            fields.append({"error": failure_fields(error)})
        else:
            rows += own
            fields.append({**other, "count": len(own)})
    return rows, fields


def list_of(message: Message, error_of: Any) -> list[Any]:
    """Returns the received responses; for each that failed, what `error_of` returns for its error's fields."""
    fields: list[dict[str, Any]] = message.fields["answers"]
    groups = grouped(message.named or (), (one.get("count", 0) for one in fields))
    return [
        error_of(one["error"]) if "error" in one else _whole(tensors, one)
        for one, tensors in zip(fields, groups, strict=True)
    ]
