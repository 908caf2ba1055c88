"""One cell of the table, acted out: a request that something happens to, and those beside it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

from request_cells import TOLD, WAITING, Cell, first_point, good, part
from request_doors import Attempt
from request_house import House, tries
from request_stage import Visit

from waiting import until

FIRST, SUBJECT, COMPANION = "first", "subject", "companion"
SEQUENCES = itertools.count(10**6)


class Scene:
    """A request that is held at the point of its cell, and those that it waits behind or is executed with."""

    def __init__(self, house: House, cell: Cell) -> None:
        self.house = house
        self.cell = cell
        self.door = house.doors[cell.door]
        self.before = house.so_far(cell.door)
        self.first: Attempt | None = None
        """What runs while the subject waits."""
        self.companion: Attempt | None = None
        """What waits with it, and is in the same batch."""
        self.subject: Attempt | None = None
        self._held: list[asyncio.Future[Visit]] = []
        self._sequence = next(SEQUENCES)
        self._stopping: asyncio.Future[None] | None = None

    async def begin(self, timeout: float | None = None) -> bool:
        """Send it, and wait until it is at its point; whether it came so far before it ended."""
        cell = self.cell
        batched = cell.kind == "batched"
        subject = good(cell.model, SUBJECT, timeout)
        here = None if cell.point in WAITING else self.house.stage.hold(SUBJECT, cell.point)
        runs = None
        if cell.point == "growing" or (cell.waits and cell.event == "deadline"):
            # What it waits for may be too late before it is, or nothing that it waits for may come.
            runs = self.house.stage.hold(SUBJECT, first_point(cell.model))
            self._held.append(runs)
        if cell.waits or batched:
            if not await self._occupy():
                return False
            if cell.kind == "sequence" and cell.point == "queued":
                subject = part(subject, self._sequence, end=True)
        self.subject = sent = self.door.begin(subject)
        if batched:
            self.companion = self.door.begin(good(cell.model, COMPANION))
        if here is None or batched:
            await self._until(
                lambda: sent.over or (runs and runs.done()) or self.house.waiting(cell.queue) == 1 + batched
            )
        if here is not None:
            if batched:
                self.let_go()
                first = self.first
                assert first is not None
                await self._until(lambda: first.over)  # Its answer may be on its way for longer than it runs.
            await self._until(lambda: sent.over or here.done())
            self._held.append(here)
        return not sent.over and (here is None or here.done()) and not (runs and runs.done())

    async def give_up(self) -> None:
        """It came too late before it was where it was to come too late."""
        self.let_everybody_go()
        for attempt in (self.first, self.subject, self.companion):
            if attempt is not None:
                await attempt.ended()
        await self.house.at_rest(aborted=True)

    @property
    def sent(self) -> Attempt:
        """The subject, which has begun."""
        assert self.subject is not None
        return self.subject

    async def _occupy(self) -> bool:
        """Have a request run, so that those after it wait; whether it does."""
        cell, stage = self.cell, self.house.stage
        ask = good(cell.model, FIRST)
        if cell.kind == "sequence":
            ask = part(ask, self._sequence, start=True, end=cell.point == "backlog")
        visit = stage.hold(FIRST, first_point(cell.model))
        self.first = first = self.door.begin(ask)
        self._held.append(visit)
        await until(lambda: visit.done() or first.over, "the first request does not run")
        return visit.done()

    async def _until(self, true: Callable[[], bool]) -> None:
        await until(true, f"it is not {self.cell.point}")

    def let_go(self, order: str = "go") -> None:
        """Let who is held go on."""
        for visit in self._held:
            if visit.done():
                visit.result().go(order)
        self._held.clear()

    def let_everybody_go(self) -> None:
        """Let go who is held, and who would be."""
        self.let_go()
        self.house.stage.clear()

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
                self.sent.leave()
            case "shutdown":
                self._stopping = asyncio.ensure_future(self.house.server.stop())
            case "deadline":
                pass  # It comes by itself.

    async def end(self) -> bool:
        """See how everything ends; whether gRPC has said so with a status."""
        cell = self.cell
        told = await self.sent.ended()
        assert told in cell.told, f"{told}, expected {cell.told}"
        # The model is at work yet, and the server has done with the call.
        await until(lambda: self.counts().keys() & cell.may_count_as, "it is not counted", self.counts)
        self.let_everybody_go()
        seen = [told]
        for other in (self.first, self.companion):
            if other is not None:
                seen.append(await other.ended())
                expected = self._expected(other)
                assert seen[-1] in expected, f"beside it: {seen[-1]}, expected {expected}"
        if self._stopping is not None:
            await self._stopping
        return any(one.isupper() and one != "OK" for one in seen)

    def counts(self) -> Counter[str]:
        """How many ended with each code, since it began."""
        return self.house.counted(self.cell.door) - self.before

    def _expected(self, other: Attempt) -> set[str]:
        """How one beside it may end."""
        cell = self.cell
        if self.house.hurried:
            return cell.told | {self.door.good}  # It is late, too, or let go before that.
        # While the subject waits, the first one runs; when it runs, that one is over, and its companion is there.
        is_there = cell.waits or other is not self.first
        if cell.event == "shutdown" and is_there:
            return cell.told
        if cell.event in ("error", "crash") and (other is self.first) == cell.waits:
            return {TOLD[cell.door][cell.event]}
        return {self.door.good}


async def run(house: House, cell: Cell, timeout: float | None = None) -> None:
    """One cell, on a server that stays."""
    for attempt in tries(f"it was not {cell.point}, or not counted as {cell.counted}"):
        scene = Scene(house, cell)
        try:
            if await scene.begin(None if timeout is None else timeout * 2**attempt):
                await scene.happens()
                await house.at_rest(aborted=await scene.end())
                if cell.counted in scene.counts():
                    return
            else:
                await scene.give_up()
        finally:
            scene.let_everybody_go()  # Those after a failure find nobody who waits.
