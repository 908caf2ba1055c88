"""Whatever happens to a request, wherever it is, on every protocol: its client gets an error, nothing stays."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import pytest_asyncio

from tests.e2e.request_cases import AT_ITS_DEADLINE, MODELS, Case, of
from tests.e2e.request_scenario import Scenario, run
from tests.e2e.request_served import POOL, Served, serving, tries
from tests.process import SECONDS
from tests.protocol_clients.abortable import CLIENTS, LEFT, Request
from tests.waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]

WAIT = 0.05
"""Seconds that the client of a request waits that is to come too late, at first."""
HURRY = 0.15
"""Seconds that every request may take on the server where those of HTTP come too late: their clients set none."""


class Pool(ThreadPoolExecutor):
    """The event loop's default executor; one of the submitted jobs can be held before it begins."""

    def __init__(self) -> None:
        super().__init__(thread_name_prefix=POOL)
        self.holds = False
        """Whether the job to hold was submitted."""
        self._jobs_before = -1
        self._go = threading.Event()

    def hold(self, number: int) -> None:
        """Hold the job of this number, counted from 1 with the next one submitted."""
        self._jobs_before, self.holds = number - 1, False
        self._go.clear()

    def release(self) -> None:
        """Let the held job begin, and hold no further one."""
        self._jobs_before, self.holds = -1, False
        self._go.set()

    def submit(self, job: Callable[..., Any], /, *arguments: Any, **named: Any) -> Future[Any]:
        """See the base class."""
        self._jobs_before -= 1
        if self._jobs_before != -1:
            self._jobs_before = max(self._jobs_before, -2)
            return super().submit(job, *arguments, **named)
        self.holds = True
        return super().submit(self._held, partial(job, *arguments, **named))

    def _held(self, job: Callable[[], Any]) -> Any:
        assert self._go.wait(SECONDS)
        return job()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    """The server of everything but the deadlines of HTTP, and the ends."""
    async with serving(MODELS) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hurried() -> AsyncIterator[Served]:
    """A server where no request takes longer than `HURRY`."""
    async with serving(MODELS, default_timeout=HURRY) as server:
        yield server


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pool(served: Served) -> Pool:
    """What `asyncio.to_thread` uses, for everything on this loop."""
    server = Pool()
    asyncio.get_running_loop().set_default_executor(server)
    return server


@pytest.mark.parametrize("case", of("ok", "cancel", "error"))
async def test_nothing_stays(served: Served, case: Case) -> None:
    await run(served, case)
    await served.serves(case.model, case.client)


@pytest.mark.parametrize("case", of("deadline", http=False))
async def test_deadlines(served: Served, case: Case) -> None:
    await run(served, case, WAIT)
    await served.serves(case.model, case.client)


@pytest.mark.parametrize("case", of("deadline", http=True))
async def test_deadlines_of_the_server(hurried: Served, case: Case) -> None:
    await run(hurried, case)
    await hurried.serves(case.model, case.client)


# --- the end of the server, or of the process of its model ---


@pytest.mark.parametrize("case", of("crash"))
async def test_crashes(case: Case) -> None:
    """Each on a server of its own: the more often a process is lost, the later it is replaced."""
    async with serving([case.model], [case.client]) as served:
        await run(served, case)
        await served.serves(case.model, case.client)


@pytest.mark.parametrize("case", of("shutdown"))
async def test_shutdown(case: Case) -> None:
    async with serving([case.model], [case.client]) as served:
        for _ in tries(f"it was not {case.point}"):
            scenario = Scenario(served, case)
            if await scenario.begin():
                break
            await scenario.cancel()
        await scenario.happens()
        await served.at_rest(aborted=await scenario.end())


# --- bytes that are on a thread ---

MANY = 60_000
"""Texts that are enough for a request to be taken apart, and its answer put together, on a thread."""


@pytest.mark.parametrize("job", [1, 2], ids=["before the model", "after the model"])
@pytest.mark.parametrize("client", CLIENTS)
async def test_leaving_while_its_bytes_are_on_a_thread(served: Served, pool: Pool, client: str, job: int) -> None:
    before = served.so_far(client)
    pool.hold(job)
    sent = served.clients[client].begin(Request("unary_thread", "long", count=MANY))
    await until(lambda: sent.over or pool.holds, "it goes nowhere")
    sent.leave()
    assert await sent.wait_ended() == LEFT
    await until(lambda: served.counted_code(client) - before == Counter({"CANCELLED": 1}), "it is not counted")
    pool.release()
    await served.serves("unary_thread", client)


@pytest.mark.parametrize("job", [1, 2], ids=["before the model", "after the model"])
@pytest.mark.parametrize("client", [name for name, client in CLIENTS.items() if client.endpoint[1] == "GRPC"])
async def test_coming_too_late_while_its_bytes_are_on_a_thread(
    served: Served, pool: Pool, client: str, job: int
) -> None:
    for attempt in tries("its bytes were on no thread, or not counted as what was too late"):
        before = served.so_far(client)
        pool.hold(job)
        sent = served.clients[client].begin(Request("unary_thread", "long", WAIT * 2**attempt, count=MANY))
        await until(lambda: sent.over or pool.holds, "it goes nowhere")  # noqa: B023
        assert await sent.wait_ended() in AT_ITS_DEADLINE
        if held := pool.holds:  # Otherwise it may have been too late on its way to the server.
            await until(lambda: served.counted_code(client) != before, "it is not counted")  # noqa: B023
        pool.release()
        await served.at_rest(aborted=True)
        if held and served.counted_code(client) - before == Counter({"DEADLINE_EXCEEDED": 1}):
            break
    await served.serves("unary_thread", client)
