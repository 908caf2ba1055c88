"""Traces of single requests, in Triton's format (spec 3.11).

A traced request has a `Trace`, which ends with it; any other request costs one check of `Tracer.on`. Timestamps
are those that the call measures for the telemetry anyway. Everything runs on the event loop, except that records
are serialized on the thread that writes them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

from triglot.core.call import Call, no_models
from triglot.core.errors import Unimplemented
from triglot.core.running import Watcher
from triglot.core.types import InferenceRequest
from triglot.telemetry.calls import Observer
from triglot.telemetry.trace_file import Records, TraceFile
from triglot.telemetry.trace_settings import (
    COUNT,
    FILE,
    FREQUENCY,
    KEYS,
    LEVEL,
    MODE,
    OFF,
    OPENTELEMETRY,
    RATE,
    TENSORS,
    TIMESTAMPS,
    TRITON,
    Changes,
    Scope,
    TraceOptions,
    read_changes,
    scope_of,
)
from triglot.telemetry.trace_tensors import Snapshot, of_input, of_output

log = logging.getLogger(__name__)

MAX_BUFFERED = 256
"""Number of traces, steps included, that are buffered before they are written together."""
MAX_RESPONSES = 1024
"""Limit on the responses of a stream in a trace."""
MAX_STEPS = 256
"""Limit on the calls between models in the trace of one request."""
MAX_ID = 1024


class Trace(Watcher):
    """The trace of one request at one model. A call that a model makes has a trace that is a step of the `root`'s.

    It ends with the call or stream that it traces.
    """

    __slots__ = (
        "_call",
        "_stamps",
        "_tensors",
        "_tracer",
        "begun",
        "has_ended",
        "head",
        "level",
        "root",
        "scope",
        "steps",
    )

    def __init__(
        self, tracer: Tracer, head: dict[str, Any], level: tuple[str, ...], call: Call, root: Trace | None
    ) -> None:
        self.head = head
        self.level = level
        self.root = root or self
        self.scope: _TraceBuffer | None = None
        self.steps: list[Trace] = []
        """Steps that have ended."""
        self.begun = 0
        """Number of steps that have begun."""
        self.has_ended = False
        self._tracer = tracer
        self._call: Call | None = call
        self._tensors: list[tuple[str, Snapshot]] = []
        self._stamps = [("REQUEST_START", tracer.clock())]

    def record_inputs(self, request: InferenceRequest) -> None:
        """Record the inputs; copied now, since their memory may be the client's."""
        if TENSORS in self.level:
            self._keep("TENSOR_QUEUE_INPUT", of_input, request.inputs)

    def on_end(self, response: Any) -> None:
        """See `Watcher`: ends the trace, with the response if there is one."""
        if response is not None:
            self._record_outputs(response)
        self._end()

    def on_response(self, response: Any) -> None:
        """See `Watcher`."""
        self._record_outputs(response)
        if len(self._stamps) < MAX_RESPONSES:
            self._stamps.append(("INFER_RESPONSE_COMPLETE", self._tracer.clock()))

    def _record_outputs(self, response: Any) -> None:
        # The messages of grps projects are not tensors.
        if TENSORS in self.level and len(self._tensors) < MAX_RESPONSES:
            self._keep("TENSOR_BACKEND_OUTPUT", of_output, getattr(response, "outputs", ()))

    def _keep(self, activity: str, snapshot: Callable[[Any], Snapshot], tensors: Iterable[Any]) -> None:
        try:
            self._tensors += [(activity, snapshot(tensor)) for tensor in tensors]
        except Exception:  # A tensor that cannot be traced must not fail the request.
            log.exception("cannot add %s to a trace", activity)

    def _end(self) -> None:
        call, self._call = self._call, None
        assert call is not None  # `_end` is called once.
        # A no-op if the model ended the execution; the caller may have disconnected before that.
        call.execution_ended()
        end = self._tracer.clock()
        self._stamps += _phases(call, self._stamps[0][1], end)
        self._stamps.append(("REQUEST_END", end))
        self.has_ended = True
        self._tracer.on_end(self)

    def records(self) -> Records:
        """Yield the records of this trace and its steps."""
        for trace in (self, *self.steps):
            yield trace.head
            if TIMESTAMPS in trace.level:
                stamps = sorted(trace._stamps, key=lambda stamp: stamp[1])
                named = [{"name": name, "ns": round(seconds * 1e9)} for name, seconds in stamps]
                yield {"id": trace.head["id"], "timestamps": named}
            for activity, tensor in trace._tensors:
                yield {"id": trace.head["id"], "activity": activity, "tensor": tensor.text()}


def _phases(call: Call, start: float, end: float) -> list[tuple[str, float]]:
    """Return the timestamps of queueing and computing; empty if no model has started the request."""
    began = call.began
    if not began:
        return []
    queued = began - call.queue_seconds
    # Input processing before the request was queued is not part of the execution.
    computing = began + max(0.0, call.input_seconds - (queued - start))
    computed = computing + call.compute_seconds
    return [
        ("QUEUE_START", max(start, queued)),
        ("COMPUTE_START", began),
        ("COMPUTE_INPUT_END", min(computing, end)),
        ("COMPUTE_OUTPUT_START", min(computed, end)),
        ("COMPUTE_END", min(computed + call.output_seconds, end)),
    ]


class _TraceBuffer:
    """The traces that a scope has buffered, and the number of the file that they are written to."""

    __slots__ = ("in_file", "number", "running", "scope", "size", "traces")

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.traces: list[Trace] = []
        self.size = 0
        self.running = 0
        self.number: int | None = None
        self.in_file = 0


class Tracer:
    """Samples requests and writes their traces; in the mode `opentelemetry` it samples requests for `spans`.

    Owned by the server, and used on its event loop. `on`: whether any request may be traced in a file.
    """

    def __init__(self, options: TraceOptions | None = None) -> None:
        options = options or TraceOptions()
        self._mode = options.mode
        self.spans: Observer | None = None
        self.clock = time.perf_counter
        self._start = scope_of(options)
        self._server = _TraceBuffer(scope_of(options))
        self._models: dict[str, _TraceBuffer] = {}
        self._file = TraceFile(Path(options.file)) if options.file and options.mode == TRITON else None
        self._ids = count(1)
        self.on = bool(options.level) and options.mode == TRITON

    def check(self) -> None:
        """Raise `OSError` if the folder of the trace file does not exist."""
        if self._file is not None:
            self._file.check()

    def begin(self, model: str, version: int, call: Call, request: InferenceRequest | None = None) -> Trace | None:
        """Begin the trace of a call of this version; return None for a call that is not traced."""
        before: Trace | None = call.trace
        scope = None
        if before is None:
            if call.reach is not no_models or not call.is_counted:
                return None  # A model's call outside of any trace, or a warm-up.
            scope = self._models.get(model, self._server)
            level = scope.scope.sample()
            if not level:
                return None
            scope.running += 1
        else:
            level = before.level
            if before.root.has_ended or before.root.begun >= MAX_STEPS:
                return None
            before.root.begun += 1
        head: dict[str, Any] = {"id": next(self._ids), "model_name": model, "model_version": version}
        if request is not None and request.id:
            head["request_id"] = request.id[:MAX_ID]
        if before is not None:
            head["parent_id"] = before.head["id"]
        trace = call.trace = Trace(self, head, level, call, before and before.root)
        trace.scope = scope
        if request is not None:
            trace.record_inputs(request)
        return trace

    def on_end(self, trace: Trace) -> None:
        """Buffers a trace that has ended, and writes the buffer if it is due."""
        if trace.scope is None:
            if not trace.root.has_ended:
                trace.root.steps.append(trace)
            return
        buffer = trace.scope
        buffer.running -= 1
        buffer.traces.append(trace)
        buffer.size += 1 + len(trace.steps)
        frequency = buffer.scope.value(FREQUENCY)
        over = buffer.scope.exhausted and not buffer.running
        full = 0 < frequency <= buffer.in_file + len(buffer.traces)
        if full or over or buffer.size >= MAX_BUFFERED:
            self._write(buffer, frequency, over=over)

    def _write(self, buffer: _TraceBuffer, frequency: int, *, over: bool) -> None:
        """Write the buffered traces; if the scope is exhausted (`over`) by its count, to a numbered file."""
        traces, buffer.traces = buffer.traces, []
        size, buffer.size = buffer.size, 0
        if not traces or self._file is None:
            if over:
                buffer.number, buffer.in_file = None, 0
            return
        in_own = frequency or (over and buffer.scope.value(COUNT) == 0)
        if in_own and buffer.number is None:
            buffer.number = self._file.next_number()
        last = over or (frequency > 0 and buffer.in_file + len(traces) >= frequency)
        number = buffer.number if in_own else None
        self._file.write(number, size, partial(_all_records, traces), last=last and number is not None)
        buffer.in_file += len(traces)
        if last:
            buffer.number, buffer.in_file = None, 0

    def _flush(self) -> None:
        for buffer in (self._server, *self._models.values()):
            self._write(buffer, buffer.scope.value(FREQUENCY), over=True)

    # --- settings ---

    def settings(self, model: str = "") -> dict[str, list[str]]:
        """Return every setting of the server or of a model as texts; the count is the remaining one."""
        scope = self._models.get(model, self._server).scope
        return {
            LEVEL: list(scope.value(LEVEL)) or [OFF],
            **{key: [str(scope.value(key))] for key in KEYS if key not in (LEVEL, FILE, MODE)},
            FILE: [str(self._file.path) if self._file is not None else ""],
            MODE: [self._mode],
        }

    def update(self, changes: Changes, model: str = "") -> None:
        """Change settings of the server or of a model; all of them or, when it raises, none.

        Write the buffered traces. Raise `InvalidArgument` and `Unimplemented`, see `read_changes`.
        """
        with_spans = self._mode == OPENTELEMETRY
        values = read_changes(changes, traceable=with_spans or self._file is not None, mode=self._mode)
        if not values:
            return
        if model and with_spans:
            raise Unimplemented(f"a model has no trace settings of its own with {MODE} {OPENTELEMETRY}")
        self._flush()
        if model:
            scope = self._models.setdefault(model, _TraceBuffer(Scope({}, self._server.scope))).scope
        else:
            scope = self._server.scope
        scope.change({key: value for key, value in values.items() if value is not None})
        for key in (key for key, value in values.items() if value is None):
            if model:
                scope.own.pop(key, None)
            else:
                scope.change({key: self._start.value(key)})
        on = any(model.scope.value(LEVEL) for model in (self._server, *self._models.values()))
        if with_spans and self.spans is not None:
            self.spans.switch(int(on))
        else:
            self.on = on

    def sample_span(self, _: int) -> bool:
        """Whether a request without a client's trace context is sampled."""
        scope = self._server.scope
        return bool(scope.value(RATE) and scope.sample())

    async def close(self) -> None:
        """Stop tracing and waits until buffered traces are written."""
        self.on = False
        self._flush()
        if self._file is not None:
            await asyncio.to_thread(self._file.close)


def _all_records(traces: list[Trace]) -> Records:
    for trace in traces:
        yield from trace.records()
