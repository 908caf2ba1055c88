"""`Call`, the context of one request as its model sees it, with what telemetry records about it.

`TimerWheel` watches the deadlines of calls.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from time import monotonic
from typing import Any, Final, Literal

from triglot.core.compiling import mypyc_attr
from triglot.core.errors import Code, DeadlineExceeded
from triglot.core.operation import EVERYTHING, Operation, Permission
from triglot.core.request_scheduling import PLAIN, own_parameters
from triglot.core.roles import Expiring, Outlet
from triglot.core.statistics import CallTimes, Statistics
from triglot.core.trace_context import Span, checked, received_context
from triglot.core.types import NO_TENSOR_PARAMETERS, Exchange, ParameterValue, TensorParameters

Metadata = Iterable[tuple[str, str | bytes]]
INFER: Final = Operation.INFER
REQUEST_ID: Final = "x-request-id"
"""Header with the id of a request whose body has none."""
MAX_MODEL_CALLS: Final = 16
"""Longest chain of models that call each other; an ensemble calls the models of its steps."""


class _Closed:
    def respond(self, _: Any) -> bool:
        return False

    def finish(self) -> None:
        pass


CLOSED: Final[Outlet] = _Closed()
"""Outlet of a call that takes no pushed responses, or no longer takes them."""


def _no_metadata() -> Metadata:
    return ()


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A model's call of another model: see `Call.infer` and, with `stream`, `Call.infer_stream`."""

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
    """A model's request for the readiness of another model, or to load or unload it, as an administrator could."""

    action: Literal["ready", "load", "unload"]
    model: str
    version: str = ""
    config: str | None = None
    dependents: bool = False


Reach = Callable[["Call", Any], Any]
"""Runs a `ModelCall` or a `ModelTask` on behalf of a call, and returns what `Call.infer` returns."""


def no_models(_: Call, __: object) -> Any:
    """Raise `RuntimeError`: the `Reach` of a call that no server has admitted."""
    raise RuntimeError("cannot call other models: this call does not run in a server")


@mypyc_attr(allow_interpreted_subclasses=True)
class Call(CallTimes):
    """The context of one request: what its model may read, and what telemetry records.

    For the model: `deadline` is a `time.monotonic()` instant, or None. `size` is the request's length in bytes as
    received, 0 for calls that came over no protocol (warm-up, a model's own call). `borrows`: the inputs lie in
    memory that another process may still change. `signature_name` names the signature that is called. `parameters`
    are the request's; `input_parameters` and `output_parameters` are those of its inputs and of the requested
    outputs that the server does not interpret.
    `read_metadata` returns gRPC metadata or HTTP headers; few calls need them, so they are read on demand. `peer`
    is the client's address, "" where it has none, and in a model's own process.

    `operation` is the kind of call; `permission` identifies the client and lists the models that it may use.
    `outlet` takes what `respond` and `finish` send, once a reader is connected. `scheduling` holds the request's
    priority, queue timeout and sequence. `members` are the calls that are executed together: only this one, unless
    this is a `BatchCall`.

    For telemetry: `model_name` and `model_version` (0: none) that were called; `outcome`, the status code where
    the response itself states one; and its times. `subject` is the model that an administrative call is about.
    `losses`: the number of instances that were lost while they ran it.
    `is_counted`: the end of the call counts, unlike that of a warm-up; then `statistics` are those of its model.
    `trace` is the Triton trace of the call, or of the call on whose behalf it is made. `span` is its OpenTelemetry
    span, None if not sampled; `context` caches `received_context`, None until it is first read.
    """

    __slots__ = (
        "_cancelled",
        "_followers",
        "_limited_by",
        "_read_metadata",
        "borrows",
        "context",
        "deadline",
        "exchange",
        "inner_calls",
        "input_parameters",
        "is_counted",
        "losses",
        "model_name",
        "model_version",
        "operation",
        "outcome",
        "outlet",
        "output_parameters",
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
        "trace",
    )

    def __init__(
        self,
        deadline: float | None = None,
        read_metadata: Callable[[], Metadata] = _no_metadata,
        peer: str = "",
    ) -> None:
        super().__init__()
        self.deadline = deadline
        self.size = 0
        self.borrows = False
        self.request_id = ""
        self.requested_outputs: Sequence[str] = ()
        self.signature_name = ""
        self.parameters: dict[str, ParameterValue] = {}
        self.input_parameters: TensorParameters = NO_TENSOR_PARAMETERS
        self.output_parameters: TensorParameters = NO_TENSOR_PARAMETERS
        self.exchange: Exchange | None = None
        self.inner_calls: list[int] | None = None
        """How many calls models have made on behalf of a client's request: one number, which they share."""
        self.outlet = CLOSED
        self.scheduling = PLAIN
        self.operation = INFER
        self.permission: Permission = EVERYTHING
        self.reach: Reach = no_models
        self.model_name = ""
        self.model_version = 0
        self.subject = ""
        self.outcome = Code.OK
        self.is_counted = False
        self.losses = 0
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
        """gRPC metadata or HTTP headers with names in lower case; the last value of a repeated name."""
        return {name.lower(): value for name, value in self._read_metadata()}

    @property
    def received_context(self) -> tuple[str, str]:
        """`traceparent` and `tracestate` as the client sent them, valid or not; "" for each that is missing."""
        if self.context is None:
            self.context = received_context(self._read_metadata())
        return self.context

    @property
    def traceparent(self) -> str:
        """`traceparent` to send with calls on behalf of this one (W3C Trace Context); "" if there is none.

        That of its own span if the call is sampled, else what the client sent, if that is valid.
        """
        return checked(self.received_context)[0] if self.span is None else self.span.traceparent

    @property
    def tracestate(self) -> str:
        """`tracestate` to send with calls on behalf of this one: what the client sent."""
        return checked(self.received_context)[1] if self.span is None else self.span.state

    @property
    def log_ids(self) -> tuple[str, str]:
        """Request id (or the header `x-request-id`) and `traceparent`, which log records carry."""
        named = self.request_id or self.metadata.get(REQUEST_ID, "")
        return named if isinstance(named, str) else "", self.traceparent

    @property
    def client(self) -> str:
        """Name of the client in the access file; "" if access is not controlled."""
        return self.permission.client

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline, at least 0; None without a deadline."""
        return None if self.deadline is None else max(0.0, self.deadline - monotonic())

    @property
    def expired(self) -> bool:
        """Whether the deadline has passed."""
        return self.deadline is not None and monotonic() >= self.deadline

    @property
    def cancelled(self) -> bool:
        """Whether the result is no longer needed: the client cancelled or disconnected, or the deadline passed."""
        return self._cancelled or (self.deadline is not None and monotonic() >= self.deadline)

    @property
    def members(self) -> Sequence[Call]:
        """The calls that are executed together."""
        return (self,)

    def respond(self, answer: Any) -> bool:
        """Send one response of a streaming call, from any thread; return False once the stream is closed.

        On the thread that runs the model for this call alone, it blocks while the reader is slow and no other
        request is queued. Otherwise responses are kept up to the server's `max_unread_bytes`; one that exceeds it
        ends the call with RESOURCE_EXHAUSTED.
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
        """Return the outputs of another model of this server as arrays by name; no `outputs` means all.

        `async def` code awaits the result; other code blocks until it is there. The nested call has this call's
        deadline, is cancelled with it and, without `parameters`, has its parameters. Raise `ServingError` as a
        client would receive it.
        """
        return self.reach(self, ModelCall(model, inputs, version, outputs, signature_name, parameters))

    def infer_stream(self, model: str, inputs: Mapping[str, Any], **options: Any) -> Any:
        """Iterate over the responses of a decoupled model, with the `options` of `infer`; other models give one.

        `async def` code uses `async for`, other code `for`.
        """
        return self.reach(self, ModelCall(model, inputs, stream=True, **options))

    def child(self) -> Call:
        """Return a new call for one of several requests that arrived on this call."""
        child = Call(self.deadline, self._read_metadata, self.peer)
        child._limited_by = self._limited_by
        child.operation, child.permission = self.operation, self.permission
        child.span, child.context = self.span, self.context
        return child

    def detached(self) -> Call:
        """Return a call for the model's work outside any request, which may call models; nothing cancels it."""
        call = Call()
        call.reach = getattr(self.reach, "detached", self.reach)
        call.model_name, call.model_version = self.model_name, self.model_version
        return call

    def limit(self, seconds: float, source: str) -> None:
        """Set the deadline to `seconds` from now, if that is earlier; the error names `source` as its origin."""
        deadline = monotonic() + seconds
        if self.deadline is None or deadline < self.deadline:
            self.deadline, self._limited_by = deadline, source

    def overdue(self, when: str) -> DeadlineExceeded:
        """Return the error for a deadline that passed; `when` completes the text."""
        return DeadlineExceeded(f"{self._limited_by or 'the deadline'} passed {when}")

    def mark_cancelled(self) -> None:
        """Mark the call as cancelled, on any thread; `cancel` follows on the event loop."""
        self._cancelled = True

    def cancel(self) -> None:
        """Mark the call as cancelled, and notify the followers."""
        self._cancelled = True
        # The stream and the call would keep each other alive.
        self.outlet = CLOSED
        followers, self._followers = self._followers, None
        for end in followers or ():
            end()

    def follow(self, end: Callable[[], object]) -> None:
        """Call `end` when this call, or one of its members, is cancelled. On the event loop."""
        self._followers = [*(self._followers or ()), end]

    def unfollow(self, end: Callable[[], object]) -> None:
        """Undo `follow`."""
        self._followers = [follower for follower in self._followers or () if follower is not end] or None


class BatchCall(Call):
    """Several calls that a model executes together.

    `deadline` is the latest one of its members', None if one has none; `cancelled` once all are. What all of them
    share, the signature and, for a model that takes the call, the parameters and the requested outputs, is taken
    from the first.
    """

    __slots__ = ("_members",)

    def __init__(self, members: Sequence[Call]) -> None:
        deadlines = [member.deadline for member in members if member.deadline is not None]
        first = members[0]
        super().__init__(max(deadlines) if len(deadlines) == len(members) else None, first._read_metadata)
        self._members = members
        self.request_id = first.request_id
        self.signature_name = first.signature_name
        # Scheduling parameters (a queue timeout, say) belong to that member alone.
        self.parameters = own_parameters(first.parameters)
        self.input_parameters = first.input_parameters
        self.output_parameters = first.output_parameters
        self.requested_outputs = first.requested_outputs
        self.reach = first.reach
        self.permission = first.permission
        self.context = first.context
        self.inner_calls = first.inner_calls
        if (span := next((member.span for member in members if member.span is not None), None)) is not None:
            self.span = span.batch or span
        self.model_name, self.model_version = first.model_name, first.model_version

    @property
    def members(self) -> Sequence[Call]:
        """The calls that are executed together."""
        return self._members

    def follow(self, end: Callable[[], object]) -> None:
        """Call `end` when one of the members is cancelled."""
        for member in self._members:
            member.follow(end)

    def unfollow(self, end: Callable[[], object]) -> None:
        """Undo `follow`."""
        for member in self._members:
            member.unfollow(end)

    @property
    def cancelled(self) -> bool:
        """Whether all of the members are cancelled."""
        return all(member.cancelled for member in self._members)


log = logging.getLogger(__name__)

# --- deadlines ---

TICKS: Final = 256
"""Ticks per second."""
MIN_SECONDS: Final = 0.001
"""Shortest delay of the loop's timers, in seconds: their resolution."""
STALE_TICKS: Final = 1024
"""Stale ticks that the heap may hold, besides twice the number of ticks with entries, before it is rebuilt."""


class TimerWheel:
    """Calls `expire` of entries that were not discarded, at their deadline or up to a tick later. On the loop.

    Strategy: creating and cancelling a timer of the loop costs as much as running a small model. Here an entry is
    added to the set of its tick, and discarded from it.
    """

    __slots__ = ("_armed", "_due", "_loop", "_slots")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._slots: dict[int, set[Expiring]] = {}
        """Entries by tick; no set is empty."""
        self._due: list[int] = []
        """Heap of the ticks that have, or had, entries."""
        self._armed = 0
        """Tick that the loop's timer is set to; 0: none."""

    def __len__(self) -> int:
        return sum(map(len, self._slots.values()))

    def add(self, entry: Expiring, deadline: float) -> int:
        """Schedule `entry.expire` for `deadline`, a `time.monotonic` instant; returns the tick for `discard`."""
        tick = int(deadline * TICKS) + 1
        slot = self._slots.get(tick)
        if slot is None:
            self._slots[tick] = {entry}
            heappush(self._due, tick)
            if not self._armed or tick < self._armed:
                self._arm(tick)
        else:
            slot.add(entry)
        return tick

    def discard(self, entry: Expiring, tick: int) -> None:
        """Remove an entry that has ended; does nothing if it is expiring just now."""
        slot = self._slots.get(tick)
        if slot is None:
            return
        slot.discard(entry)
        if not slot:
            del self._slots[tick]
            if len(self._due) > 2 * len(self._slots) + STALE_TICKS:
                self._due = list(self._slots)
                heapify(self._due)

    def _arm(self, tick: int) -> None:
        self._armed = tick
        self._loop.call_later(max(MIN_SECONDS, tick / TICKS - monotonic()), self._fire, tick)

    def _fire(self, tick: int) -> None:
        if tick != self._armed:
            return  # An earlier timer was set meanwhile, and handles all that is due.
        self._armed = 0
        due, slots = self._due, self._slots
        now = int(monotonic() * TICKS)
        try:
            while due and due[0] <= now:
                for entry in slots.pop(heappop(due), ()):
                    try:
                        entry.expire()
                    except Exception:  # The other entries are due, too.
                        log.exception("the handler of a deadline failed")
        finally:
            while due and due[0] not in slots:
                heappop(due)
            if due:
                self._arm(due[0])
