"""Processes that crash leave nothing behind."""

from __future__ import annotations

import asyncio
import gc
import threading
from pathlib import Path

import pytest

from tests.executors.reporting_models import children, reporting
from tests.waiting import until
from triglot import Unavailable
from triglot.executors.remote.pool import RestartPolicy

INSTANCES = 4
ROUNDS = 8
SLACK = 3 * INSTANCES
"""What processes that are there have or have not mapped yet: its page, and a region for each direction."""


def left() -> dict[str, int]:
    gc.collect()
    return {
        "file descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "shared memory": Path("/proc/self/maps").read_text().count("memfd:triglot"),
        "processes": len(children()),
        "threads": sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate()),
    }


async def test_nothing_is_left_of_processes_that_crash(tmp_path: Path) -> None:
    at_first = left()
    policy = RestartPolicy(first_delay=0.0, longest_delay=0.0)
    async with reporting(tmp_path, policy=policy, more=f"\nReporting.instances = {INSTANCES}\n") as served:

        async def crash() -> None:
            with pytest.raises(Unavailable):
                await served.run("os._exit(0)", x=[0.0] * 50_000)

        async def all_crash() -> None:
            await asyncio.gather(*(crash() for _ in range(INSTANCES)))
            await until(lambda: served.readings()["processes"] == INSTANCES)
            runs = (served.run("{'x': inputs['x']}", x=[1.0] * 50_000) for _ in range(INSTANCES))
            assert [answer["x"].sum() for answer in await asyncio.gather(*runs)] == [50_000] * INSTANCES

        await all_crash()
        before = left()
        for _ in range(ROUNDS - 1):
            await all_crash()
        await until(lambda: all(now <= before[what] + SLACK for what, now in left().items()))
        await until(lambda: len(children()) == INSTANCES)
        assert served.readings()["processes_lost ended"] == INSTANCES * ROUNDS
    await until(
        lambda: all(now <= at_first[what] for what, now in left().items()), detail=lambda: (at_first, left())
    )
