"""Ensembles wait for the models that they are made of, and follow what becomes of these."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.repository.parts_on_disk import GatedLoads, Site
from tests.repository.reconciling import reconciling
from tests.waiting import until
from triglot import Step
from triglot.repository.manager.plan import State
from triglot.scheduling.servable import Servable

LOADING, READY, UNAVAILABLE = State.LOADING, State.READY, State.UNAVAILABLE


@asynccontextmanager
async def site(folder: Path, **options: Any) -> AsyncIterator[tuple[Site, GatedLoads]]:
    loads = GatedLoads()
    async with reconciling(loads, **options) as reconciler:
        yield Site(reconciler, folder), loads
        loads.release()


async def test_it_serves_after_its_parts(tmp_path: Path) -> None:
    """While it waits, others have their turn to load."""
    async with site(tmp_path) as (here, loads):
        loads.hold("p", "q")
        here.want(here.ensemble("e", "p", "q"), here.model("p"), here.model("q"), here.model("z"))
        await until(lambda: loads.begun == ["e", "p"])
        assert here.state("e") is LOADING
        assert not here.reconciler.registry.is_ready("e")
        loads.release("p")
        await until(lambda: loads.begun == ["e", "p", "q"])
        assert (here.state("e"), here.state("p")) == (LOADING, READY)
        loads.release("q")
        await here.until(e=READY, q=READY, z=READY)
        assert here.reconciler.registry.is_ready("e")
        assert here.reconciler.registry.all_ready()


async def test_a_part_that_fails(tmp_path: Path) -> None:
    """It says why; when the part has been mended, both serve."""
    async with site(tmp_path) as (here, loads):
        loads.failing["p"] = "no disk"
        here.want(here.ensemble("e", "p"), here.model("p"))
        await here.until(e=UNAVAILABLE, p=UNAVAILABLE)
        assert here.reason("e") == (
            "e/config.pbtxt: ensemble_scheduling.step[0].model_name: 'p' is not available: no disk"
        )
        del loads.failing["p"]
        here.want(here.model("p", stamp=1))
        await here.until(e=READY, p=READY)


async def test_missing_part(tmp_path: Path) -> None:
    async with site(tmp_path) as (here, _):
        here.want(here.ensemble("e", "p"))
        await here.until(e=UNAVAILABLE)
        assert here.reason("e").endswith("'p' is not available: there is no such model")
        here.want(here.model("p"))
        await here.until(e=READY, p=READY)


async def test_part_is_removed_and_added_again(tmp_path: Path) -> None:
    async with site(tmp_path) as (here, loads):
        here.want(here.ensemble("outer", "e"), here.ensemble("e", "p"), here.model("p"))
        await here.until(outer=READY, e=READY, p=READY)
        here.want(without=["p"])
        assert not here.reconciler.registry.is_ready("e")
        assert not here.reconciler.registry.is_ready("outer")
        # Each is tried again when it has gone.
        await until(lambda: here.reason("e").endswith("'p' is not available: there is no such model"))
        await until(lambda: "step[0].model_name: 'e' is not available: e/config.pbtxt" in here.reason("outer"))
        await here.until(outer=UNAVAILABLE, e=UNAVAILABLE)
        before = len(loads.begun)
        here.want(here.model("p"))
        await here.until(outer=READY, e=READY, p=READY)
        assert loads.begun[before:] == ["p", "e", "outer"]


async def test_they_go_together(tmp_path: Path) -> None:
    """What is no longer wanted is not retried."""
    async with site(tmp_path) as (here, loads):
        here.want(here.ensemble("e", "p"), here.model("p"), here.model("z"))
        await here.until(e=READY, p=READY, z=READY)
        here.want(without=["e", "p"])
        await here.until(e=UNAVAILABLE, p=UNAVAILABLE)
        assert sorted(loads.begun) == ["e", "p", "z"]


async def test_a_swap_of_a_part_leaves_it_serving(tmp_path: Path) -> None:
    async with site(tmp_path) as (here, loads):
        here.want(here.ensemble("e", "p"), here.model("p"))
        await here.until(e=READY, p=READY)
        states: set[bool] = set()
        swapping, registry = True, here.reconciler.registry
        registry.changes.subscribe(lambda _: states.add(not swapping or registry.is_ready("e")))
        for files in (here.model("p", stamp=1), here.model("p", stamp=2), here.model("p", version=2)):
            here.want(files)
            await here.reconciler.wait_for(["p"])
        swapping = False
        assert states == {True}
        assert loads.begun.count("p") == 4
        assert here.state("p", 2) is READY
        assert loads.begun.count("e") == 1


async def test_a_part_that_does_not_fit_any_more(tmp_path: Path) -> None:
    """Its calls would fail: it says so instead, and serves when the part fits again."""
    async with site(tmp_path) as (here, loads):
        here.want(here.ensemble("e", "p"), here.model("p"))
        await here.until(e=READY, p=READY)
        loads.datatypes["p"] = "FP32"
        here.want(here.model("p", stamp=1))
        await here.until(e=UNAVAILABLE)
        assert here.reason("e") == (
            "e/config.pbtxt: ensemble_scheduling.step[0].input_map[x]: 'p' is FP32, input 'x' of the ensemble is "
            "INT32"
        )
        loads.datatypes["p"] = "INT32"
        here.want(here.model("p", stamp=2))
        await here.until(e=READY, p=READY)


async def test_a_version_of_a_part(tmp_path: Path) -> None:
    step = Step("p", {"x": "x"}, {"y": "y"}, version=2)
    async with site(tmp_path) as (here, loads):
        here.want(here.ensemble("e", step), here.model("p"), here.model("p", version=3))
        await here.until(e=UNAVAILABLE)
        assert "'p' version 2 is not available: there is no such version" in here.reason("e")
        loads.failing["p"] = "no disk"
        here.want(here.model("p", version=2))
        await until(lambda: here.state("p", 2) is UNAVAILABLE)
        assert here.state("e") is UNAVAILABLE
        loads.failing.clear()
        here.want(here.model("p", version=2, stamp=1))
        await here.until(e=READY)


async def test_ensembles_that_are_made_of_each_other(tmp_path: Path) -> None:
    """No load waits for ever."""
    async with site(tmp_path) as (here, _):
        here.want(here.ensemble("e", "f"), here.ensemble("f", "g"), here.ensemble("g", "e"))
        await here.until(e=UNAVAILABLE, f=UNAVAILABLE, g=UNAVAILABLE)
        assert here.reason("g").endswith("ensembles that contain each other: g -> e -> f -> g")
        here.want(here.ensemble("itself", "itself"))
        await here.until(itself=UNAVAILABLE)
        assert here.reason("itself").endswith("ensembles that contain each other: itself -> itself")
        here.want(here.ensemble("g", "p", stamp=1), here.model("p"))
        await here.until(e=READY, f=READY, g=READY)


async def test_a_part_becomes_an_ensemble_of_the_whole(tmp_path: Path) -> None:
    """Calls would go round: the part stays what it was."""
    async with site(tmp_path) as (here, _):
        here.want(here.ensemble("e", "p"), here.model("p"))
        await here.until(e=READY, p=READY)
        here.want(here.ensemble("p", "e", stamp=1))
        await until(lambda: here.reason("p").endswith("ensembles that contain each other: p -> e -> p"))
        assert (here.state("e"), here.state("p")) == (READY, READY)
        here.want(here.ensemble("e", "q", stamp=1), here.model("q"))
        await until(lambda: not here.reason("p"))
        assert here.state("e") is READY


async def test_one_that_waits_is_not_wanted_any_more(tmp_path: Path) -> None:
    async with site(tmp_path) as (here, loads):
        loads.hold("p")
        here.want(here.ensemble("e", "p"), here.model("p"))
        await until(lambda: loads.begun == ["e", "p"])
        here.want(without=["e"])
        await here.until(e=UNAVAILABLE)
        assert here.state("p") is LOADING


async def test_one_that_waits_is_changed(tmp_path: Path) -> None:
    """It waits for what its new steps name."""
    async with site(tmp_path, load_lock_timeout=0) as (here, loads):
        loads.hold("p")
        here.want(here.model("q"))
        await here.until(q=READY)
        here.want(here.ensemble("e", "p"), here.model("p"))
        await until(lambda: sorted(loads.begun) == ["e", "p", "q"] and here.waits("e"))
        here.want(here.ensemble("e", "q", stamp=1))
        await here.until(e=READY)
        assert here.state("p") is LOADING


async def test_the_wait_does_not_count_as_its_own_load(tmp_path: Path) -> None:
    """A limit on loads is for each by itself."""
    async with site(tmp_path) as (here, loads):

        def lift(_: str | None) -> None:
            if here.state("p") is UNAVAILABLE:
                here.reconciler.load_timeout = 0.0

        loads.hold("p")
        here.want(here.ensemble("e", "p"), here.model("p"))
        await until(lambda: loads.begun == ["e", "p"] and here.waits("e"))
        # The limit holds for the wait alone.
        here.reconciler.registry.changes.subscribe(lift)
        here.reconciler.load_timeout = 0.2
        here.want()
        await here.until(e=UNAVAILABLE, p=UNAVAILABLE)
        assert "loading took longer than load_timeout, 0.2 s" in here.reason("p")
        assert "'p' is not available: " in here.reason("e")


async def test_part_is_removed_while_its_ensemble_warms_up(tmp_path: Path) -> None:
    warming, gate = asyncio.Event(), asyncio.Event()

    async def warm(servable: Servable, _: object) -> None:
        if servable.name == "e":
            warming.set()
            await gate.wait()

    async with site(tmp_path, warm=warm) as (here, _):
        here.want(here.ensemble("e", "p"), here.model("p"))
        await warming.wait()
        here.want(without=["p"])
        gate.set()
        await here.until(e=UNAVAILABLE)
        assert here.reason("e").endswith("'p' is not available: there is no such model")
        here.want(here.model("p"))
        await here.until(e=READY)


async def test_the_server_stops_while_one_waits(tmp_path: Path) -> None:
    async with site(tmp_path) as (here, loads):
        loads.hold("p")
        here.want(here.ensemble("e", "p"), here.model("p"))
        await until(lambda: loads.begun == ["e", "p"])
        closing = asyncio.ensure_future(here.reconciler.close())
        loads.release()
        await closing


@pytest.mark.parametrize("asked", [False, True])
async def test_a_part_whose_library_is_not_installed(tmp_path: Path, asked: bool) -> None:
    """Where such models are skipped, so are those made of them, unless requested."""
    async with site(tmp_path, skip_missing_dependencies=True) as (here, loads):
        loads.missing.add("p")
        if asked:
            here.reconciler.retry("e")
        here.want(here.ensemble("e", "p"), here.model("p"), here.model("z"))
        await here.until(z=READY, e=UNAVAILABLE)
        assert here.reconciler.registry.knows("e") is asked
