"""A worker that stands still: what counts as its heartbeat, and that it does not hold up what is done with all."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import SECONDS
from tests.waiting import wait_until
from tests.workers.shared_ports import SERVES, Workers
from triglot.workers.supervisor import HEARTBEAT_SECONDS, wait_until_hung


@pytest.fixture
def idle() -> Iterator[int]:
    """A process that does nothing."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


async def test_neither_an_answer_nor_work(idle: int) -> None:
    began = time.monotonic()
    await wait_until_hung(idle, asyncio.Event().wait, 2 * HEARTBEAT_SECONDS)
    assert time.monotonic() - began >= 2 * HEARTBEAT_SECONDS


async def test_an_answer_that_comes_while_the_supervisor_is_held_up(idle: int) -> None:
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_connection(sock=ours)
    asked_again = asyncio.Event()

    def answer() -> None:
        theirs.send(b"!")
        time.sleep(HEARTBEAT_SECONDS)  # The time is over when the loop goes on.

    async def ask() -> None:
        asyncio.get_running_loop().call_later(HEARTBEAT_SECONDS / 2, answer)
        await reader.readexactly(1)
        if asked_again.is_set():
            await asyncio.Event().wait()
        asked_again.set()

    watching = asyncio.ensure_future(wait_until_hung(idle, ask, HEARTBEAT_SECONDS))
    await asyncio.wait_for(asked_again.wait(), SECONDS)
    await watching  # It says no more the second time.
    writer.close()
    theirs.close()


async def test_what_asking_raises(idle: int) -> None:
    async def ask() -> None:
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        await wait_until_hung(idle, ask, SECONDS)


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
