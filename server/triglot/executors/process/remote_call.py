"""`RemoteCall`, the `Call` that a model's code gets in its process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from triglot.core.call import Call, ModelCall, ModelTask
from triglot.core.permission import Permission
from triglot.core.request_scheduling import Scheduling
from triglot.core.types import NO_INPUT_PARAMETERS
from triglot.executors.process.session import CallState


class RemoteCall(Call):
    """A call in the model's process. `fields` are those of `call_fields`, for the `member` with this index if any.

    Metadata and calls of other models are requested from the server on demand. Deadlines are converted to the
    process's own clock.
    """

    __slots__ = ("_fields", "_member", "_members", "_number", "_state")

    def __init__(self, state: CallState, fields: Mapping[str, Any], member: int | None = None) -> None:
        deadline = fields.get("deadline")
        super().__init__(
            None if deadline is None else deadline + state.clock_offset, partial(state.metadata, member)
        )
        self._state = state
        self._fields = fields
        self._member = member
        self._number = state.number if member is None else state.number + 1 + member
        self.request_id = fields.get("id", "")
        self.signature_name = fields.get("signature", "")
        self.parameters = fields.get("parameters", {})
        self.input_parameters = fields.get("input_parameters", NO_INPUT_PARAMETERS)
        self.model_name, self.model_version = fields.get("model", ""), fields.get("version", 0)
        self.batch_size = fields.get("batch", 1)
        self.size = fields.get("size", 0)
        self.requested_outputs = fields.get("outputs", ())
        if context := fields.get("context"):
            self.context = context[0], context[1]
        if scheduling := fields.get("scheduling"):
            self.scheduling = Scheduling(*scheduling)
        if client := fields.get("client"):
            self.permission = Permission(client)
        self.outlet = _Outlet(state, member)
        self.reach = partial(_reach, state, member)  # Does not refer to this object.
        self._members = tuple(RemoteCall(state, one, index) for index, one in enumerate(fields.get("members", ())))

    @property
    def log_ids(self) -> tuple[str, str]:
        """See `Call.log_ids`."""
        fields = self._fields
        return (fields.get("log_id", ""), self.traceparent) if "context" in fields else super().log_ids

    @property
    def cancelled(self) -> bool:
        """Whether the result is no longer needed; see `Call.cancelled`."""
        return self._state.is_cancelled(self._number) or super().cancelled

    @property
    def members(self) -> Sequence[Call]:
        """The calls that are executed together."""
        return self._members or (self,)

    def apart(self) -> Call:
        """See `Call.apart`."""
        call = Call()
        call.reach = self._state.own
        call.model_name, call.model_version = self.model_name, self.model_version
        return call

    def child(self) -> Call:
        """See `Call.child`."""
        deadline = None if self.deadline is None else self.deadline - self._state.clock_offset
        return RemoteCall(self._state, {**self._fields, "deadline": deadline}, self._member)


class _Outlet:
    """Sends the responses of the call, or of one of its members, to the server."""

    def __init__(self, state: CallState, member: int | None) -> None:
        self._state = state
        self._member = member

    def respond(self, answer: Any) -> bool:
        return self._state.respond(answer, at_once=True, member=self._member)

    def finish(self) -> None:
        self._state.finish(self._member)


def _reach(state: CallState, member: int | None, _: Call, asked: ModelCall | ModelTask) -> Any:
    return state.model(asked, member)
