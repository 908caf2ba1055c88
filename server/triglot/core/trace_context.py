"""W3C Trace Context: links the spans of one request across processes (w3.org/TR/trace-context)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_TRACESTATE = 512
"""Longest `tracestate` that is passed on, in characters; the standard requires no more."""
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
LENGTH = 55


NO_CONTEXT = ("", "")


class Batch(Protocol):
    """The span of a batch: requests that a model executes together."""

    @property
    def traceparent(self) -> str:
        """`traceparent` to send with calls on behalf of the batch."""

    def end(self, model: str, version: int, began: float, end_time: float, size: int, rows: int, /) -> None:
        """End the span: `size` requests with `rows` inferences ran from `began` to `end_time`.

        The instants are those of `time.perf_counter`. On the event loop.
        """


class Span(Protocol):
    """The span of a sampled call. `batch` is the span of the batch that it is executed in."""

    batch: Any

    @property
    def trace(self) -> str:
        """Trace id in hex."""

    @property
    def child_parent(self) -> int:
        """Span id that is the parent of spans on behalf of this call."""

    @property
    def traceparent(self) -> str:
        """`traceparent` to send with calls on behalf of this one."""

    @property
    def response_traceparent(self) -> str:
        """`traceparent` to return to the client."""

    @property
    def state(self) -> str:
        """`tracestate` to send."""

    def begin_http(self, verb: str, route: str, path: str, /) -> None:
        """Record the HTTP request: its verb, its route's path template, and its path without the query."""

    def end_http(self, status: int, /) -> None:
        """Record the response's HTTP status."""

    def begin_batch(self, spans: Any, /) -> Any:
        """Return the `Batch` of the calls with these spans, this one the first. May run on any thread."""


def is_valid(traceparent: str) -> bool:
    """Whether it is a `traceparent` of this version of the standard, or begins like one of a later version."""
    if len(traceparent) == LENGTH:
        return _TRACEPARENT.fullmatch(traceparent) is not None
    return (
        len(traceparent) > LENGTH
        and not traceparent.startswith("00")
        and traceparent[LENGTH] == "-"
        and _TRACEPARENT.match(traceparent) is not None
    )


def is_sampled(traceparent: str) -> bool:
    """Whether the sampled flag of a valid `traceparent` is set."""
    return traceparent[LENGTH - 1] in "13579bdf"


def received_context(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[str, str]:
    """Return `traceparent` (the last one sent) and `tracestate` as received; both "" without a `traceparent`."""
    parent = ""
    states: list[str] = []
    for name, value in metadata:
        lowered = name.lower()
        if lowered == TRACEPARENT:
            parent = str(value).strip(" \t")
        elif lowered == TRACESTATE:
            states.append(str(value).strip(" \t"))
    return (parent, ",".join(states)) if parent else NO_CONTEXT


def checked(context: tuple[str, str]) -> tuple[str, str]:
    """Return what may be passed on: nothing without a valid `traceparent`, no `tracestate` that is too long."""
    parent, state = context
    if not parent or not is_valid(parent):
        return NO_CONTEXT
    return parent, state if len(state) <= MAX_TRACESTATE else ""
