"""What counts as a heartbeat of a worker."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import time
from collections.abc import Iterator

import pytest

from process import SECONDS
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
