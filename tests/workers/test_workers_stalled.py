"""A worker that stands still does not hold up what is done with all."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from shared_ports import SERVES, Workers

from waiting import wait_until


def stand_still(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)


def runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_the_server_ends_without_its_answer(tmp_path: Path) -> None:
    with Workers(tmp_path, "--grace", "0.1") as workers:
        pids = workers.pids()
        stand_still(pids[0])
        workers.signal(signal.SIGTERM)
        assert workers.wait() == 0
        assert not any(map(runs, pids))
        assert f"worker 1 (pid {pids[0]}) did not exit within" in workers.stderr.text()


def test_stalled_worker_is_replaced_without_a_request(tmp_path: Path) -> None:
    with Workers(tmp_path, "--worker-timeout", "1") as workers:
        pids = workers.pids()
        stand_still(pids[0])
        wait_until(lambda: len(SERVES.findall(workers.stderr.text())) == 3)
        logged = workers.stderr.text()
        assert f"worker 1 (pid {pids[0]}) sent no heartbeat for 1 s; killing it" in logged
        assert "out of memory" not in logged
        assert workers.pids()[1] == pids[1]
        assert sorted(workers.on_each(lambda _: 0)) == [0, 0]


def test_it_is_replaced_without_its_answer(tmp_path: Path) -> None:
    with Workers(tmp_path, "--grace", "0.1") as workers:
        pids = workers.pids()
        stand_still(pids[0])
        workers.signal(signal.SIGHUP)
        wait_until(lambda: "rolling restart: all workers are replaced\n" in workers.stderr.text())
        assert len(SERVES.findall(workers.stderr.text())) == 4
        assert not any(map(runs, pids))
