"""The performance goals of the load bench, and whether they were reached."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.rounds import Measured, ratios
from bench.scenarios import IDENTICAL_CALLS

Results = Mapping[str, Sequence[Measured[str]]]
"""Measurements of each line, by the scenario's name."""
C64 = "64 in flight over 8 connections"
BARE, TUNED = "bare grpc.aio", "bare grpc.aio, tuned"


RATE, P50, CPU = "rate", "p50", "cpu"


@dataclass(frozen=True, slots=True)
class Aim:
    """A goal for a line of a scenario: by `kind`, the least ratio of rates (calls per second) to another line, the
    largest ratio of p50, or the largest CPU time."""

    what: str
    scenario: str
    line: str
    than: str
    """The line to compare with; "" with CPU."""
    wanted: float
    """A ratio, or microseconds of CPU per call."""
    kind: str = RATE

    @property
    def text(self) -> str:
        """The goal, as text."""
        if self.kind == CPU:
            return f"CPU at most {self.wanted:g} µs a call"
        if self.kind == P50:
            return f"p50 at most {self.wanted:g} of {self.than}'s"
        return f"at least {self.wanted:g} times {self.than}"

    def measured(self, results: Results) -> float | None:
        """Return the median of the rounds, or of their own ratios; None if it was not measured."""
        lines = {measurement.setting: measurement for measurement in results.get(self.scenario, ())}
        mine, other = lines.get(self.line), lines.get(self.than)
        if mine is None or not mine.rounds:
            return None
        if self.kind == CPU:
            used = [run.cpu * 1e6 for run in mine.rounds if run.cpu is not None]
            return statistics.median(used) if used else None
        if other is None:
            return None
        if self.kind == P50:
            return statistics.median(a.p50 / b.p50 for a, b in zip(mine.rounds, other.rounds, strict=True))
        return statistics.median(ratios(mine, other))

    def met(self, measured: float) -> bool:
        """Return whether the goal was reached, by the exact value and not the rounded one that is printed."""
        return measured >= self.wanted if self.kind == RATE else measured <= self.wanted


def _aio(what: str, scenario: str, line: str = "aio, thread", than: str = TUNED) -> Aim:
    return Aim(f"{what} over aio", scenario, line, than, 0.85)


AIMS = (
    Aim(f"ModelInfer over h2, {C64}", "infer-c64", "h2, thread", IDENTICAL_CALLS, 0.8),
    Aim("the same", "infer-c64", "h2, thread", "", 42, CPU),
    Aim("the same, 8 in flight on one connection", "infer-c8", "h2, thread", IDENTICAL_CALLS, 0.8),
    Aim("the same", "infer-c8", "h2, thread", "", 55, CPU),
    Aim("the same, one in flight", "infer-c1", "h2, thread", BARE, 0.65, P50),
    Aim("V2 REST, JSON 1×16, 8 connections", "rest-json-c8", "rest, thread, one row", "", 55, CPU),
    Aim(f"TF Predict over h2, {C64}", "protocols-c64", "Predict h2", "ModelInfer h2", 0.85),
    Aim(f"grps Predict over h2, {C64}", "protocols-c64", "grps Predict h2", "ModelInfer h2", 0.85),
    Aim("ModelInfer 1 MiB in and out over h2, 8 in flight", "infer-1MiB-c8", "h2, thread", BARE, 2.5),
    Aim("ModelInfer 16 MiB in and out over h2, one in flight", "infer-16MiB-c1", "h2, thread", BARE, 2.5),
    Aim("ModelStreamInfer over h2, 64 sent ahead", "stream-c64", "h2, thread", BARE, 5),
    _aio(f"ModelInfer, {C64},", "infer-c64"),
    _aio("the same, 8 in flight on one connection,", "infer-c8"),
    _aio("the same, one in flight,", "infer-c1"),
    _aio(f"TF Predict, {C64},", "protocols-c64", "Predict aio", "ModelInfer bare, tuned"),
    _aio(f"grps Predict, {C64},", "protocols-c64", "grps Predict aio", "ModelInfer bare, tuned"),
    _aio("ModelInfer 1 MiB in and out, 8 in flight,", "infer-1MiB-c8"),
    _aio("ModelInfer 16 MiB in and out, one in flight,", "infer-16MiB-c1"),
    _aio("ModelStreamInfer, 64 sent ahead,", "stream-c64"),
    Aim("V2 REST, JSON 1×150,528", "rest-json-1x150528-c4", "rest, thread", "bare aiohttp + json", 8),
    Aim("V2 REST, binary 1×150,528", "rest-binary-1x150528-c4", "rest, thread", "bare aiohttp", 0.7),
    Aim("two workers on two cores, a model of 200 µs", "workers-c64", "2 workers", "1 worker", 1.5),
)


def rows(results: Results) -> list[list[str]]:
    """Return one table line per goal: subject, goal, measured value, whether it was reached."""
    table = []
    for aim in AIMS:
        figure = aim.measured(results)
        verdict = ["not measured", ""] if figure is None else [f"{figure:.2f}", "yes" if aim.met(figure) else "no"]
        table.append([aim.what, aim.text, *verdict])
    return table
