"""Admission control: limits on what one model, and all models together, hold in queued and running requests.

Strategy: everything here belongs to the event loop, so counting is an addition and needs no lock. A request counts
with the bytes in which it arrived, since its tensors are views of them. Where nothing is held, any request is
admitted: a limit smaller than one request would otherwise never let it through.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NoReturn

from triglot.core.errors import queue_full
from triglot.core.statistics import Reading


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on bytes of requests per model, and on the number and bytes of requests of all models.

    0: unlimited.
    """

    model_bytes: int = 0
    total_requests: int = 0
    total_bytes: int = 0


UNLIMITED = Limits()


class Admission:
    """The totals of all models, and the limits; each model version has a `Gate`."""

    __slots__ = ("bytes", "limits", "requests")

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.requests = 0
        self.bytes = 0


class Gate:
    """Counts what one model version holds. On the event loop; each `enter` is followed by one `leave`."""

    __slots__ = ("_all", "_bytes", "_max_bytes", "_refused", "_requests")

    def __init__(self, admission: Admission) -> None:
        self._all = admission
        self._max_bytes = admission.limits.model_bytes
        self._requests = 0
        self._bytes = 0
        self._refused = {"max_queue_bytes": 0, "max_total_queue_size": 0, "max_total_queue_bytes": 0}

    def enter(self, size: int) -> None:
        """Admit a request of `size` bytes. Raises `QueueFull` when a limit would be exceeded."""
        everything = self._all
        limits = everything.limits
        if self._requests and 0 < self._max_bytes < self._bytes + size:
            self._refuse("max_queue_bytes", f"the model holds {_bytes(self._bytes, size, self._max_bytes)}")
        if everything.requests:
            if 0 < limits.total_requests <= everything.requests:
                self._refuse(
                    "max_total_queue_size", f"all models hold {everything.requests} requests, the most that"
                )
            if 0 < limits.total_bytes < everything.bytes + size:
                text = f"all models hold {_bytes(everything.bytes, size, limits.total_bytes)}"
                self._refuse("max_total_queue_bytes", text)
        self._requests += 1
        self._bytes += size
        everything.requests += 1
        everything.bytes += size

    def leave(self, size: int) -> None:
        """Release a request of `size` bytes."""
        everything = self._all
        self._requests -= 1
        self._bytes -= size
        everything.requests -= 1
        everything.bytes -= size

    def _refuse(self, option: str, text: str) -> NoReturn:
        self._refused[option] += 1
        raise queue_full(f"{text} {option} allows")

    def readings(self) -> Iterator[Reading]:
        """Yield the metrics: what is held, and rejected requests by limit."""
        yield Reading("held_bytes", "Bytes of the model's queued and running requests.", self._bytes)
        yield Reading("held_requests", "The model's queued and running requests.", self._requests)
        for reason, count in self._refused.items():
            yield refusals(reason, count)


def _bytes(held: int, more: int, limit: int) -> str:
    return f"{held} bytes of requests, {more} more would exceed the {limit} that"


def refusals(reason: str, count: int) -> Reading:
    """Return the metric of requests rejected because of a limit; `reason` is the option that sets the limit."""
    return Reading(
        "requests_refused",
        "Rejected requests, by the limit they exceeded.",
        count,
        {"limit": reason},
        counter=True,
    )
