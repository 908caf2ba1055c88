"""The table of request cases: the outcome on both sides by model, client, event, and point in a request's life."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from tests.protocol_clients.abortable import CLIENTS, CUT_OFF, IN_BAND, LEFT, Client, Request

MODELS = (
    "unary_thread",
    "unary_loop",
    "decoupled_thread",
    "decoupled_loop",
    "pushed_thread",
    "batched_thread",
    "batched_loop",
    "growing_thread",
    "growing_loop",
    "sequence_thread",
    "nested_thread",
    "nested_loop",
    "ensemble_loop",
    "unary_process",
    "decoupled_process",
    "pushed_process",
    "batched_process",
    "sequence_process",
)
EVENTS = ("ok", "cancel", "deadline", "error", "crash", "shutdown")
POINTS = {
    "unary": ("queued", "running"),
    "decoupled": ("queued", "yield 1", "yield 2", "end"),
    "pushed": ("queued", "yield 1", "yield 2", "end"),
    "batched": ("queued", "running"),
    "growing": ("growing", "running"),
    "sequence": ("backlog", "queued", "running"),
    "nested": ("queued", "step 1"),
    "ensemble": ("queued", "step 1", "step 2"),
}
"""Points of a request's life, by the kind of its model: queued behind another request ("queued") or another
sequence ("backlog"), alone in a batch that waits for more ("growing"), or in the code of the model or of one that
it calls."""
BEHIND = ("queued", "backlog")
"""Points where a request waits for another one."""
WAITING = (*BEHIND, "growing")
QUEUES = {"nested_loop": "step_1", "ensemble_loop": "step_1"}
"""The model whose queue requests wait in, if it is not the one that was called."""
SEEN = {
    "ok": "OK",
    "cancel": "CANCELLED",
    "deadline": "DEADLINE_EXCEEDED",
    "error": "INTERNAL",
    "crash": "UNAVAILABLE",
    "shutdown": "UNAVAILABLE",
}
"""Status code that the server counts, by event."""
OTHER_CODES = {("kserve_stream", "shutdown"): "CANCELLED"}
"""Exceptions by client and event: the requests of a stream do not learn why it is cancelled."""
_GRPC = SEEN | {"cancel": LEFT}
_HTTP = {"ok": "200", "cancel": LEFT, "deadline": "504", "error": "500", "crash": "503", "shutdown": "503"}
_REST_OUTCOMES = {
    "ok": "OK",
    "cancel": LEFT,
    "deadline": "status 504",
    "error": "status 500",
    "crash": "status 503",
}
OUTCOMES: dict[str, dict[str, str]] = {
    "kserve_grpc": _GRPC,
    "kserve_stream": _GRPC | {"error": IN_BAND, "crash": IN_BAND},
    "kserve_rest": _HTTP,
    "tfserving_grpc": _GRPC,
    "tfserving_rest": _HTTP,
    "grps_grpc": _REST_OUTCOMES | {"shutdown": "UNAVAILABLE"},
    "grps_streaming": _REST_OUTCOMES | {"shutdown": "UNAVAILABLE"},
    "grps_http": _HTTP,
    "grps_chunked": _REST_OUTCOMES | {"ok": "200", "shutdown": CUT_OFF},
}
"""Outcome for the client, by client and event."""
ORPHAN_OUTCOMES = {"kserve_grpc": "INVALID_ARGUMENT", "kserve_stream": IN_BAND, "kserve_rest": "400"}
"""Outcome, by client, of a request of a sequence that has ended with its process."""
AT_ITS_DEADLINE = {"DEADLINE_EXCEEDED", "status 504", IN_BAND}
"""Outcomes for a gRPC client at its deadline: its own timer's, or what the server has sent by then."""

BETWEEN_ANSWERS = {"UNAVAILABLE", "status 503"}
"""Outcomes of a grps stream at shutdown: after a response in flight, a further one reports the error as usual."""


@dataclass(frozen=True)
class Case:
    """One cell of the table."""

    model: str
    client: str
    event: str
    point: str

    @property
    def kind(self) -> str:
        """Kind of model, a key of `POINTS`."""
        return self.model.partition("_")[0]

    @property
    def waits(self) -> bool:
        """Whether the request waits for another one."""
        return self.point in BEHIND

    @property
    def queue(self) -> str:
        """The model whose queue the request waits in."""
        return QUEUES.get(self.model, self.model)

    @property
    def survives(self) -> bool:
        """Whether the event does not affect the request: it waits for a process that crashes, and is replaced."""
        return self.event == "crash" and self.waits and not self.orphaned

    @property
    def orphaned(self) -> bool:
        """Whether the request's sequence has ended with the process that held its state."""
        return (self.event, self.point, self.kind) == ("crash", "queued", "sequence")

    @property
    def outcomes(self) -> set[str]:
        """Possible outcomes for the client."""
        if self.survives:
            return {CLIENTS[self.client].good}
        if self.orphaned:
            return {ORPHAN_OUTCOMES[self.client]}
        if self.event == "deadline" and "grpc" in self.client + CLIENTS[self.client].endpoint[1].lower():
            return AT_ITS_DEADLINE
        if (self.client, self.event) == ("grps_streaming", "shutdown"):
            return BETWEEN_ANSWERS
        return {OUTCOMES[self.client][self.event]}

    @property
    def counted_code(self) -> str:
        """Status code that the server counts."""
        if self.survives:
            return "OK"
        if self.orphaned:
            return "INVALID_ARGUMENT"
        return OTHER_CODES.get((self.client, self.event), SEEN[self.event])

    @property
    def may_count_as(self) -> set[str]:
        """`counted_code`, and the code that is possible as well: a client cancels at its deadline.

        A request that was read late is then cancelled before the server's deadline.
        """
        by_its_own_clock = self.event == "deadline" and CLIENTS[self.client].endpoint[1] == "GRPC"
        return {self.counted_code, "CANCELLED"} if by_its_own_clock else {self.counted_code}

    def __str__(self) -> str:
        return f"{self.model}-{self.client}-{self.event}-{self.point}".replace(" ", "_")


def carries(client: type[Client] | Client, model: str) -> bool:
    """Return whether this client can call such a model."""
    kind = model.partition("_")[0]
    if kind in ("decoupled", "pushed"):
        # ModelStreamInfer has only the one response that a model returns which may stream, but is not decoupled.
        return client.streams and (kind == "decoupled" or client.endpoint[0] == "grps")
    if kind in ("growing", "nested", "ensemble"):
        return not client.streams
    return client.sequences if kind == "sequence" else True


def points(model: str, event: str) -> tuple[str, ...]:
    """Return the points where the event may happen to a request of such a model."""
    points_of_model = POINTS[model.partition("_")[0]]
    running = points_of_model[points_of_model.index(first_point(model)) :]
    if event == "ok":
        return running[-1:]
    if event == "error" or model in ("unary_loop", "decoupled_loop"):
        return running
    if event == "deadline" and "growing" in points_of_model:
        return running  # A batch does not wait for more requests that long.
    return points_of_model


def cases() -> Iterator[Case]:
    """Yield all cases."""
    for model in MODELS:
        for event in EVENTS:
            if event == "crash" and not model.endswith("_process"):
                continue
            for point in points(model, event):
                for name, client in CLIENTS.items():
                    if carries(client, model):
                        yield Case(model, name, event, point)


def pairs(case: Case) -> set[tuple[tuple[str, str], ...]]:
    """Return the pairs of properties that the case covers: each two of its four, with their values."""
    return set(
        itertools.combinations(((name, getattr(case, name)) for name in ("model", "client", "event", "point")), 2)
    )


@cache
def pairwise() -> list[Case]:
    """Return cases that cover every possible pair of properties (pairwise testing): a fifth of all."""
    candidates = {case: pairs(case) for case in cases()}
    left = set().union(*candidates.values())
    chosen = []
    while left:
        best = max(candidates, key=lambda case: len(candidates[case] & left))
        left -= candidates[best]
        chosen.append(best)
    return chosen


def of(*events: str, http: bool | None = None) -> list[Any]:
    """Return pytest parameters for the cases of these events; `http`: only those of HTTP, or of gRPC."""
    return [
        pytest.param(case, id=str(case))
        for case in pairwise()
        if case.event in events and http in (None, CLIENTS[case.client].endpoint[1] == "REST")
    ]


_sequences = itertools.count(1)


def good(model: str, text: str = "good", timeout: float | None = None) -> Request:
    """Return a request that succeeds if nothing happens to it; for a model of sequences, a whole sequence."""
    if not model.startswith("sequence"):
        return Request(model, text, timeout)
    return part(Request(model, text, timeout), next(_sequences), start=True, end=True)


def part(request: Request, sequence: int, *, start: bool = False, end: bool = False) -> Request:
    """Return the request as a part of a sequence."""
    parameters = (("sequence_id", sequence), ("sequence_start", start), ("sequence_end", end))
    return replace(request, parameters=parameters)


def answers_of(model: str, text: str) -> list[str]:
    """Return the texts of such a model's responses to a request with this text."""
    return [text] * (2 if model.partition("_")[0] in ("decoupled", "pushed") else 1)


def first_point(model: str) -> str:
    """Return the first point that is in the model's code."""
    return next(point for point in POINTS[model.partition("_")[0]] if point not in WAITING)
