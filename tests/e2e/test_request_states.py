"""Whatever happens to a request, wherever it is, on every protocol: its client is told, nothing of it stays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from request_cells import MODELS, Cell, answers_of, cells, first_point, good
from request_doors import DOORS, Attempt
from request_house import House, open_house, until
from request_stage import Visit

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT = 0.15
"""Seconds that the client of a request waits that is to come too late, at first."""
HURRY = 0.4
"""Seconds that every request may take on the server where those of HTTP come too late: their clients set none."""
TRIES = 8
SUBJECT, OTHER = "subject", "other"
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
    """A request that is held at the point of its cell, and the one that it waits behind, if it is queued."""

    def __init__(self, house: House, cell: Cell) -> None:
        self.house = house
        self.cell = cell
        self.door = house.doors[cell.door]
        self.before = house.counted(cell.door)
        self.others: list[Attempt] = []
        self.subject: Attempt
        self._stopping: asyncio.Future[None] | None = None
        self._held: list[asyncio.Future[Visit]] = []

    async def begin(self, timeout: float | None = None) -> bool:
        """Send it, and wait until it is at its point; whether it came so far before it ended."""
        cell, stage = self.cell, self.house.stage
        if cell.point == "queued":
            first = stage.hold(OTHER, first_point(cell.model))
            self.others.append(self.door.begin(good(cell.model, OTHER)))
            await stage.arrived(first)
            self._held.append(first)
            self.subject = self.door.begin(good(cell.model, SUBJECT, timeout))
            await until(lambda: self.subject.over or self.house.waiting(cell.model) == 1, "it does not wait")
            return not self.subject.over
        here = stage.hold(SUBJECT, cell.point)
        self.subject = self.door.begin(good(cell.model, SUBJECT, timeout))
        await until(lambda: self.subject.over or here.done(), "it does not come here")
        self._held.append(here)
        return here.done()

    def let_go(self, order: str = "go") -> None:
        """Let who is held go on."""
        for visit in self._held:
            if visit.done():
                visit.result().go(order)
        self._held.clear()

    async def happens(self) -> None:
        """What the cell says."""
        match self.cell.event:
            case "ok" | "error":
                self.let_go("fail" if self.cell.event == "error" else "go")
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
        # Everybody is late, or told of the server's end.
        shared = self.house.hurried or cell.event == "shutdown"
        for other in self.others:
            assert await other.ended() in (cell.told if shared else {self.door.good})
        if self._stopping is not None:
            await self._stopping
        return told.isupper() and told != "OK"


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


def is_http(cell: Cell) -> bool:
    return DOORS[cell.door].endpoint[1] == "REST"


def of(*events: str) -> list[object]:
    return [pytest.param(cell, id=str(cell)) for cell in CELLS if cell.event in events]


@pytest.mark.parametrize("cell", of("ok", "cancel", "error"))
async def test_nothing_stays(house: House, cell: Cell) -> None:
    await run(house, cell)
    await serves(house, cell)


@pytest.mark.parametrize("cell", [one for one in of("deadline") if not is_http(one.values[0])])
async def test_deadlines(house: House, cell: Cell) -> None:
    await run(house, cell, WAIT)
    await serves(house, cell)


@pytest.mark.parametrize("cell", [one for one in of("deadline") if is_http(one.values[0])])
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
