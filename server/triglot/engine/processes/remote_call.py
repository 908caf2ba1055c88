"""A call as a process sees it: what it is told at once, and what it asks for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any, Protocol

from triglot.core.call import Call, ModelCall, ModelTask, Reach
from triglot.core.request_scheduling import PLAIN, Scheduling
from triglot.core.types import NO_INPUT_PARAMETERS


class Server(Protocol):
    """The way back to the server, of one call of `infer`; `member`: of which of its members, None for itself."""

    @property
    def number(self) -> int:
        """The call's; its members have the numbers that follow."""

    def is_cancelled(self, number: int) -> bool:
        """Whether nobody waits any more for the call of this number."""

    def answer(self, answer: object, *, at_once: bool = False, member: int | None = None) -> bool:
        """See `Call.respond`."""

    def finish(self, member: int | None = None) -> None:
        """See `Call.finish`."""

    def metadata(self, member: int | None) -> Iterable[tuple[str, str | bytes]]:
        """See `Call.metadata`."""

    def model(self, asked: ModelCall | ModelTask, member: int | None) -> Any:
        """See `Call.reach`."""

    @property
    def own(self) -> Reach:
        """The model's own way to others, on behalf of no request."""


class RemoteCall(Call):
    """A call as the model sees it in the process."""

    __slots__ = ("_fields", "_member", "_members", "_number", "_server")

    def __init__(self, server: Server, fields: Mapping[str, Any], member: int | None = None) -> None:
        super().__init__(fields.get("deadline"), partial(server.metadata, member))
        self._server = server
        self._fields = fields
        self._member = member
        self._number = server.number if member is None else server.number + 1 + member
        self.request_id = fields.get("id", "")
        self.signature_name = fields.get("signature", "")
        self.parameters = fields.get("parameters", {})
        self.input_parameters = fields.get("input_parameters", NO_INPUT_PARAMETERS)
        self.model_name, self.model_version = fields.get("model", ""), fields.get("version", 0)
        self.batch_size = fields.get("batch", 1)
        self.size = fields.get("size", 0)
        self.requested_outputs = fields.get("outputs", ())
        if scheduling := fields.get("scheduling"):
            self.scheduling = Scheduling(*scheduling)
        self.respond = partial(server.answer, at_once=True, member=member)
        self.finish = partial(server.finish, member)
        self.reach = partial(_reach, server, member)  # Nothing that keeps this.
        self._members = tuple(
            RemoteCall(server, one, index) for index, one in enumerate(fields.get("members", ()))
        )

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more."""
        return self._server.is_cancelled(self._number) or super().cancelled

    @property
    def members(self) -> Sequence[Call]:
        """The calls that are executed together."""
        return self._members or (self,)

    def apart(self) -> Call:
        """See `Call.apart`."""
        call = Call()
        call.reach = self._server.own
        call.model_name, call.model_version = self.model_name, self.model_version
        return call

    def child(self) -> Call:
        """A call of its own for one of several requests that came on this one."""
        return RemoteCall(self._server, {**self._fields, "deadline": self.deadline}, self._member)


def _reach(server: Server, member: int | None, _: Call, asked: ModelCall | ModelTask) -> Any:
    return server.model(asked, member)


def call_fields(call: Call) -> dict[str, Any]:
    """In the server: what a process is told of a call; what is usual is left out."""
    fields = _own_fields(call)
    if (members := members_of(call)) is not None:
        fields["members"] = [_own_fields(member) for member in members]
    return fields


def members_of(call: Call) -> Sequence[Call] | None:
    """The calls that are executed together; None for a call that is executed for itself."""
    members = call.members
    return None if len(members) == 1 and members[0] is call else members


def _own_fields(call: Call) -> dict[str, Any]:
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
        "deadline": call.deadline,
    }
    if call.scheduling is not PLAIN:
        one = call.scheduling
        fields["scheduling"] = (
            one.priority,
            one.timeout,
            one.sequence_id,
            one.sequence_start,
            one.sequence_end,
        )
    return {name: value for name, value in fields.items() if value}


def asked_fields(asked: ModelCall | ModelTask, member: int | None) -> dict[str, Any]:
    """In the process: what a model asks of another one, or of who manages the models, without the inputs."""
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
    """Whether the answers come one by one."""
    return isinstance(asked, ModelCall) and asked.stream


def inputs_of(asked: ModelCall | ModelTask) -> Mapping[str, Any] | None:
    """The tensors that go with `asked_fields`."""
    return asked.inputs if isinstance(asked, ModelCall) else None


def asked_of(fields: Mapping[str, Any], inputs: Mapping[str, Any], *, stream: bool) -> ModelCall | ModelTask:
    """In the server: what the model asks."""
    if "task" in fields:
        return ModelTask(**fields["task"])
    wanted = {name: value for name, value in fields.items() if name not in ("member", "stream")}
    return ModelCall(inputs=inputs, stream=stream, **wanted)
