"""A call: what a model may ask of the request that it runs for, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from triglot.core.call_times import CallTimes
from triglot.core.errors import Code, DeadlineExceeded
from triglot.core.operation import Operation
from triglot.core.outlet import CLOSED
from triglot.core.permission import EVERYTHING, Permission
from triglot.core.request_scheduling import PLAIN, own_parameters
from triglot.core.statistics import Statistics
from triglot.core.trace_context import Span, checked, received_context
from triglot.core.types import NO_INPUT_PARAMETERS, Exchange, InputParameters, ParameterValue

Metadata = Iterable[tuple[str, str | bytes]]
INFER = Operation.INFER
REQUEST_ID = "x-request-id"
"""The header with the name of a request that has none in its body."""
MAX_MODEL_CALLS = 16
"""Models that may call each other in a row; the models of an ensemble's steps are called by it."""


def _no_metadata() -> Metadata:
    return ()


@dataclass(frozen=True, slots=True)
class ModelCall:
    """What a model's own code asks of another model: see `Call.infer` and, of a `stream`, `Call.infer_stream`."""

    model: str
    inputs: Mapping[str, Any]
    version: str = ""
    outputs: Sequence[str] = ()
    signature_name: str = ""
    parameters: Mapping[str, ParameterValue] | None = None
    stream: bool = False
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class ModelTask:
    """What a model's own code asks about another model, or has done with it, as an administrator could."""

    action: Literal["ready", "load", "unload"]
    model: str
    version: str = ""
    config: str | None = None
    dependents: bool = False


Reach = Callable[["Call", Any], Any]
"""Runs a `ModelCall`, or a `ModelTask`, on behalf of a call: what `Call.infer` returns."""


def no_models(_: Call, __: object) -> Any:
    """Of a call that no server has admitted."""
    raise RuntimeError("cannot call other models: this call does not run in a server")


class Call:
    """One call's own circumstances, as a model may ask for them.

    `deadline` is a `time.monotonic()` instant, or None. `size`: bytes of the request as it came; 0: it came over
    no protocol, as a warm-up, or a model's own call. `borrows`: inputs are memory that somebody else may
    still change. `signature_name` is the one of the model's signatures that is called. `parameters` are the
    request's, and `input_parameters` those of its inputs that mean nothing to the server. `read_metadata` gives
    gRPC metadata or HTTP headers; few calls look at them, so they are read when asked for. `peer`: the client's
    address; "" where it has none, and in a process of a model's.

    `operation` is what it is for; `permission` says who makes it, and which models it is for.
    `outlet` is where `respond` and `finish` go, once somebody reads.

    `scheduling` is what the request says of priorities, its time in the queue, and its sequence. `members` are the
    calls that are executed together: itself alone, unless this is a `BatchCall`.

    For the telemetry: the model and version that were called (0: none), what came of it where the answer itself
    says so, and its `times`. `subject`: the model that an administrative call is about. `counted`: its end will be
    counted, as that of a warm-up is not; then `statistics` are its model's. `trace`: the trace of the call, or of
    the call on whose behalf it is made. `span`: its OpenTelemetry span, None where it is not sampled; `context`:
    what `received_context` gives, None before somebody looks.
    """

    __slots__ = (
        "_cancelled",
        "_followers",
        "_limited_by",
        "_read_metadata",
        "borrows",
        "context",
        "counted",
        "deadline",
        "exchange",
        "input_parameters",
        "model_name",
        "model_version",
        "operation",
        "outcome",
        "outlet",
        "parameters",
        "peer",
        "permission",
        "reach",
        "request_id",
        "requested_outputs",
        "scheduling",
        "signature_name",
        "size",
        "span",
        "statistics",
        "subject",
        "times",
        "trace",
    )

    def __init__(
        self,
        deadline: float | None = None,
        read_metadata: Callable[[], Metadata] = _no_metadata,
        peer: str = "",
    ) -> None:
        self.deadline = deadline
        self.size = 0
        self.borrows = False
        self.request_id = ""
        self.requested_outputs: Sequence[str] = ()
        self.signature_name = ""
        self.parameters: dict[str, ParameterValue] = {}
        self.input_parameters: InputParameters = NO_INPUT_PARAMETERS
        self.exchange: Exchange | None = None
        self.outlet = CLOSED
        self.scheduling = PLAIN
        self.operation = INFER
        self.permission: Permission = EVERYTHING
        self.reach: Reach = no_models
        self.model_name = ""
        self.model_version = 0
        self.subject = ""
        self.outcome = Code.OK
        self.counted = False
        self.times = CallTimes()
        self.statistics: Statistics | None = None
        self.trace: Any = None
        self.span: Span | None = None
        self.context: tuple[str, str] | None = None
        self._limited_by = ""
        self._read_metadata = read_metadata
        self.peer = peer
        self._cancelled = False
        self._followers: list[Callable[[], object]] | None = None

    @property
    def metadata(self) -> dict[str, str | bytes]:
        """gRPC metadata or HTTP headers, names in lower case; of a repeated name the last value."""
        return {name.lower(): value for name, value in self._read_metadata()}

    @property
    def received_context(self) -> tuple[str, str]:
        """`traceparent` and `tracestate` as the client has sent them, valid or not; "" for what it has not."""
        if self.context is None:
            self.context = received_context(self._read_metadata())
        return self.context

    @property
    def traceparent(self) -> str:
        """What calls on behalf of this one send as `traceparent` (W3C Trace Context); "" where it has none.

        Of a sampled call its own span, of others what the client has sent, if that is valid.
        """
        return checked(self.received_context)[0] if self.span is None else self.span.traceparent

    @property
    def tracestate(self) -> str:
        """What they send as `tracestate`: what the client has sent."""
        return checked(self.received_context)[1] if self.span is None else self.span.state

    @property
    def log_ids(self) -> tuple[str, str]:
        """What lines of logs say of it: its id, or else its header `x-request-id`, and its `traceparent`."""
        named = self.request_id or self.metadata.get(REQUEST_ID, "")
        return named if isinstance(named, str) else "", self.traceparent

    @property
    def client(self) -> str:
        """The name of the client that makes the call, as the access file calls it; "" where nobody is asked."""
        return self.permission.client

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline, at least 0; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - time.monotonic())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and time.monotonic() >= self.deadline

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for the answer any more: the caller left, or its deadline passed."""
        return self._cancelled or (self.deadline is not None and time.monotonic() >= self.deadline)

    @property
    def members(self) -> Sequence[Call]:
        """The calls that are executed together."""
        return (self,)

    def respond(self, answer: Any) -> bool:
        """Send one answer of a streaming call, from any thread; blocks while the reader is slow.

        False when nobody reads any more.
        """
        return self.outlet.respond(answer)

    def finish(self) -> None:
        """End the stream before the model returns."""
        self.outlet.finish()

    def infer(
        self,
        model: str,
        inputs: Mapping[str, Any],
        *,
        version: str = "",
        outputs: Sequence[str] = (),
        signature_name: str = "",
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> Any:
        """The outputs by name of another model of this server, as arrays; no `outputs` means all.

        `async def` code awaits it; other code is held up until they are there. The other call has this one's
        deadline, ends when this one is cancelled, and, without `parameters`, has this one's. Raises `ServingError`
        as a client would get it.
        """
        return self.reach(self, ModelCall(model, inputs, version, outputs, signature_name, parameters))

    def infer_stream(self, model: str, inputs: Mapping[str, Any], **options: Any) -> Any:
        """The answers of a decoupled model one by one, with the `options` of `infer`; of another, its one answer.

        `async def` code iterates over them with `async for`, other code with `for`.
        """
        return self.reach(self, ModelCall(model, inputs, stream=True, **options))

    def child(self) -> Call:
        """A call of its own for one of several requests that came on this one."""
        child = Call(self.deadline, self._read_metadata, self.peer)
        child._limited_by = self._limited_by
        child.operation, child.permission = self.operation, self.permission
        child.span, child.context = self.span, self.context
        return child

    def apart(self) -> Call:
        """A call of the same model's own, on behalf of no request, that reaches other models; nothing ends it."""
        call = Call()
        call.reach = getattr(self.reach, "apart", self.reach)
        call.model_name, call.model_version = self.model_name, self.model_version
        return call

    def limit(self, seconds: float, source: str) -> None:
        """Let it end in so many seconds at the latest; `source` is what says so, for the error's text."""
        deadline = time.monotonic() + seconds
        if self.deadline is None or deadline < self.deadline:
            self.deadline, self._limited_by = deadline, source

    def overdue(self, when: str) -> DeadlineExceeded:
        """The error of a call whose deadline passed `when` something was the case."""
        return DeadlineExceeded(f"{self._limited_by or 'the deadline'} passed {when}")

    def cancel(self) -> None:
        """Say that the caller is gone."""
        self._cancelled = True
        # A stream and its call would keep each other.
        self.outlet = CLOSED
        followers, self._followers = self._followers, None
        for end in followers or ():
            end()

    def follow(self, end: Callable[[], object]) -> None:
        """On the loop: have `end` called when this, or one of its members, is cancelled."""
        self._followers = [*(self._followers or ()), end]

    def unfollow(self, end: Callable[[], object]) -> None:
        """Take `follow` back."""
        self._followers = [one for one in self._followers or () if one is not end] or None


class BatchCall(Call):
    """Several calls that are executed together; the model answers for all of them at once.

    `deadline` is the last one of theirs, None if one has none; `cancelled` when all are. What is the same for all
    of them, the signature and, for a model that takes the call, the parameters, is the first one's.
    """

    __slots__ = ("_members",)

    def __init__(self, members: Sequence[Call]) -> None:
        deadlines = [member.deadline for member in members if member.deadline is not None]
        first = members[0]
        super().__init__(max(deadlines) if len(deadlines) == len(members) else None, first._read_metadata)
        self._members = members
        self.request_id = first.request_id
        self.signature_name = first.signature_name
        # Its time in the queue, for one, was one member's.
        self.parameters = own_parameters(first.parameters)
        self.input_parameters = first.input_parameters
        self.reach = first.reach
        self.permission = first.permission
        self.context = first.context
        if (span := next((member.span for member in members if member.span is not None), None)) is not None:
            self.span = span.batch or span
        self.model_name, self.model_version = first.model_name, first.model_version

    @property
    def members(self) -> Sequence[Call]:
        """The calls that are executed together."""
        return self._members

    def follow(self, end: Callable[[], object]) -> None:
        """As of one call."""
        for member in self._members:
            member.follow(end)

    def unfollow(self, end: Callable[[], object]) -> None:
        """As of one call."""
        for member in self._members:
            member.unfollow(end)

    @property
    def cancelled(self) -> bool:
        """Whether nobody waits for any of the answers."""
        return all(member.cancelled for member in self._members)
