"""How a process waits for the next frame: awake, where that is likely to come soon."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator

import pytest

from triglot.engine.processes import channel
from triglot.engine.processes.channel import Channel, Gone
from triglot.engine.processes.frames import Kind

LONG = 60.0


@pytest.fixture
def ends() -> Iterator[tuple[Channel, Channel]]:
    one, other = (Channel(end) for end in socket.socketpair())
    one.wakeful = True
    yield one, other
    one.close()
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


def ask(one: Channel, other: Channel, number: int) -> None:
    other.send(Kind.CALL, call=number)
    assert one.receive().call == number


def ask_who_waits(one: Channel, other: Channel, number: int) -> None:
    """A thread waits for it, most likely before it is there."""
    got: list[int] = []
    thread = threading.Thread(target=lambda: got.append(one.receive().call))
    thread.start()
    other.send(Kind.CALL, call=number)
    thread.join(LONG)
    assert got == [number]


def test_what_came_soon_is_waited_for_awake(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ends
    yields = Yields(monkeypatch, LONG)
    ask(one, other, 1)
    assert yields.count == 0, "nothing is known yet, and the frame is there"
    yields.then = lambda: other.send(Kind.CALL, call=2)
    assert one.receive().call == 2
    assert yields.count == 1
    ask(one, other, 3)
    assert yields.count == 1, "the frame is there"


def test_what_took_long_is_not(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ends
    yields = Yields(monkeypatch, 0.0)
    ask(one, other, 1)
    monkeypatch.setattr(channel, "SOON", LONG)
    ask_who_waits(one, other, 2)
    assert yields.count == 0


def test_the_server_sleeps(ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = ends
    one.wakeful = False
    yields = Yields(monkeypatch, LONG)
    for number in (1, 2, 3):
        ask_who_waits(one, other, number)
    assert yields.count == 0


def test_the_other_side_goes_while_it_is_waited_for(
    ends: tuple[Channel, Channel], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = ends
    yields = Yields(monkeypatch, LONG)
    ask(one, other, 1)
    yields.then = other.close
    with pytest.raises(Gone, match="closed"):
        one.receive()
    assert yields.count == 1
