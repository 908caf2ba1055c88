"""One case of the table, acted out: a request that something happens to, and those beside it."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

from request_cases import TOLD, WAITING, Case, first_point, good, part
from request_checkpoints import Visit
from request_served import Served, tries

from protocol_clients.abortable import Attempt
from waiting import until

FIRST, SUBJECT, COMPANION = "first", "subject", "companion"
SEQUENCES = itertools.count(10**6)


class Scenario:
    """A request that is held at the point of its case, and those that it waits behind or is executed with."""

    def __init__(self, served: Served, case: Case) -> None:
        self.served = served
        self.case = case
        self.client = served.clients[case.client]
        self.before = served.so_far(case.client)
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
        case = self.case
        batched = case.kind == "batched"
        subject = good(case.model, SUBJECT, timeout)
        here = None if case.point in WAITING else self.served.checkpoints.hold(SUBJECT, case.point)
        runs = None
        if case.point == "growing" or (case.waits and case.event == "deadline"):
            # What it waits for may be too late before it is, or nothing that it waits for may come.
            runs = self.served.checkpoints.hold(SUBJECT, first_point(case.model))
            self._held.append(runs)
        if case.waits or batched:
            if not await self._occupy():
                return False
            if case.kind == "sequence" and case.point == "queued":
                subject = part(subject, self._sequence, end=True)
        self.subject = sent = self.client.begin(subject)
        if batched:
            self.companion = self.client.begin(good(case.model, COMPANION))
        if here is None or batched:
            await self._until(
                lambda: sent.over or (runs and runs.done()) or self.served.waiting(case.queue) == 1 + batched
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
        await self.served.at_rest(aborted=True)

    @property
    def sent(self) -> Attempt:
        """The subject, which has begun."""
        assert self.subject is not None
        return self.subject

    async def _occupy(self) -> bool:
        """Have a request run, so that those after it wait; whether it does."""
        case, checkpoints = self.case, self.served.checkpoints
        request = good(case.model, FIRST)
        if case.kind == "sequence":
            request = part(request, self._sequence, start=True, end=case.point == "backlog")
        visit = checkpoints.hold(FIRST, first_point(case.model))
        self.first = first = self.client.begin(request)
        self._held.append(visit)
        await until(lambda: visit.done() or first.over, "the first request does not run")
        return visit.done()

    async def _until(self, true: Callable[[], bool]) -> None:
        await until(true, f"it is not {self.case.point}")

    def let_go(self, order: str = "go") -> None:
        """Let who is held go on."""
        for visit in self._held:
            if visit.done():
                visit.result().go(order)
        self._held.clear()

    def let_everybody_go(self) -> None:
        """Let go who is held, and who would be."""
        self.let_go()
        self.served.checkpoints.clear()

    async def happens(self) -> None:
        """What the case says."""
        match self.case.event:
            case "ok":
                self.let_go()
            case "error":
                self.let_go("fail")
            case "crash":
                self.let_go("exit")
            case "cancel":
                self.sent.leave()
            case "shutdown":
                self._stopping = asyncio.ensure_future(self.served.server.stop())
            case "deadline":
                pass  # It comes by itself.

    async def end(self) -> bool:
        """See how everything ends; whether gRPC has said so with a status."""
        case = self.case
        told = await self.sent.ended()
        assert told in case.told, f"{told}, expected {case.told}"
        # The model is at work yet, and the server has done with the call.
        await until(lambda: self.counts().keys() & case.may_count_as, "it is not counted", self.counts)
        self.let_everybody_go()
        seen = [told]
        for other in (self.first, self.companion):
            if other is not None:
                seen.append(await other.ended())
                expected = self._expected(other)
                assert seen[-1] in expected, f"beside it: {seen[-1]}, expected {expected}"
        if self._stopping is not None:
            await self._stopping
        self.served.check_spans((self.first, self.subject, self.companion))
        return any(one.isupper() and one != "OK" for one in seen)

    def counts(self) -> Counter[str]:
        """How many ended with each code, since it began."""
        return self.served.counted(self.case.client) - self.before

    def _expected(self, other: Attempt) -> set[str]:
        """How one beside it may end."""
        case = self.case
        if self.served.hurried:
            return case.told | {self.client.good}  # It is late, too, or let go before that.
        # While the subject waits, the first one runs; when it runs, that one is over, and its companion is there.
        is_there = case.waits or other is not self.first
        if case.event == "shutdown" and is_there:
            return case.told
        if case.event in ("error", "crash") and (other is self.first) == case.waits:
            return {TOLD[case.client][case.event]}
        return {self.client.good}


async def run(served: Served, case: Case, timeout: float | None = None) -> None:
    """One case, on a server that stays."""
    for attempt in tries(f"it was not {case.point}, or not counted as {case.counted}"):
        scenario = Scenario(served, case)
        try:
            if await scenario.begin(None if timeout is None else timeout * 2**attempt):
                await scenario.happens()
                await served.at_rest(aborted=await scenario.end())
                if case.counted in scenario.counts():
                    return
            else:
                await scenario.give_up()
        finally:
            scenario.let_everybody_go()  # Those after a failure find nobody who waits.
