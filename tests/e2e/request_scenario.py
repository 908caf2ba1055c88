"""Runs one case of the table: a request, the event that happens to it, and concurrent requests."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable

from tests.e2e.request_cases import OUTCOMES, WAITING, Case, first_point, good, part
from tests.e2e.request_checkpoints import Visit
from tests.e2e.request_served import Served, tries
from tests.protocol_clients.abortable import Attempt
from tests.waiting import until

FIRST, SUBJECT, COMPANION = "first", "subject", "companion"
SEQUENCES = itertools.count(10**6)


class Scenario:
    """The request of a case (the subject), held at its point, and those that it waits for or is batched with."""

    def __init__(self, served: Served, case: Case) -> None:
        self.served = served
        self.case = case
        self.client = served.clients[case.client]
        self.before = served.so_far(case.client)
        self.first: Attempt | None = None
        """The request that runs while the subject waits."""
        self.companion: Attempt | None = None
        """The request that waits with the subject, and is in the same batch."""
        self.subject: Attempt | None = None
        self._held: list[asyncio.Future[Visit]] = []
        self._sequence = next(SEQUENCES)
        self._stopping: asyncio.Future[None] | None = None

    async def begin(self, timeout: float | None = None) -> bool:
        """Send the subject and wait until it is at its point; returns False if it ended or passed that before."""
        case = self.case
        self.served.checkpoints.visited.clear()
        batched = case.kind == "batched"
        subject = good(case.model, SUBJECT, timeout)
        here = None if case.point in WAITING else self.served.checkpoints.hold(SUBJECT, case.point)
        runs = None
        if case.point == "growing" or (case.waits and case.event == "deadline"):
            # The request ahead may expire first, or the batch may stop waiting for more: the subject then runs.
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
                self.release()
                first = self.first
                assert first is not None
                await self._until(lambda: first.over)  # Its response may arrive long after the run.
            await self._until(lambda: sent.over or here.done())
            self._held.append(here)
        return not sent.over and (here is None or here.done()) and not (runs and runs.done())

    async def cancel(self) -> None:
        """End all requests of an attempt in which the deadline expired before the subject's point."""
        self.let_everybody_go()
        for attempt in (self.first, self.subject, self.companion):
            if attempt is not None:
                await attempt.wait_ended()
        await self.served.at_rest(aborted=True)

    @property
    def sent(self) -> Attempt:
        """The subject; it must have been sent."""
        assert self.subject is not None
        return self.subject

    async def _occupy(self) -> bool:
        """Send a request that is held in the model, so that later ones wait; returns whether it runs."""
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

    def release(self, order: str = "go") -> None:
        """Let the held requests continue, or give them another order of `Visit.go`."""
        for visit in self._held:
            if visit.done():
                visit.result().go(order)
        self._held.clear()

    def let_everybody_go(self) -> None:
        """Let the held requests continue, and hold no further ones."""
        self.release()
        self.served.checkpoints.clear()

    async def happens(self) -> None:
        """Make the event of the case happen."""
        match self.case.event:
            case "ok":
                self.release()
            case "error":
                self.release("fail")
            case "crash":
                self.release("exit")
            case "cancel":
                self.sent.leave()
            case "shutdown":
                self._stopping = asyncio.ensure_future(self.served.server.stop())
            case "deadline":
                pass  # Happens by itself.

    async def end(self) -> bool:
        """Check the outcome of all requests; returns whether any ended with a gRPC status other than OK."""
        case = self.case
        outcome = await self.sent.wait_ended()
        assert outcome in case.outcomes, f"{outcome}, expected {case.outcomes}"
        # The server has ended the call, although the model still runs.
        await until(lambda: self.counts().keys() & case.may_count_as, "it is not counted", self.counts)
        self.let_everybody_go()
        seen = [outcome]
        for other in (self.first, self.companion):
            if other is not None:
                seen.append(await other.wait_ended())
                expected = self._expected(other)
                assert seen[-1] in expected, f"beside it: {seen[-1]}, expected {expected}"
        if case.waits and case.event == "cancel":
            assert SUBJECT not in self.served.checkpoints.visited, "it ran"
        if self._stopping is not None:
            await self._stopping
        self.served.check_spans((self.first, self.subject, self.companion))
        return any(event.isupper() and event != "OK" for event in seen)

    def counts(self) -> Counter[str]:
        """Return the number of calls that ended with each code since the scenario began."""
        return self.served.counted_code(self.case.client) - self.before

    def _expected(self, other: Attempt) -> set[str]:
        """Return the possible outcomes of a request beside the subject."""
        case = self.case
        if self.served.hurried:
            return case.outcomes | {self.client.good}  # It expires, too, or continues before that.
        # While the subject waits, the first one runs; while it runs, the first has ended, and the companion runs.
        is_open = case.waits or other is not self.first
        if case.event == "shutdown" and is_open:
            return case.outcomes
        if case.event in ("error", "crash") and (other is self.first) == case.waits:
            return {OUTCOMES[case.client][case.event]}
        return {self.client.good}


async def run(served: Served, case: Case, timeout: float | None = None) -> None:
    """Run one case on a server that other cases use, too; tries again if it did not get to its point in time.

    `timeout`: the client's deadline in seconds in the first attempt; it doubles with each further one.
    """
    for attempt in tries(f"it was not {case.point}, or not counted as {case.counted_code}"):
        scenario = Scenario(served, case)
        try:
            if await scenario.begin(None if timeout is None else timeout * 2**attempt):
                await scenario.happens()
                await served.at_rest(aborted=await scenario.end())
                if case.counted_code in scenario.counts():
                    return
            else:
                await scenario.cancel()
        finally:
            scenario.let_everybody_go()  # After a failure, no request is left waiting for later cases.
