"""The server, or the process of its model, ends under a request: its client gets an error, nothing stays."""

from __future__ import annotations

import pytest
from request_cases import Case, of
from request_scenario import Scenario, run
from request_served import serving, tries

pytestmark = pytest.mark.both_transports


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
