"""Counters of one loaded version of a model (spec 5.9)."""

from __future__ import annotations

from collections.abc import Mapping

from triglot.core.call_times import CallTimes
from triglot.core.errors import Code
from triglot.core.latencies import Latencies
from triglot.core.tensor import Array
from triglot.core.trace_context import Span

MAX_RESPONSES = 1000
"""Responses of a stream that are counted by their index; further ones are counted with this index."""
REJECTED, CANCELED, BACKEND, OTHER = "REJECTED", "CANCELED", "BACKEND", "OTHER"
REASONS = (REJECTED, CANCELED, BACKEND, OTHER)
"""Reasons of failed requests, in Triton's terms (spec 6)."""
_CANCELLED_CODES = (Code.CANCELLED, Code.DEADLINE_EXCEEDED)
_REJECTED_CODES = (Code.RESOURCE_EXHAUSTED, Code.UNAVAILABLE)


class Duration:
    """A count of events and their total time in seconds."""

    __slots__ = ("count", "seconds")

    def __init__(self, count: int = 0, seconds: float = 0.0) -> None:
        self.count = count
        self.seconds = seconds

    def add(self, seconds: float) -> None:
        """Count one event."""
        self.count += 1
        self.seconds += seconds


class Executions:
    """Executions with the same batch size."""

    __slots__ = ("count", "infer_seconds", "input_seconds", "output_seconds")

    def __init__(self) -> None:
        self.count = 0
        self.input_seconds = self.infer_seconds = self.output_seconds = 0.0


class Responses:
    """Responses with the same index, over all calls of a decoupled model."""

    __slots__ = ("cancel", "empty_response", "fail", "infer", "output", "success")

    def __init__(self) -> None:
        self.infer = Duration()
        self.output = Duration()
        self.success = Duration()
        self.fail = Duration()
        self.empty_response = Duration()
        self.cancel = Duration()


class Statistics:
    """Statistics of one version from its load to its end: a version that is loaded again starts at zero.

    Telemetry counts requests when they end, the server counts executions when the model has ended, both on the
    event loop; may be read on any thread. Times are in seconds, and are those of successful requests. `batched`:
    the first dim of the inputs is the batch. `composed`: other models do the work (an ensemble).
    """

    __slots__ = (
        "_batched",
        "_composed",
        "batches",
        "execution_count",
        "fail",
        "failures",
        "hit",
        "infer_seconds",
        "inference_count",
        "input_seconds",
        "last_inference",
        "latencies",
        "miss",
        "output_seconds",
        "queue_seconds",
        "responses",
        "success",
    )

    def __init__(self, *, batched: bool = False, composed: bool = False) -> None:
        self._batched = batched
        self._composed = composed
        self.last_inference = 0.0
        """Seconds since the epoch."""
        self.inference_count = self.execution_count = 0
        self.success, self.fail, self.hit, self.miss = Duration(), Duration(), Duration(), Duration()
        self.queue_seconds = self.input_seconds = self.infer_seconds = self.output_seconds = 0.0
        self.failures = dict.fromkeys(REASONS, 0)
        self.batches: dict[int, Executions] = {}
        """Executions by their number of rows."""
        self.responses: dict[int, Responses] = {}
        """Responses by index; for decoupled models."""
        self.latencies: Latencies | None = None
        """Distributions, where more than sums is kept."""

    @property
    def queue(self) -> Duration:
        """Time from the queue to the execution; includes requests answered from the response cache."""
        return Duration(self.success.count, self.queue_seconds)

    @property
    def computed(self) -> int:
        """Successful requests that the response cache did not answer."""
        return self.success.count - self.hit.count

    def rows(self, inputs: Mapping[str, Array]) -> int:
        """Return how many inferences an execution with these inputs is."""
        if self._batched:
            for array in inputs.values():
                return array.shape[0] if array.ndim else 1
        return 1

    def executed(self, rows: int, infer: float, joining: float = 0.0, splitting: float = 0.0) -> None:
        """Count an execution that ended, successfully or not."""
        self.execution_count += 1
        executions = self.batches.get(rows)
        if executions is None:
            executions = self.batches[rows] = Executions()
        executions.count += 1
        executions.input_seconds += joining
        executions.infer_seconds += infer
        executions.output_seconds += splitting

    def executed_alone(self, times: CallTimes, inputs: Mapping[str, Array], seconds: float) -> None:
        """Count the execution of a single request, successful or not, if it started."""
        if times.batch_size:
            rows = self.rows(inputs)
            times.rows += rows
            self.executed(rows, seconds)

    def on_end(self, times: CallTimes, code: Code, seconds: float, now: float, span: Span | None = None) -> None:
        """Count a request that ended at `now`, in seconds since the epoch; `span` is its own, if it has one."""
        if code is not Code.OK:
            self._failed(times, code, seconds, now, span)
            return
        if self.latencies is not None:
            self.latencies.responded(times, seconds, now, span, well=True)
            self.latencies.succeeded(times, seconds, now)
        self.last_inference = now
        self.success.add(seconds)
        self.queue_seconds += times.queue_seconds
        if times.cache_hit is not None:
            (self.hit if times.cache_hit else self.miss).add(times.cache_seconds)
            if times.cache_hit:
                return
        self.inference_count += times.rows
        self.input_seconds += times.input_seconds
        self.infer_seconds += times.compute_seconds
        self.output_seconds += times.output_seconds

    def _failed(self, times: CallTimes, code: Code, seconds: float, now: float, span: Span | None) -> None:
        """Count a failed request. One that was invalid, or found the queue full, is no failed inference."""
        if not (times.batch_size or times.queued or code in _CANCELLED_CODES):
            self.failures[REJECTED] += code in _REJECTED_CODES
            return
        self.last_inference = now
        self.fail.add(seconds)
        if self.latencies is not None:
            self.latencies.responded(times, seconds, now, span, well=False)
        self.failures[self._reason(times, code)] += 1

    def _reason(self, times: CallTimes, code: Code) -> str:
        if code is Code.CANCELLED:
            return CANCELED
        if not times.batch_size:
            return REJECTED  # Its queue timeout expired.
        if code is Code.DEADLINE_EXCEEDED:
            return CANCELED
        return OTHER if self._composed else BACKEND

    def response(self, index: int) -> Responses:
        """Return the counters of the responses with this index."""
        index = min(index, MAX_RESPONSES)
        responses = self.responses.get(index)
        if responses is None:
            responses = self.responses[index] = Responses()
        return responses
