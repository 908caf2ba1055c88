"""Whatever happens to a request, wherever it is, on every protocol: its client gets an error, nothing stays."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from request_cases import AT_ITS_DEADLINE, MODELS, Case, of
from request_pool import Pool
from request_scenario import run
from request_served import Served, serving, tries

from protocol_clients.abortable import CLIENTS, LEFT, Request
from waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]

WAIT = 0.05
"""Seconds that the client of a request waits that is to come too late, at first."""
HURRY = 0.15
"""Seconds that every request may take on the server where those of HTTP come too late: their clients set none."""


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
