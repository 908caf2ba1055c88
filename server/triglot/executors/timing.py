"""Measures batches and the responses of streams, for the statistics (spec 5.9)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import Any, Protocol

from triglot.core.call import Call
from triglot.core.statistics import Duration, Statistics
from triglot.core.types import Answer


class Executed(Protocol):
    """One request of a batch."""

    @property
    def inputs(self) -> Any:
        """Arrays by name."""

    @property
    def call(self) -> Call:
        """The request's context."""


class BatchTimes:
    """Times of one batch. `began` and `ended` are `time.perf_counter` instants; 0 until they are reached."""

    __slots__ = ("_answered", "_joined", "_span", "began", "ended")

    def __init__(self) -> None:
        self.began = self._joined = self._answered = self.ended = 0.0
        self._span: Any = None

    def begin(self, calls: Sequence[Call]) -> None:
        """Note the start of the batch of these calls; begins a span for several, if any of them is sampled."""
        if len(calls) > 1:
            spans = [call.span for call in calls if call.span is not None]
            if spans:
                self._span = spans[0].begin_batch(spans)
        self.began = self._joined = perf_counter()

    def joined(self) -> None:
        """Note that the inputs are joined, and the model starts."""
        self._joined = perf_counter()

    def answered(self) -> None:
        """Note that the model has ended successfully."""
        self._answered = perf_counter()

    def end(self) -> None:
        """Note that every member has its outcome."""
        self.ended = perf_counter()

    @property
    def joining(self) -> float:
        """Seconds from the start of the batch to the model's start."""
        return self._joined - self.began

    @property
    def splitting(self) -> float:
        """Seconds from the model's end to the end of the batch; 0 if the model failed."""
        return self.ended - self._answered if self._answered else 0.0

    def count(self, members: Sequence[Executed], counts: Sequence[int] = ()) -> None:
        """Count the batch in the statistics, and end its span. On the event loop.

        `members` were executed together; `counts` are the rows of each, if known.
        """
        calls = [member.call for member in members]
        if (span := self._span) is not None:
            self._span = None
            first = calls[0]
            rows = sum(counts) or len(calls)
            span.end(first.model_name, first.model_version, self.began, self.ended, len(calls), rows)
        # A member may be a warm-up's, without statistics, or have been cancelled in the model's own queue.
        statistics = next((call.statistics for call in calls if call.statistics is not None), None)
        if statistics is None or not any(call.batch_size for call in calls):
            return
        counts = counts or [statistics.rows(member.inputs) for member in members]
        for call, rows in zip(calls, counts, strict=True):
            call.rows += rows
        infer = self.ended - self.began - self.joining - self.splitting
        statistics.executed(sum(counts), infer, self.joining, self.splitting)


class ResponseTimes:
    """Times of the responses of one call of a decoupled model, one after the other.

    `asked` and `computed` are called where the model runs, a thread or the event loop, all else on the event loop.
    """

    __slots__ = ("_call", "_computed", "_final", "_index", "_over", "_since", "_statistics")

    def __init__(self, call: Call) -> None:
        self._call = call
        # Those of a call that is not counted are discarded.
        self._statistics = call.statistics or Statistics()
        self._computed: deque[float] = deque()
        self._since = 0.0
        self._index = 0
        self._final = self._over = False

    def asked(self) -> None:
        """Note that the model starts to compute its next response."""
        self._since = perf_counter()

    def computed(self) -> None:
        """Note that the model has computed its next response, or has ended."""
        self._computed.append(perf_counter() - self._since)

    def convert(self, convert: Callable[[Any], Any], answer: Any) -> Any:
        """Return `convert(answer)`, and count the response. Raise as `convert`."""
        began = perf_counter()
        self._final = isinstance(answer, Answer) and answer.final
        empty = self._final and not answer
        if not empty and not self._call.responded:
            self._call.responded = began
        try:
            converted = convert(answer)
        except BaseException:
            self.ended(failed=True)
            raise
        output = perf_counter() - began
        self._call.output_seconds += output
        infer = self._seconds()
        responses = self._statistics.response(self._index)
        if empty:
            responses.empty_response.add(infer)
        else:
            responses.infer.add(infer)
            responses.output.add(output)
            responses.success.add(infer + output)
        self._index += 1
        return converted

    def ended(self, *, failed: bool = False) -> None:
        """Count the end of the stream: no response follows, or an error in its place."""
        self._end("fail" if failed else "empty_response")

    def left(self) -> None:
        """Count a cancelled response if the stream has not ended: the reader has stopped."""
        self._end("cancel")

    def _end(self, what: str) -> None:
        # Nothing to count for a stream that never ran, nor after a response that was marked as the last one.
        if self._since and not self._over and (not self._final or what == "fail"):
            duration: Duration = getattr(self._statistics.response(self._index), what)
            duration.add(self._seconds())
        self._over = True

    def _seconds(self) -> float:
        return self._computed.popleft() if self._computed else perf_counter() - self._since
