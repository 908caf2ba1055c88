"""Processes behind a batcher and behind sequences, and what warms up those that come later."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_infer
from tests.executors.reporting_models import Reporting, code, reporting
from tests.waiting import until
from triglot import Call, Unavailable
from triglot.core.request_scheduling import Scheduling
from triglot.executors.joining import Stack
from triglot.repository.manager.warm_up import warm_up

DECLARED = """
Reporting.any_tensors = False
Reporting.inputs = [triglot.TensorSpec("x", "INT64", [-1, 1])]
Reporting.outputs = [triglot.TensorSpec("y", "INT64", [-1, 1])]
Reporting.max_batch_size = 8
"""
BATCHED = f"""{DECLARED}
Reporting.dynamic_batching = triglot.DynamicBatching()
"""
SUMS = """def infer(self, inputs{call}):
        x = inputs["x"]
        if (x == -1).any():
            os._exit(1)
        if (x == -2).any():
            (self.folder / "in").touch()
            while not (self.folder / "open").exists():
                time.sleep(0.005)
        (self.folder / f"ran-{{os.getpid()}}-{{len(x)}}-{{time.monotonic_ns()}}").touch()
        return {{"y": x * 10}}"""


async def ask(served: Reporting, value: int, call: Call | None = None) -> int:
    answer = await direct_infer(served.servable, {"x": np.array([[value]])}, call or Call())
    result: np.ndarray[tuple[int, ...], np.dtype[np.int64]] = answer["y"]
    assert result.shape == (1, 1)
    return int(result[0, 0])


@pytest.mark.parametrize("call", ["", ", call"])
async def test_requests_are_joined_for_a_process(tmp_path: Path, call: str) -> None:
    async with reporting(tmp_path, SUMS.format(call=call), more=BATCHED) as served:
        first = asyncio.ensure_future(ask(served, -2))
        await served.entered("in")
        calls = [Call() for _ in range(6)]
        for number, each in enumerate(calls):
            each.parameters = {"number": number}
        others = [asyncio.ensure_future(ask(served, value, calls[value])) for value in range(6)]
        await until(lambda: served.servable.queue_depth == 6)
        (tmp_path / "open").touch()
        assert await asyncio.gather(*others) == [0, 10, 20, 30, 40, 50]
        assert await first == -20
        sizes = sorted(int(name.split("-")[2]) for name in served.files("ran-"))
        # A model that gets the parameters may answer by them.
        assert sizes == ([1, 6] if not call else [1] * 7)


@pytest.mark.parametrize("keyword", ["", "async "])
async def test_a_batch_is_joined_where_its_process_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keyword: str
) -> None:
    copy_to = Stack.copy_to

    def copy_to_shared(stack: Stack, joined: Any) -> None:
        assert not joined.flags.owndata, "the batch was joined in memory of the server alone"
        copy_to(stack, joined)

    monkeypatch.setattr(Stack, "copy_to", copy_to_shared)
    async with reporting(tmp_path, keyword + SUMS.format(call=""), more=BATCHED) as served:
        first = asyncio.ensure_future(ask(served, -2))
        await served.entered("in")
        others = [asyncio.ensure_future(ask(served, value)) for value in range(6)]
        await until(lambda: served.servable.queue_depth == 6)
        (tmp_path / "open").touch()
        assert await asyncio.gather(*others) == [0, 10, 20, 30, 40, 50]
        assert await first == -20
        assert sorted(int(name.split("-")[2]) for name in served.files("ran-")) == [1, 6]


async def test_all_members_of_a_batch_are_unavailable_when_its_process_is_lost(tmp_path: Path) -> None:
    async with reporting(tmp_path, SUMS.format(call=""), more=BATCHED) as served:
        first = asyncio.ensure_future(ask(served, -2))
        await served.entered("in")
        others = [asyncio.ensure_future(ask(served, value)) for value in (1, -1, 3)]
        await until(lambda: served.servable.queue_depth == 3)
        (tmp_path / "open").touch()
        assert await first == -20
        outcomes = await asyncio.gather(*others, return_exceptions=True)
        assert [isinstance(outcome, Unavailable) for outcome in outcomes] == [True] * 3
        assert await ask(served, 4) == 40


async def test_a_sequence_stays_with_its_process(tmp_path: Path) -> None:
    sequences = """
Reporting.instances = 2
Reporting.sequence_batching = triglot.SequenceBatching(max_idle=3600)
"""
    pids = """def infer(self, inputs):
        return {"y": np.full_like(inputs["x"], os.getpid())}"""
    async with reporting(tmp_path, pids, more=DECLARED + sequences) as served:
        seen: dict[int, set[int]] = {}
        for turn in range(10):
            for number in (1, 2, 3, 4):
                call = Call()
                call.scheduling = Scheduling(sequence_id=number, sequence_start=turn == 0, sequence_end=turn == 9)
                seen.setdefault(number, set()).add(await ask(served, 0, call))
        assert all(len(pids) == 1 for pids in seen.values())


WARMED = """
Reporting.any_tensors = False
Reporting.inputs = [triglot.TensorSpec("code", "BYTES", [])]
Reporting.outputs = [triglot.TensorSpec("said", "BYTES", [1])]
Reporting.example = {
    "code": "(folder / f'warm-{os.getpid()}').touch()\\nanswer = 1 / (not (folder / 'stop').exists())"
}
"""


async def test_a_replacement_is_warmed_up_before_it_is_called(tmp_path: Path) -> None:
    async with reporting(tmp_path, more=WARMED) as served:
        await warm_up(served.servable)
        assert served.files("warm-") == [f"warm-{await served.pid()}"]
        with pytest.raises(Unavailable):
            await served.run("os._exit(0)")
        assert f"warm-{await served.pid()}" in served.files("warm-")
        (tmp_path / "stop").touch()
        with pytest.raises(Unavailable):
            await served.run("os._exit(0)")
        with pytest.raises(Unavailable, match="could not be restarted: division by zero"):
            await served.run("1")
        (tmp_path / "stop").unlink()
        await until(lambda: served.model.alive)
        assert (await direct_infer(served.servable, code("'warm again'"), Call()))["said"].item() == b"warm again"
