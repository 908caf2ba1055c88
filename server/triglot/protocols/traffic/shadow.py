"""Copies calls to a shadow, and compares its responses with those that the clients got.

Strategy: a call is copied once its response is there, and the copy waits in a queue of its own. Nothing waits
for it: where the queue is full, the copy is dropped and counted. A copy has no client: it is admitted by no limit
of one, is never copied itself, and ends by the deadline of its call.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

from triglot.core.call import Call
from triglot.core.errors import Code, ServingError, as_serving_error
from triglot.core.running import Sink, Watcher
from triglot.core.statistics import Histogram
from triglot.core.types import InferenceRequest, InferenceResponse, OutputTensor
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.request_path import RequestRecorder
from triglot.protocols.traffic.comparison import Difference, difference_of
from triglot.protocols.traffic.counts import Counts, buckets_of, quantile_ms
from triglot.protocols.traffic.weights import SILVER_STEP, SPACE, Points
from triglot.repository.config.traffic import Shadow
from triglot.scheduling.servable import Servable
from triglot.telemetry.calls import Endpoint

log = logging.getLogger(__name__)

MAX_WAITING = 64
"""Copies that wait for the shadow."""
MAX_WAITING_BYTES = 64 * 1024 * 1024
MAX_RUNNING = 4
"""Copies that the shadow runs at a time."""
MAX_SECONDS = 30.0
"""Time for a copy of a call without a deadline."""
LONG_BYTES = 64 * 1024
"""Outputs of this size are compared on a thread."""
MAX_OUTPUTS = 100
"""Outputs whose differences are counted one by one."""
FULL, LATE, FAILED, SHARED_MEMORY = "full", "late", "failed", "shared_memory"
"""Why a copy was dropped: the queue was full, the deadline had passed, the call itself failed, or its inputs may
change."""

Run = Callable[["Copy", Call, Sink], object]
"""Starts a copy: its response goes to the sink."""


class ShadowCounts:
    """What became of the copies. Times are in microseconds."""

    def __init__(self) -> None:
        self.results: Counter[str] = Counter(same=0, different=0, failed=0)
        self.dropped: Counter[str] = Counter(dict.fromkeys((FULL, LATE, FAILED, SHARED_MEMORY), 0))
        self.differing: Counter[str] = Counter()
        """Copies by the output that differs."""
        self.largest: dict[str, float] = {}
        self.served, self.shadow = Histogram(), Histogram()
        self.last_error = ""

    def add(self, difference: Difference | None) -> None:
        """Count a comparison."""
        if difference is None:
            self.results["same"] += 1
            return
        self.results["different"] += 1
        name = difference.output
        if name in self.differing or len(self.differing) < MAX_OUTPUTS:
            self.differing[name] += 1
            if difference.largest is not None:
                self.largest[name] = max(difference.largest, self.largest.get(name, 0.0))

    def report(self) -> Counts:
        """Return the counts as JSON values."""
        return {
            **self.results,
            "dropped": dict(self.dropped),
            "differing": dict(self.differing),
            "largest": dict(self.largest),
            "served_latency": buckets_of(self.served),
            "shadow_latency": buckets_of(self.shadow),
            "served_seconds": self.served.sum / 1e6,
            "shadow_seconds": self.shadow.sum / 1e6,
            "last_error": self.last_error,
        }


class Copy(Watcher):
    """A call that is to be copied, from its start on."""

    __slots__ = ("call", "outputs", "request", "servable", "shadow")

    def __init__(self, shadow: ModelShadow, servable: Servable, request: InferenceRequest, call: Call) -> None:
        self.shadow = shadow
        self.servable = servable
        self.request = request
        self.call = call
        self.outputs: list[OutputTensor] | None = None

    def on_response(self, response: InferenceResponse) -> None:
        """See `Watcher`: the only response of a call that could have several."""
        self.on_end(response)

    def on_end(self, response: InferenceResponse | None) -> None:
        """See `Watcher`."""
        if self.outputs is None:
            self.shadow.put(self, response)


class ModelShadow:
    """The shadow of one model. `samples` records calls whose responses differ."""

    def __init__(
        self, model: str, settings: Shadow, run: Run, endpoint: Endpoint, samples: RequestRecorder | None
    ) -> None:
        self.settings = settings
        self.counts = ShadowCounts()
        self._model = model
        self._run = run
        self._endpoint = endpoint
        self._samples = samples
        self._loop = asyncio.get_running_loop()
        self._points = Points(SILVER_STEP)
        self._below = round(settings.percent / 100 * SPACE)
        self._waiting: deque[Copy] = deque()
        self._bytes = 0
        self._running = 0
        self._pumps = False

    def copy(self, servable: Servable, request: InferenceRequest, call: Call) -> Copy | None:
        """Return what copies a call; None for one that is not copied."""
        if not call.size or servable.decoupled or servable.sequences is not None:
            return None  # A model's own call, or one that a single copy cannot stand for.
        if self._points.next() >= self._below:
            return None
        if call.borrows:
            self.counts.dropped[SHARED_MEMORY] += 1
            return None
        if self._is_full(call):
            self.counts.dropped[FULL] += 1
            return None
        return Copy(self, servable, request, call)

    def _is_full(self, call: Call) -> bool:
        return len(self._waiting) >= MAX_WAITING or self._bytes + call.size > MAX_WAITING_BYTES

    def put(self, copy: Copy, response: InferenceResponse | None) -> None:
        """Queue a copy of a call that has ended."""
        copy.outputs = []
        if response is None or self._is_full(copy.call):
            self.counts.dropped[FAILED if response is None else FULL] += 1
            return
        self.counts.served.add((perf_counter() - copy.call.arrived) * 1e6)
        # After the response has been sent, the model may reuse its arrays.
        copy.outputs = [
            OutputTensor(output.name, output.datatype, output.array.copy()) for output in response.outputs
        ]
        self._bytes += copy.call.size
        self._waiting.append(copy)
        if not self._pumps:
            self._pumps = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Start copies while there is room for more."""
        self._pumps = False
        while self._waiting and self._running < MAX_RUNNING:
            copy = self._waiting.popleft()
            self._bytes -= copy.call.size
            if copy.call.expired:
                self.counts.dropped[LATE] += 1
                continue
            self._running += 1
            call = Call(copy.call.deadline)
            call.limit(MAX_SECONDS, "the limit for a copy")
            call.model_name = self._model
            self._endpoint.begin(call)
            sink = _CopySink(partial(self._on_copy_end, copy, call, perf_counter()))
            try:
                self._run(copy, call, sink)
            except Exception as error:
                sink.end(as_serving_error(error, self._model))

    def _on_copy_end(
        self, copy: Copy, call: Call, began: float, response: InferenceResponse | None, error: ServingError | None
    ) -> None:
        self._endpoint.end(call, Code.OK if error is None else error.code)
        if error is not None or response is None:
            self.counts.results["failed"] += 1
            self.counts.last_error = "no response" if error is None else error.message
            self._go_on()
            return
        self.counts.shadow.add((perf_counter() - began) * 1e6)
        outputs = copy.outputs or []
        compare = partial(difference_of, outputs, response.outputs, self.settings.tolerance)
        if sum([output.array.nbytes for output in outputs]) >= LONG_BYTES:
            comparing = self._loop.create_task(asyncio.to_thread(compare))
            comparing.add_done_callback(lambda done: self._compared(copy, done.result()))
        else:
            self._compared(copy, compare())

    def _compared(self, copy: Copy, difference: Difference | None) -> None:
        self.counts.add(difference)
        if difference is not None and self._samples is not None:
            record = self._samples.record(copy.servable, copy.request, copy.call)
            if record is not None:
                name, version = copy.servable.name, str(copy.servable.version)
                record.on_end(InferenceResponse(name, version, "", copy.outputs or []))
        self._go_on()

    def _go_on(self) -> None:
        self._running -= 1
        if self._waiting and not self._pumps:
            self._pumps = True
            self._loop.call_soon(self._pump)


class _CopySink(Sink):
    """Takes the response of a copy."""

    __slots__ = ("_end", "_response")

    def __init__(self, end: Callable[[InferenceResponse | None, ServingError | None], None]) -> None:
        self._end = end
        self._response: InferenceResponse | None = None

    def send(self, response: Any) -> bool:
        self._response = response
        return True

    def end(self, error: ServingError | None) -> None:
        self._end(self._response, error)


def run_here(dataplane: DataPlane, model: str, version: str, copy: Copy, call: Call, sink: Sink) -> None:
    """Start a copy on a version of this server. Raise `ServingError`."""
    dataplane.start(dataplane.registry.servable(model, version), copy.request, call, sink)


def verdict(counts: Counts) -> Counts:
    """Return what is shown of a shadow's counts."""
    compared = counts["same"] + counts["different"]
    latencies = {
        f"{name}_{whose}": quantile_ms(counts[f"{whose}_latency"], share)
        for whose in ("served", "shadow")
        for name, share in (("p50_ms", 0.5), ("p99_ms", 0.99))
    }
    return {
        "compared": compared,
        "different_share": counts["different"] / compared if compared else None,
        **{key: counts[key] for key in ("same", "different", "failed", "dropped", "differing", "largest")},
        **latencies,
        "last_error": counts["last_error"],
    }


def largest_of(parts: Sequence[dict[str, float]]) -> dict[str, float]:
    """Merge the largest differences that several workers found."""
    found: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = max(value, found.get(name, 0.0))
    return found
