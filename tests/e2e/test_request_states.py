"""Whatever happens to a request, wherever it is, on every protocol: its client is told, nothing of it stays."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from request_cells import MODELS, Cell, of
from request_house import House, open_house
from request_scene import run

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
