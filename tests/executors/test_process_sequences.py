"""Sequences whose state is in processes end with these: no process answers that knows nothing of them."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_infer
from tests.executors.reporting_models import Reporting, reporting
from tests.waiting import until
from triglot import Call, InvalidArgument, ServingError, Unavailable
from triglot.core.request_scheduling import Scheduling
from triglot.executors.remote.pool import RestartPolicy

SUMS = """def infer(self, inputs, call):
        total = self.state.get(call.scheduling.sequence_id, 0)
        if call.scheduling.sequence_start:
            total = 0
        for value in inputs["x"].ravel().tolist():
            if value == -1:
                os._exit(1)
            if value == -2:
                (self.folder / "in").touch()
                while True:
                    time.sleep(0.005)
            total = self.state[call.scheduling.sequence_id] = total + value
        return {"y": np.array([total, os.getpid()])}"""
DECLARED = """
Reporting.any_tensors = False
Reporting.inputs = [triglot.TensorSpec("x", "INT64", [1])]
Reporting.outputs = [triglot.TensorSpec("y", "INT64", [2])]
Reporting.sequence_batching = triglot.SequenceBatching(
    max_idle=3600, strategy=triglot.OldestStrategy(max_candidate_sequences=4)
)
"""
SLOW = """
def load(self, folder):
    self.folder, self.state = folder, {}
    (folder / f"load-{os.getpid()}").touch()
    while (folder / "shut").exists():
        time.sleep(0.005)
Reporting.load = load
"""
TWO = "Reporting.instances = 2\n"
TURNS = 12
"""Processes that are lost in turn."""
MUST_START = r"^inference request for sequence \d+ to model '' must specify the START flag"


async def ask(
    served: Reporting, number: int, value: int, *, start: bool = False, end: bool = False, **call: Any
) -> Any:
    of = Call(**call)
    of.scheduling = Scheduling(sequence_id=number, sequence_start=start, sequence_end=end)
    answer = await asyncio.wait_for(direct_infer(served.servable, {"x": np.array([value])}, of), 60)
    return answer["y"].tolist()


def count(served: Reporting, name: str, **labels: str) -> float:
    (value,) = [
        read.value for read in served.servable.readings() if read.name == name and dict(read.labels) == labels
    ]
    return value


async def started(served: Reporting, numbers: range) -> dict[int, int]:
    """The process of each of these sequences, which have had 10."""
    return {number: (await ask(served, number, 10, start=True))[1] for number in numbers}


async def test_sequences_end_with_a_process_lost_while_idle(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with reporting(tmp_path, SUMS, more=DECLARED + TWO) as served:
        pids = await started(served, range(1, 7))
        lost = pids[1]
        lost_numbers = [number for number, pid in pids.items() if pid == lost]
        assert len(lost_numbers) == 3
        os.kill(lost, signal.SIGKILL)
        await until(lambda: count(served, "sequences_ended", reason="lost") == 3)
        for number, pid in pids.items():
            if pid == lost:
                with pytest.raises(InvalidArgument, match=MUST_START):
                    await ask(served, number, 1)
            else:
                assert await ask(served, number, 1) == [11, pid]
        # It is logged a little later than it is so.
        await until(lambda: "was lost, which ended 3" in caplog.text)
        assert "reporting: process " in caplog.text
        assert " was lost, which ended 3 sequences" in caplog.text
        assert count(served, "sequences") == 3
        for number in lost_numbers:
            total, pid = await ask(served, number, 5, start=True, end=True)
            assert (total, pid in pids.values()) == (5, pid != lost and pid in pids.values())
        assert count(served, "sequences_ended", reason="lost") == 3


async def test_no_request_of_a_sequence_is_run_by_the_next_process(tmp_path: Path) -> None:
    """However soon it comes after the end of the process."""
    policy = RestartPolicy(first_delay=0.01, steady=0.0)
    async with reporting(tmp_path, SUMS, policy=policy, more=DECLARED) as served:
        for turn in range(TURNS):
            ((number, pid),) = (await started(served, range(turn + 1, turn + 2))).items()
            os.kill(pid, signal.SIGKILL)
            for _ in range(turn % 4):
                await asyncio.sleep(0)
            with pytest.raises((InvalidArgument, Unavailable)):
                await ask(served, number, 1)
            with pytest.raises(InvalidArgument, match=MUST_START):
                await ask(served, number, 1)
        assert count(served, "sequences_ended", reason="lost") == TURNS
        assert (count(served, "sequences"), served.servable.leases) == (0, 0)


async def test_what_waits_of_a_lost_sequence_is_refused_and_what_starts_anew_is_run(tmp_path: Path) -> None:
    async with reporting(tmp_path, SUMS, more=DECLARED) as served:
        ((_, pid),) = (await started(served, range(1, 2))).items()
        runs = asyncio.ensure_future(ask(served, 1, -2))
        await served.entered("in")
        waits = [asyncio.ensure_future(ask(served, 1, 1)), asyncio.ensure_future(ask(served, 1, 2, end=True))]
        anew = asyncio.ensure_future(ask(served, 1, 7, start=True))
        continued = asyncio.ensure_future(ask(served, 1, 1))
        other = asyncio.ensure_future(ask(served, 2, 3, start=True))
        await until(lambda: served.servable.queue_depth == 5)
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(Unavailable, match=r"SIGKILL|on node"):
            await runs
        for each in waits:
            with pytest.raises(InvalidArgument, match=MUST_START):
                await each
        assert [(await each)[0] for each in (anew, continued, other)] == [7, 8, 3]
        assert [count(served, "sequences_ended", reason=reason) for reason in ("lost", "cancelled")] == [1, 0]
        assert count(served, "sequences") == 2


@pytest.mark.parametrize("end", [False, True])
async def test_a_sequence_whose_only_request_is_lost(tmp_path: Path, end: bool) -> None:
    async with reporting(tmp_path, SUMS, more=DECLARED) as served:
        with pytest.raises(Unavailable, match="exited with status 1"):
            await ask(served, 1, -1, start=True, end=end)
        with pytest.raises(InvalidArgument, match=MUST_START):
            await ask(served, 1, 1)
        assert count(served, "sequences_ended", reason="end" if end else "lost") == 1
        assert served.servable.leases == 0


async def test_a_sequence_of_an_idempotent_model_ends_with_its_process(tmp_path: Path) -> None:
    """Another process lacks its state."""
    async with reporting(tmp_path, SUMS, more=DECLARED + "Reporting.idempotent = True\n") as served:
        with pytest.raises(Unavailable, match=r"exited with status 1$"):
            await ask(served, 1, -1, start=True)
        assert served.readings()["processes_lost ended"] == 1


async def test_a_start_that_no_process_came_for_is_no_beginning(tmp_path: Path) -> None:
    async with reporting(tmp_path, SUMS, more=DECLARED + SLOW) as served:
        ((_, pid),) = (await started(served, range(1, 2))).items()
        (tmp_path / "shut").touch()
        os.kill(pid, signal.SIGKILL)
        await served.entered("load-", 2)
        call = Call()
        call.scheduling = Scheduling(sequence_id=2, sequence_start=True)
        first = asyncio.ensure_future(direct_infer(served.servable, {"x": np.array([1])}, call))
        await until(lambda: count(served, "sequences_started") == 2 and served.servable.queue_depth == 0)
        call.cancel()
        with pytest.raises(ServingError):
            await asyncio.wait_for(first, 60)
        with pytest.raises(InvalidArgument, match=MUST_START):
            await ask(served, 2, 1)
        waits = asyncio.ensure_future(ask(served, 3, 5, start=True))
        (tmp_path / "shut").unlink()
        assert (await waits)[0] == 5
        assert (await ask(served, 3, 5))[0] == 10
