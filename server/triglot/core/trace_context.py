"""W3C Trace Context: what ties the spans of one request together across processes (w3.org/TR/trace-context)."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_TRACESTATE = 512
"""Characters that have to be passed on; a longer text is not."""
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
LENGTH = 55


class Span(Protocol):
    """A span that is recorded."""

    @property
    def traceparent(self) -> str:
        """What its children send."""


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


def received_context(metadata: Iterable[tuple[str, str | bytes]]) -> tuple[str, str]:
    """`traceparent` and `tracestate` as they came; both "" where the first is missing or not valid."""
    parents: list[str] = []
    states: list[str] = []
    for name, value in metadata:
        lowered = name.lower()
        if lowered == TRACEPARENT:
            parents.append(str(value).strip(" \t"))
        elif lowered == TRACESTATE:
            states.append(str(value).strip(" \t"))
    if len(parents) != 1 or not is_valid(parents[0]):
        return "", ""
    state = ",".join(states)
    return parents[0], state if len(state) <= MAX_TRACESTATE else ""
