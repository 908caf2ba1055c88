"""Rows of ended calls become the spans that they stand for, in whatever company they are encoded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import ScopeSpans, Span

from triglot.telemetry.spans.otlp import INTERNAL, SERVER, constant, link
from triglot.telemetry.spans.rows import LOCAL, SAMPLED, Row, encode

OFFSET = 1_700_000_000_000_000_000
NANOSECONDS = 1_000
"""A double holds an instant so exactly."""


@dataclass(frozen=True)
class FinishedCall:
    """A call that has ended; times in seconds, None where it did not come so far."""

    name: str
    request_id: str
    trace: int
    parent: int
    number: int
    started: float
    waited: float | None
    computed: float | None
    batch: int

    @property
    def began(self) -> float:
        return self.started + (self.waited or 0.0)

    @property
    def end_time(self) -> float:
        return self.began + (self.computed or 0.0)

    @property
    def id(self) -> int:
        return self.number << 2 | 1

    @property
    def spans(self) -> int:
        return 1 + (self.waited is not None) + (self.computed is not None)

    def row(self) -> Row:
        ran, trace = self.computed is not None, f"{self.trace:032x}"
        return (
            constant(self.name, SERVER, ("size", len(self.name))),
            self.request_id.encode(),
            constant("compute", INTERNAL, ("model", self.name)) if ran else b"",
            link(trace, self.batch) if self.batch and ran else b"",
            trace,
            f"{self.parent:016x}" if self.parent else "",
            self.id,
            SAMPLED,
            self.started,
            self.end_time,
            0.0 if self.waited is None else self.started,
            self.began if ran else 0.0,
            self.waited or 0.0,
            0.0,
            self.computed or 0.0,
            0.0,
            self.spans,
        )

    def check(self, spans: Sequence[Span]) -> None:
        """These are the spans of its trace."""
        by_name = {span.name: span for span in spans}
        assert len(by_name) == len(spans) == self.spans
        own = by_name.pop(self.name)
        assert (own.span_id, own.kind, own.flags) == (self.id.to_bytes(8), SERVER, SAMPLED)
        assert own.parent_span_id == (self.parent.to_bytes(8) if self.parent else b"")
        attributes = {
            attribute.key: attribute.value.string_value or attribute.value.int_value
            for attribute in own.attributes
        }
        request_id = {"triglot.request.id": self.request_id} if self.request_id else {}
        assert attributes == {"size": len(self.name), **request_id}
        instants(own, self.started, self.end_time)
        if self.waited is not None:
            instants(by_name["queue"], self.started, self.began)
        if self.computed is not None:
            compute = by_name["compute"]
            instants(compute, self.began, self.end_time)
            assert [attribute.value.string_value for attribute in compute.attributes] == [self.name]
            links = [(link.trace_id, link.span_id) for link in compute.links]
            assert links == ([(self.trace.to_bytes(16), self.batch.to_bytes(8))] if self.batch else [])
        for child in by_name.values():
            assert (child.parent_span_id, child.kind, child.flags) == (own.span_id, INTERNAL, LOCAL)
        ids = {own.span_id, *(span.span_id for span in by_name.values())}
        assert {int.from_bytes(span_id) >> 2 for span_id in ids} == {self.number}
        assert len(ids) == len(spans)


def instants(span: Span, start: float, end: float) -> None:
    assert abs(span.start_time_unix_nano - OFFSET - start * 1e9) < NANOSECONDS
    assert abs(span.end_time_unix_nano - OFFSET - end * 1e9) < NANOSECONDS


seconds = st.floats(0, 100)
calls = st.builds(
    FinishedCall,
    name=st.text(st.characters(codec="utf-8"), min_size=8, max_size=200),
    request_id=st.text(st.characters(codec="utf-8"), max_size=40),
    trace=st.integers(1, 2**128 - 1),
    parent=st.integers(0, 2**64 - 1),
    number=st.integers(1, 2**62 - 1),
    started=st.floats(1, 10_000),
    waited=st.none() | seconds,
    computed=st.none() | seconds,
    batch=st.just(0) | st.integers(1, 2**64 - 1),
)


@given(st.lists(calls, max_size=20, unique_by=lambda call: call.trace))
def test_spans_of_rows(finished_calls: list[FinishedCall]) -> None:
    message = ScopeSpans.FromString(encode([call.row() for call in finished_calls], OFFSET))
    assert len(message.spans) == sum(call.spans for call in finished_calls)
    for call in finished_calls:
        call.check([span for span in message.spans if span.trace_id == call.trace.to_bytes(16)])


def test_a_model_that_began_before_it_was_noted() -> None:
    """Threads note when the model began and ended; the loop may have ended the call before."""
    row = FinishedCall("name", "", 1, 0, 1, started=5.0, waited=9.0, computed=9.0, batch=0).row()
    early = (*row[:9], 6.0, *row[10:])
    spans = {span.name: span for span in ScopeSpans.FromString(encode([early], OFFSET)).spans}
    instants(spans["name"], 5.0, 6.0)
    instants(spans["queue"], 5.0, 6.0)
    instants(spans["compute"], 6.0, 6.0)
