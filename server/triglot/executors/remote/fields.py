"""The fields of calls and responses: what a frame has in its JSON text, besides the tensors in a region.

A call has those of `call_fields`. The fields of a response are its `parameters` and `output_parameters`, and
whether it is `final` or `partial`, unless they are empty. A list of responses has, for each in order, its fields
with the number of its tensors, or the error of its request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Internal
from triglot.core.request_scheduling import PLAIN
from triglot.core.tensor import Array
from triglot.core.types import Answer
from triglot.executors.remote.channel import Message
from triglot.executors.remote.failures import failure_fields
from triglot.executors.remote.shared_memory import Row, packed
from triglot.executors.remote.values import dumps

_NON_TENSOR_FIELDS = ("parameters", "output_parameters", "final", "partial")


def call_fields(call: Call, *, log_ids: bool = False) -> dict[str, Any]:
    """In the server: returns the fields of a call for its process, without defaults.

    `log_ids`: include the ids that the process logs.
    """
    fields = _own_fields(call, log_ids)
    if (members := members_of(call)) is not None:
        fields["members"] = [_own_fields(member, log_ids) for member in members]
    return fields


def fields_of(value: Any, *without: str) -> dict[str, Any]:
    """Return the fields of a dataclass, by name: far quicker to read than a value with its class."""
    return {field.name: getattr(value, field.name) for field in fields(value) if field.name not in without}


def members_of(call: Call) -> Sequence[Call] | None:
    """Return the calls that are executed together; None for a call that is executed alone."""
    members = call.members
    return None if len(members) == 1 and members[0] is call else members


def _own_fields(call: Call, log_ids: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": call.request_id,
        "signature": call.signature_name,
        "parameters": call.parameters,
        "input_parameters": dict(call.input_parameters),
        "output_parameters": dict(call.output_parameters),
        "model": call.model_name,
        "version": call.model_version,
        "batch": call.batch_size,
        "size": call.size,
        "outputs": list(call.requested_outputs),
        "client": call.client,
    }
    if log_ids or call.span is not None:  # Otherwise the headers are read only when the model's code needs them.
        fields["log_id"] = call.log_ids[0]
        fields["context"] = call.traceparent, call.tracestate
    if call.scheduling is not PLAIN:
        fields["scheduling"] = fields_of(call.scheduling)
    found = {name: value for name, value in fields.items() if value}
    if call.deadline is not None:
        found["remaining"] = call.remaining  # The clocks of two machines differ.
    return found


def rows_of(answer: object, model: str) -> list[Row]:
    """Return the rows of what this model's `infer` returned. Raise `Internal` for an invalid response."""
    if not isinstance(answer, Mapping):
        raise Internal(f"model '{model}' returned {type(answer).__name__}, expected a dict of outputs by name")
    try:
        return packed(answer)
    except TypeError as error:
        raise Internal(f"model '{model}' returned output {error}") from None


def non_tensor_fields(answer: object) -> dict[str, Any]:
    """Return the fields of a response besides its tensors."""
    if not isinstance(answer, Answer):
        return {}
    fields = {name: getattr(answer, name) for name in _NON_TENSOR_FIELDS}
    return {name: value for name, value in fields.items() if value}


def text_of(fields: Mapping[str, Any], model: str) -> bytes:
    """Return the fields as JSON, nothing without any. Raise `Internal` for parameters that cannot be sent."""
    try:
        return dumps(fields) if fields else b""
    except TypeError as error:
        raise Internal(f"model '{model}' returned response parameters: {error}") from None


def answer_of(message: Message) -> Any:
    """Return the received response as a dict; another kind of result; None if there is neither."""
    tensors = message.tensors
    if not message.text:
        return tensors
    return message.fields.get("result") if tensors is None else _result_with_tensors(tensors, message.fields)


def _result_with_tensors(tensors: dict[str, Array], fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields.keys().isdisjoint(_NON_TENSOR_FIELDS):
        return tensors
    return Answer(
        tensors, **{"parameters": {}} | {name: fields[name] for name in _NON_TENSOR_FIELDS if name in fields}
    )


# --- lists ---


def grouped(named: Iterable[tuple[str, Array]], counts: Iterable[int]) -> Iterator[dict[str, Array]]:
    """Yield the tensors of each of several requests or responses. `counts`: their numbers of tensors."""
    tensors = iter(named)
    for count in counts:
        yield dict(islice(tensors, count))


def list_rows(answers: Sequence[Any], model: str) -> tuple[list[Row], list[dict[str, Any]]]:
    """Return the rows of what this model's `infer_batch` returned, and the fields of each response.

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
    """Return the received responses; for each that failed, what `error_of` returns for its error's fields."""
    fields: list[dict[str, Any]] = message.fields["answers"]
    groups = grouped(message.named or (), (field.get("count", 0) for field in fields))
    return [
        error_of(field["error"]) if "error" in field else _result_with_tensors(tensors, field)
        for field, tensors in zip(fields, groups, strict=True)
    ]
