"""Whatever happens to a request, wherever it is, on every protocol: its client is told, nothing of it stays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from request_cells import AT_ITS_DEADLINE, MODELS, Cell, of
from request_doors import DOORS, LEFT, Ask
from request_house import House, open_house, tries
from request_pool import Pool
from request_scene import run

from waiting import until

pytestmark = pytest.mark.asyncio(loop_scope="module")

WAIT = 0.05
"""Seconds that the client of a request waits that is to come too late, at first."""
HURRY = 0.15
"""Seconds that every request may take on the server where those of HTTP come too late: their clients set none."""


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


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(house: House) -> Pool:
    """What `asyncio.to_thread` uses, for everything on this loop."""
    one = Pool()
    asyncio.get_running_loop().set_default_executor(one)
    return one


@pytest.mark.parametrize("cell", of("ok", "cancel", "error"))
async def test_nothing_stays(house: House, cell: Cell) -> None:
    await run(house, cell)
    await house.serves(cell.model, cell.door)


@pytest.mark.parametrize("cell", of("deadline", http=False))
async def test_deadlines(house: House, cell: Cell) -> None:
    await run(house, cell, WAIT)
    await house.serves(cell.model, cell.door)


@pytest.mark.parametrize("cell", of("deadline", http=True))
async def test_deadlines_of_the_server(hurried_house: House, cell: Cell) -> None:
    await run(hurried_house, cell)
    await hurried_house.serves(cell.model, cell.door)


MANY = 60_000
"""Texts that are enough for a request to be taken apart, and its answer put together, on a thread."""


@pytest.mark.parametrize("job", [1, 2], ids=["before the model", "after the model"])
@pytest.mark.parametrize("door", DOORS)
async def test_leaving_while_its_bytes_are_on_a_thread(house: House, pool: Pool, door: str, job: int) -> None:
    before = house.so_far(door)
    pool.hold(job)
    sent = house.doors[door].begin(Ask("unary_thread", "long", count=MANY))
    await until(lambda: sent.over or pool.holds, "it goes nowhere")
    sent.leave()
    assert await sent.ended() == LEFT
    await until(lambda: house.counted(door) - before == Counter({"CANCELLED": 1}), "it is not counted")
    pool.let_go()
    await house.serves("unary_thread", door)


@pytest.mark.parametrize("job", [1, 2], ids=["before the model", "after the model"])
@pytest.mark.parametrize("door", [name for name, door in DOORS.items() if door.endpoint[1] == "GRPC"])
async def test_coming_too_late_while_its_bytes_are_on_a_thread(
    house: House, pool: Pool, door: str, job: int
) -> None:
    for attempt in tries("its bytes were on no thread, or not counted as what was too late"):
        before = house.so_far(door)
        pool.hold(job)
        sent = house.doors[door].begin(Ask("unary_thread", "long", WAIT * 2**attempt, count=MANY))
        await until(lambda: sent.over or pool.holds, "it goes nowhere")  # noqa: B023
        assert await sent.ended() in AT_ITS_DEADLINE
        if held := pool.holds:  # Otherwise it may have been too late on its way to the server.
            await until(lambda: house.counted(door) != before, "it is not counted")  # noqa: B023
        pool.let_go()
        await house.at_rest(aborted=True)
        if held and house.counted(door) - before == Counter({"DEADLINE_EXCEEDED": 1}):
            break
    await house.serves("unary_thread", door)
