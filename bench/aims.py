"""What we aim at, and whether it was reached."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from bench.rounds import Measured, ratios

Results = Mapping[str, Sequence[Measured[str]]]
"""By the name of the scenario."""
BARE, TUNED = "bare grpc.aio", "bare grpc.aio, tuned"


@dataclass(frozen=True, slots=True)
class Aim:
    """A ratio of two lines of a scenario: of the calls a second at least, or of the p50 at most."""

    what: str
    scenario: str
    line: str
    than: str
    wanted: float
    p50: bool = False

    @property
    def text(self) -> str:
        """The figure to reach."""
        if self.p50:
            return f"p50 at most {self.wanted:g} of {self.than}'s"
        return f"at least {self.wanted:g} times {self.than}"

    def measured(self, results: Results) -> float | None:
        """The median of the rounds' own ratios; None where one of the two was not measured."""
        lines = {one.setting: one for one in results.get(self.scenario, ())}
        mine, other = lines.get(self.line), lines.get(self.than)
        if mine is None or other is None or not mine.rounds:
            return None
        if self.p50:
            return statistics.median(a.p50 / b.p50 for a, b in zip(mine.rounds, other.rounds, strict=True))
        return statistics.median(ratios(mine, other))

    def met(self, measured: float) -> bool:
        """Whether it was reached, by the figure itself and not by what is printed of it."""
        return measured <= self.wanted if self.p50 else measured >= self.wanted


def _aio(what: str, scenario: str, line: str = "aio, thread", than: str = TUNED) -> Aim:
    return Aim(f"{what} over aio", scenario, line, than, 0.85)


AIMS = (
    Aim("ModelInfer 1×16 over h2, on an instance thread, 64 in flight", "infer-1x16-c64", "h2, thread", BARE, 10),
    Aim("the same, 8 in flight", "infer-1x16-c8", "h2, thread", BARE, 6),
    Aim("the same, one in flight", "infer-1x16-c1", "h2, thread", BARE, 0.65, p50=True),
    Aim("TF Predict 1×16 over h2, 64 in flight", "protocols-1x16-c64", "Predict h2", "ModelInfer h2", 0.85),
    Aim("grps Predict 1×16 over h2, 64 in flight", "protocols-1x16-c64", "grps Predict h2", "ModelInfer h2", 0.85),
    Aim("ModelInfer 1 MiB in and out over h2, 8 in flight", "infer-1MiB-c8", "h2, thread", BARE, 2.5),
    Aim("ModelInfer 16 MiB in and out over h2, one in flight", "infer-16MiB-c1", "h2, thread", BARE, 2.5),
    Aim("ModelStreamInfer 1×16 over h2, 64 sent ahead", "stream-1x16-c64", "h2, thread", BARE, 5),
    _aio("ModelInfer 1×16, 64 in flight,", "infer-1x16-c64"),
    _aio("the same, 8 in flight,", "infer-1x16-c8"),
    _aio("the same, one in flight,", "infer-1x16-c1"),
    _aio("TF Predict 1×16, 64 in flight,", "protocols-1x16-c64", "Predict aio", "ModelInfer bare, tuned"),
    _aio("grps Predict 1×16, 64 in flight,", "protocols-1x16-c64", "grps Predict aio", "ModelInfer bare, tuned"),
    _aio("ModelInfer 1 MiB in and out, 8 in flight,", "infer-1MiB-c8"),
    _aio("ModelInfer 16 MiB in and out, one in flight,", "infer-16MiB-c1"),
    _aio("ModelStreamInfer 1×16, 64 sent ahead,", "stream-1x16-c64"),
    Aim("V2 REST, JSON 1×150,528", "rest-json-1x150528-c4", "rest, thread", "bare aiohttp + json", 8),
    Aim("V2 REST, binary 1×150,528", "rest-binary-1x150528-c4", "rest, thread", "bare aiohttp", 0.7),
    Aim("two workers on two cores, a model of 200 µs", "workers-1x16-c64", "2 workers", "1 worker", 1.5),
)


def rows(results: Results) -> list[list[str]]:
    """One line per aim: what, the aim, what was measured, whether it was met."""
    table = []
    for aim in AIMS:
        figure = aim.measured(results)
        verdict = ["not measured", ""] if figure is None else [f"{figure:.2f}", "yes" if aim.met(figure) else "no"]
        table.append([aim.what, aim.text, *verdict])
    return table
