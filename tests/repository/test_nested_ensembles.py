"""Ensembles that are made of ensembles: too many in a row are refused when they are loaded."""

from __future__ import annotations

import itertools
from pathlib import Path

from parts_on_disk import GatedLoads, Site
from reconciling import reconciling

from served_models import Function, ensemble, ints, serving, step, twice
from triglot.core.call import MAX_MODEL_CALLS
from triglot.repository.manager.plan import State
from triglot.repository.scan.source import ModelFiles

READY, UNAVAILABLE = State.READY, State.UNAVAILABLE
DEEP = 330
"""Levels for which Python has too few frames, where each level takes a few."""


def row(here: Site, prefix: str, levels: int, last: str) -> list[ModelFiles]:
    """Ensembles in a row, `prefix`0 being made of `prefix`1 and so on."""
    names = [*(f"{prefix}{at}" for at in range(levels)), last]
    return [here.ensemble(name, part) for name, part in itertools.pairwise(names)]


async def test_too_many_in_a_row(tmp_path: Path) -> None:
    async with reconciling(GatedLoads()) as reconciler:
        here = Site(reconciler, tmp_path)
        here.want(here.model("leaf"), *row(here, "e", DEEP, "leaf"))
        deepest = DEEP - MAX_MODEL_CALLS
        await here.until(**{f"e{at}": READY if at >= deepest else UNAVAILABLE for at in range(DEEP)})
        assert reconciler.registry.is_ready(f"e{deepest}")
        names = " -> ".join([*(f"e{at}" for at in range(deepest - 1, DEEP)), "leaf"])
        text = "config.pbtxt: expected at most 16 nested ensembles, got"
        assert here.reason(f"e{deepest - 1}") == f"e{deepest - 1}/{text}: {names}"
        here.want(without=["leaf"])
        await here.until(**{f"e{at}": UNAVAILABLE for at in range(DEEP)})


async def test_as_many_as_may_be_answer() -> None:
    names = [f"e{at:02d}" for at in range(MAX_MODEL_CALLS)]
    nested = {
        name: ensemble(step(part, "x", "y")) for name, part in zip(names, [*names[1:], "twice"], strict=True)
    }
    async with serving({"twice": Function(twice), **nested}) as served:
        assert (await served.infer(names[0], ints(1, 2))).tolist() == [2, 4]


async def test_a_row_that_grows_while_it_serves(tmp_path: Path) -> None:
    """Each part alone is nested as deep as may be; what is made of it is as ready, and stops with it."""
    async with reconciling(GatedLoads()) as reconciler:
        here = Site(reconciler, tmp_path)
        rows = [f"r{number}_" for number in range(DEEP // MAX_MODEL_CALLS + 1)]
        for prefix in rows:
            last = f"{prefix}last"
            here.want(here.model(last), *row(here, prefix, MAX_MODEL_CALLS - 1, last))
        firsts = {f"{prefix}0": READY for prefix in rows}
        await here.until(**firsts)
        for prefix, following in itertools.pairwise(rows):
            here.want(here.ensemble(f"{prefix}last", f"{following}0", stamp=1))
            await here.until(**{f"{prefix}last": READY})
            await reconciler.wait_for([f"{prefix}last"])
        assert reconciler.registry.is_ready(f"{rows[0]}0")
        here.want(without=[f"{rows[-1]}last"])
        assert not reconciler.registry.is_ready(f"{rows[0]}0")
        await here.until(**dict.fromkeys(firsts, UNAVAILABLE))
