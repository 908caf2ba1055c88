"""The server, or the process of its model, ends under a request: its client is told, and nothing of it stays."""

from __future__ import annotations

import pytest
from request_cells import Cell, of
from request_house import open_house, tries
from request_scene import Scene, run


@pytest.mark.parametrize("cell", of("crash"))
async def test_crashes(cell: Cell) -> None:
    """Each on a server of its own: the more often a process is lost, the later it is replaced."""
    async with open_house([cell.model], [cell.door]) as house:
        await run(house, cell)
        await house.serves(cell.model, cell.door)


@pytest.mark.parametrize("cell", of("shutdown"))
async def test_shutdown(cell: Cell) -> None:
    async with open_house([cell.model], [cell.door]) as house:
        for _ in tries(f"it was not {cell.point}"):
            scene = Scene(house, cell)
            if await scene.begin():
                break
            await scene.give_up()
        await scene.happens()
        await house.at_rest(aborted=await scene.end())
