"""Whatever happens to a request, wherever it is, on every protocol: its client is told, nothing of it stays."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from request_cells import MODELS, TOLD, Cell, answers_of, cells, first_point, good, part
from request_doors import DOORS, Attempt
from request_house import House, open_house, until
from request_stage import Visit

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT = 0.15
"""Seconds that the client of a request waits that is to come too late, at first."""
HURRY = 0.4
"""Seconds that every request may take on the server where those of HTTP come too late: their clients set none."""
TRIES = 8
FIRST, SUBJECT, COMPANION = "first", "subject", "companion"
SEQUENCES = itertools.count(10**6)
CELLS = list(cells())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def house() -> AsyncIterator[House]:
    """The server of everything but the deadlines of HTTP, and the ends."""
    async with open_house(MODELS) as one:
        yield one


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hurried_house() -> AsyncIterator[House]:
    """A server where no request takes longer than `HURRY`."""
    async with open_house(MODELS, default_timeout=HURRY) as one:
        yield one


class Scene:
    """A request that is held at the point of its cell, and those that it waits behind or is executed with."""

    def __init__(self, house: House, cell: Cell) -> None:
        self.house = house
        self.cell = cell
        self.door = house.doors[cell.door]
        self.before = house.counted(cell.door)
        self.first: Attempt | None = None
        """What runs while the subject waits."""
        self.companion: Attempt | None = None
        """What waits with it, and is in the same batch."""
        self.subject: Attempt
        self._held: list[asyncio.Future[Visit]] = []
        self._sequence = next(SEQUENCES)
        self._stopping: asyncio.Future[None] | None = None

    async def begin(self, timeout: float | None = None) -> bool:
        """Send it, and wait until it is at its point; whether it came so far before it ended."""
        cell = self.cell
        batched = cell.kind == "batched"
        subject = good(cell.model, SUBJECT, timeout)
        here = None if cell.point == "queued" else self.house.stage.hold(SUBJECT, cell.point)
        if here is None or batched:
            await self._occupy()
            if cell.kind == "sequence":
                subject = part(subject, self._sequence, end=True)
        self.subject = self.door.begin(subject)
        if batched:
            self.companion = self.door.begin(good(cell.model, COMPANION))
        if here is None or batched:
            await self._until(lambda: self.house.waiting(cell.model) == 1 + batched)
        if here is not None:
            if batched:
                self.let_go()
            await self._until(here.done)
            self._held.append(here)
        return not self.subject.over and (here is None or here.done())

    async def _occupy(self) -> None:
        """Have a request run, so that those after it wait."""
        cell, stage = self.cell, self.house.stage
        ask = good(cell.model, FIRST)
        if cell.kind == "sequence":
            ask = part(ask, self._sequence, start=True)
        visit = stage.hold(FIRST, first_point(cell.model))
        self.first = self.door.begin(ask)
        self._held.append(visit)
        await stage.arrived(visit)

    async def _until(self, true: Callable[[], bool]) -> None:
        await until(lambda: self.subject.over or true(), f"it is not {self.cell.point}")

    def let_go(self, order: str = "go") -> None:
        """Let who is held go on."""
        for visit in self._held:
            if visit.done():
                visit.result().go(order)
        self._held.clear()

    async def happens(self) -> None:
        """What the cell says."""
        match self.cell.event:
            case "ok":
                self.let_go()
            case "error":
                self.let_go("fail")
            case "crash":
                self.let_go("exit")
            case "cancel":
                self.subject.leave()
            case "shutdown":
                self._stopping = asyncio.ensure_future(self.house.server.stop())
            case "deadline":
                pass  # It comes by itself.

    async def end(self) -> bool:
        """See how everything ends; whether gRPC has said so with a status."""
        cell = self.cell
        told = await self.subject.ended()
        assert told in cell.told
        # The model is at work yet, and the server has done with the call.
        await until(
            lambda: self.house.counted(cell.door) - self.before >= Counter({cell.counted: 1}),
            "it is not counted",
            lambda: self.house.counted(cell.door) - self.before,
        )
        self.let_go()
        seen = [told]
        # Everybody is late, or told of the server's end.
        shared = self.house.hurried or cell.event == "shutdown"
        if self.first is not None:
            seen.append(await self.first.ended())
            lost = TOLD[cell.door]["crash"] if cell.survives else self.door.good
            assert seen[-1] in (cell.told | {self.door.good} if shared else {lost})
        if self.companion is not None:
            seen.append(await self.companion.ended())
            together = cell.event in ("error", "crash") and cell.point == "running"
            assert seen[-1] in (cell.told if shared or together else {self.door.good})
        if self._stopping is not None:
            await self._stopping
        return any(one.isupper() and one != "OK" for one in seen)


async def run(house: House, cell: Cell, timeout: float | None = None) -> None:
    """One cell, on a server that stays."""
    for attempt in range(TRIES):
        scene = Scene(house, cell)
        if await scene.begin(None if timeout is None else timeout * 2**attempt):
            break
        # It came too late before it was where it was to come too late.
        house.stage.clear()
        await scene.subject.ended()
        await house.at_rest()
    else:
        raise AssertionError(f"in {TRIES} tries it was not {cell.point}")
    await scene.happens()
    await house.at_rest(aborted=await scene.end())


async def serves(house: House, cell: Cell) -> None:
    """A good request of the same kind, by the same door, over the same connection."""
    expected = house.doors[cell.door].good, answers_of(cell.model, "good")
    assert await house.infer(cell.door, good(cell.model)) == expected
    await house.at_rest()


def of(*events: str, http: bool | None = None) -> list[Any]:
    """The cells of these events; `http`: those of HTTP's doors, or of gRPC's."""
    return [
        pytest.param(cell, id=str(cell))
        for cell in CELLS
        if cell.event in events and http in (None, DOORS[cell.door].endpoint[1] == "REST")
    ]


@pytest.mark.parametrize("cell", of("ok", "cancel", "error", "crash"))
async def test_nothing_stays(house: House, cell: Cell) -> None:
    await run(house, cell)
    await serves(house, cell)


@pytest.mark.parametrize("cell", of("deadline", http=False))
async def test_deadlines(house: House, cell: Cell) -> None:
    await run(house, cell, WAIT)
    await serves(house, cell)


@pytest.mark.parametrize("cell", of("deadline", http=True))
async def test_deadlines_of_the_server(hurried_house: House, cell: Cell) -> None:
    await run(hurried_house, cell)
    await serves(hurried_house, cell)


@pytest.mark.parametrize("cell", of("shutdown"))
async def test_shutdown(cell: Cell) -> None:
    async with open_house([cell.model]) as house:
        scene = Scene(house, cell)
        assert await scene.begin()
        await scene.happens()
        await house.at_rest(aborted=await scene.end())
