"""W3C Trace Context: what ties the spans of one request together across processes (w3.org/TR/trace-context)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_TRACESTATE = 512
"""Characters that have to be passed on; a longer text is not."""
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
LENGTH = 55


NO_CONTEXT = ("", "")


class Batch(Protocol):
    """The span of requests that a model executes together."""

    @property
    def traceparent(self) -> str:
        """What calls on their behalf send."""

    def end(self, model: str, version: int, began: float, ended: float, size: int, rows: int, /) -> None:
        """On the event loop: so many requests, of so many inferences, ran between these instants of
        `time.perf_counter`."""


class Span(Protocol):
    """The span of a sampled call. `batch`: that of the batch which it is executed in."""

    batch: Any

    @property
    def trace(self) -> str:
        """The id of its trace, in hex."""

    @property
    def child_parent(self) -> int:
        """The id of the parent of spans on its behalf."""

    @property
    def traceparent(self) -> str:
        """What calls on its behalf send."""

    @property
    def response_traceparent(self) -> str:
        """What its caller is told."""

    @property
    def state(self) -> str:
        """What is sent as `tracestate`."""

    def begin_http(self, verb: str, route: str, path: str, /) -> None:
        """It came over HTTP: for this route, a template of paths, with this path, without a query."""

    def end_http(self, status: int, /) -> None:
        """The response's status."""

    def begin_batch(self, spans: Any, /) -> Any:
        """The `Batch` of the calls with these spans, this one the first. May run on any thread."""


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
    """Whether who sends a valid one records the trace."""
    return traceparent[LENGTH - 1] in "13579bdf"


def received_context(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[str, str]:
    """`traceparent` and `tracestate` as they came; both "" without the first. Of several parents, the last."""
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
    """What of it may be passed on: nothing without a valid `traceparent`, and no `tracestate` that is too long."""
    parent, state = context
    if not parent or not is_valid(parent):
        return NO_CONTEXT
    return parent, state if len(state) <= MAX_TRACESTATE else ""
