"""The JSON fields of calls: of a call that is sent to a process, and of a call that its model makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from triglot.core.call import Call, ModelCall, ModelTask
from triglot.core.request_scheduling import PLAIN


def call_fields(call: Call, *, log_ids: bool = False) -> dict[str, Any]:
    """In the server: returns the fields of a call for its process, without defaults.

    `log_ids`: include the ids that the process logs.
    """
    fields = _own_fields(call, log_ids)
    if (members := members_of(call)) is not None:
        fields["members"] = [_own_fields(member, log_ids) for member in members]
    return fields


def members_of(call: Call) -> Sequence[Call] | None:
    """Returns the calls that are executed together; None for a call that is executed alone."""
    members = call.members
    return None if len(members) == 1 and members[0] is call else members


def _own_fields(call: Call, log_ids: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "id": call.request_id,
        "signature": call.signature_name,
        "parameters": call.parameters,
        "input_parameters": dict(call.input_parameters),
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
        one = call.scheduling
        fields["scheduling"] = (
            one.priority,
            one.timeout,
            one.sequence_id,
            one.sequence_start,
            one.sequence_end,
        )
    found = {name: value for name, value in fields.items() if value}
    if call.deadline is not None:
        found["remaining"] = call.remaining  # The clocks of two machines differ.
    return found


def asked_fields(asked: ModelCall | ModelTask, member: int | None) -> dict[str, Any]:
    """In the process: returns the fields of a model's call of another model, or of its task, without the inputs.

    `member`: index of the member on whose behalf it is made; None: the call itself.
    """
    if isinstance(asked, ModelTask):
        return {"task": asdict(asked), "member": member}
    return {
        "model": asked.model,
        "version": asked.version,
        "outputs": list(asked.outputs),
        "signature_name": asked.signature_name,
        "parameters": None if asked.parameters is None else dict(asked.parameters),
        "request_id": asked.request_id,
        "member": member,
    }


def streams(asked: ModelCall | ModelTask) -> bool:
    """Returns whether the model reads the responses as a stream."""
    return isinstance(asked, ModelCall) and asked.stream


def inputs_of(asked: ModelCall | ModelTask) -> Mapping[str, Any] | None:
    """Returns the tensors that accompany `asked_fields`; None for a task."""
    return asked.inputs if isinstance(asked, ModelCall) else None


def asked_of(fields: Mapping[str, Any], inputs: Mapping[str, Any], *, stream: bool) -> ModelCall | ModelTask:
    """In the server: returns the model's call or task that has these fields."""
    if "task" in fields:
        return ModelTask(**fields["task"])
    return ModelCall(inputs=inputs, stream=stream, **fields)
