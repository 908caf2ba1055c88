"""What is taken from a client's `traceparent` and `tracestate` (W3C Trace Context)."""

from __future__ import annotations

import pytest

from triglot.core.call import Call
from triglot.core.trace_context import checked, received_context

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def context(*metadata: tuple[str, str]) -> tuple[str, str]:
    return checked(received_context(metadata))


def test_a_valid_context_is_passed_on() -> None:
    assert context(("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2")) == (PARENT, "a=1,b=2")
    assert Call(read_metadata=lambda: [("Traceparent", f" {PARENT} ")]).traceparent == PARENT


@pytest.mark.parametrize(
    "parent",
    [
        "",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "-extra",  # Not in this version.
        "ff" + PARENT[2:],
        "00-" + "0" * 32 + PARENT[35:],
        PARENT[:36] + "0" * 16 + PARENT[52:],
        PARENT.replace("-", "_"),
        PARENT + "\n",
    ],
)
def test_an_invalid_context_is_none(parent: str) -> None:
    assert context(("traceparent", parent), ("tracestate", "a=1")) == ("", "")


def test_a_later_version_may_say_more() -> None:
    later = "cc" + PARENT[2:]
    assert context(("traceparent", later))[0] == later
    assert context(("traceparent", later + "-what-comes"))[0] == later + "-what-comes"
    assert context(("traceparent", later + "what-comes"))[0] == ""


def test_of_two_parents_the_last_one_counts() -> None:
    assert context(("traceparent", "00"), ("traceparent", PARENT)) == (PARENT, "")


def test_no_trace_context() -> None:
    assert context(("tracestate", "a=1")) == ("", "")


def test_a_long_state_is_not_passed_on() -> None:
    assert context(("traceparent", PARENT), ("tracestate", "a=" + "1" * 600)) == (PARENT, "")
