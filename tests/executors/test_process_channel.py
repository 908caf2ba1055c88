"""How both ends of a channel send and wait: senders are never blocked, and one thread reads for all that wait."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from tests.executors.reporting_models import ON_LOOP, PLAIN, reporting
from triglot.executors.remote import channel, child
from triglot.executors.remote.channel import Channel, Mailbox, PeerClosed
from triglot.executors.remote.frames import Kind
from triglot.platform.cpus import usable_cpus

LONG = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    local, other = (Channel(end) for end in socket.socketpair())
    local.wakeful = True
    yield local, other
    local.close()
    other.close()


class Yields:
    """Does something when the waiting side first looks for others that want its core."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, soon: float) -> None:
        self.count = 0
        self.then: Callable[[], object] = lambda: None
        monkeypatch.setattr(channel, "SOON", soon)
        monkeypatch.setattr(os, "sched_yield", self)

    def __call__(self) -> None:
        self.count += 1
        then, self.then = self.then, lambda: None
        then()


class Looks:
    """How often the waiting side looks, awake, whether something has come."""

    def __init__(self, channel: Channel, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._look = channel._poll.poll
        monkeypatch.setattr(channel, "_poll", self)

    def poll(self, timeout: float) -> list[tuple[int, int]]:
        self.count += 1
        return self._look(timeout)


def ask(channel: Channel, other: Channel, number: int) -> None:
    other.send(Kind.CALL, call=number)
    assert channel.receive().call == number


def test_what_came_soon_is_waited_for_awake(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, other = ends
    yields = Yields(monkeypatch, LONG)
    ask(local, other, 1)
    assert yields.count == 0, "nothing is known yet, and the frame is there"
    yields.then = lambda: other.send(Kind.CALL, call=2)
    assert local.receive().call == 2
    assert yields.count == 1
    ask(local, other, 3)
    assert yields.count == 1, "the frame is there"


def test_late_reply_is_waited_for_asleep(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    local, other = ends
    Yields(monkeypatch, 0.0)
    ask(local, other, 1)
    monkeypatch.setattr(channel, "SOON", LONG)
    looks = Looks(local, monkeypatch)
    ask(local, other, 2)
    assert looks.count == 0
    ask(local, other, 3)
    assert looks.count == 1, "the last one came soon"


def test_the_server_sleeps(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    local, other = ends
    local.wakeful = False
    Yields(monkeypatch, LONG)
    looks = Looks(local, monkeypatch)
    for number in (1, 2, 3):
        ask(local, other, number)
    assert looks.count == 0


def test_peer_closes_while_it_is_waited_for(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    local, other = ends
    yields = Yields(monkeypatch, LONG)
    ask(local, other, 1)
    yields.then = other.close
    with pytest.raises(PeerClosed, match="closed"):
        local.receive()
    assert yields.count == 1


# --- many threads, and readers that are slow ---


def test_sending_does_not_block_and_all_arrives_in_order(ends: tuple[Channel, Channel]) -> None:
    local, other = ends
    text = b'"' + 100_000 * b"x" + b'"'
    for number in range(100):  # More than a socket holds.
        local.send(Kind.CALL, call=number, text=text)
    assert local.congested
    assert [(message.call, message.text) for message in (other.receive() for _ in range(100))] == [
        (number, text) for number in range(100)
    ]
    local.send(Kind.CALL, call=100)
    assert other.receive().call == 100


def test_a_side_that_ends_can_wait_until_all_is_sent(ends: tuple[Channel, Channel]) -> None:
    local, other = ends
    for number in range(100):
        local.send(Kind.CALL, call=number, text=100_000 * b"x")
    with ThreadPoolExecutor() as threads:
        flushed = threads.submit(local.flush)
        assert [other.receive().call for _ in range(100)] == list(range(100))
        flushed.result(LONG)
    assert not local.congested


def test_frames_that_wait_are_dropped_with_the_other_side(ends: tuple[Channel, Channel]) -> None:
    local, other = ends
    boxes = [Mailbox() for _ in range(100)]
    for box in boxes:
        local.send(Kind.CALL, text=100_000 * b"x", placed=local.place({"x": np.zeros(10)}), box=box)
    other.socket.shutdown(socket.SHUT_RDWR)
    local.send(Kind.CALL, box=boxes[0])
    with ThreadPoolExecutor() as threads:
        threads.submit(local.read_until_closed).result(LONG)
    assert local.peer_closed
    assert not boxes[-1].sent


def test_one_thread_reads_for_all_that_wait(ends: tuple[Channel, Channel]) -> None:
    local, other = ends
    boxes = {number: Mailbox() for number in range(8)}
    local.deliver = lambda message: boxes[message.call].put(message)

    def call(number: int) -> int:
        for turn in range(100):
            local.send(Kind.CALL, call=number, text=str(turn).encode())
            local.wait(boxes[number].messages.__len__)
            assert boxes[number].messages.popleft().fields == turn
        return number

    def answer() -> None:
        for _ in range(800):
            message = other.receive()
            other.send(Kind.DONE, call=message.call, text=message.text)

    with ThreadPoolExecutor(9) as threads:
        answers = threads.submit(answer)
        assert list(threads.map(call, boxes, timeout=LONG)) == list(boxes)
        answers.result(LONG)


def test_unread_frame_counts_as_heartbeat(ends: tuple[Channel, Channel]) -> None:
    local, other = ends
    assert not local.has_unread()
    other.send(Kind.BEAT)
    assert local.has_unread()
    local.receive()
    assert not local.has_unread()
    other.close()
    assert not local.has_unread()


# --- which processes wait awake ---

SEES = """
from triglot.executors.remote.channel import Channel
receive, wakeful = Channel.receive, []

def sees(self):
    wakeful.append(self.wakeful)
    return receive(self)

Channel.receive = sees
"""


@pytest.mark.parametrize(
    ("infer", "code", "wakeful"), [(PLAIN, "wakeful[-1]", True), (ON_LOOP, "return wakeful[-1]", False)]
)
async def test_a_process_that_runs_calls_one_by_one_does(
    tmp_path: Path, infer: str, code: str, wakeful: bool
) -> None:
    async with reporting(tmp_path, infer, more=SEES) as served:
        assert await served.ask(code) == str(wakeful and len(usable_cpus()) > 1)


@pytest.mark.parametrize(
    ("own", "servers", "shares_core"),
    [({0}, {0}, False), ({1}, {0}, True), ({1}, {0, 1}, True), (set(), set(), False)],
)
def test_busy_wait_needs_a_core_for_each_side(
    own: set[int], servers: set[int], shares_core: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "usable_cpus", lambda process=0: servers if process == os.getppid() else own)
    assert child._has_core_of_its_own() is shares_core
