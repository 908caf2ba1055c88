"""The connection between a server and an actor, without either: frames, tensors, and who is let in."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress

import numpy as np
import pytest

from triglot.executors.joining import Stack
from triglot.executors.ray import connection as ray_connection
from triglot.executors.ray.connection import MAX_HANDSHAKES, accept, connect
from triglot.executors.remote.channel import Channel, Mailbox, PeerClosed
from triglot.executors.remote.frames import Kind

SECRET = b"s" * 32
SECONDS = 30.0
NONCE = 32
HANDSHAKE_SECONDS = 0.4
"""In place of the actor's limit, where a handshake is to run out of time."""
Ends = tuple[Channel, Channel]


@pytest.fixture(name="ends")
def both_ends() -> Iterator[Ends]:
    local, other = (Channel(end, shares_memory=False) for end in socket.socketpair())
    with closing(local), closing(other):
        yield local, other


def test_tensors_larger_than_what_the_network_holds(ends: Ends) -> None:
    large = np.arange(10_000_000, dtype=np.int32)
    parts = Stack([large[:6_000_000], large[6_000_000:]], len(large))
    with ThreadPoolExecutor(1) as threads:
        sent = threads.submit(
            ends[0].send, Kind.CALL, placed=ends[0].place({"x": large, "y": parts, "z": large[::2]})
        )
        tensors = ends[1].receive().tensors
        sent.result(SECONDS)
    assert tensors is not None
    assert all((tensors[name] == wanted).all() for name, wanted in (("x", large), ("y", large), ("z", large[::2])))


def test_frames_of_several_threads_do_not_mix(ends: Ends) -> None:
    def send(number: int) -> None:
        for _ in range(20):
            ends[0].send(Kind.CALL, call=number, placed=ends[0].place({"x": np.full(100_000, number)}))

    with ThreadPoolExecutor(4) as threads:
        sent = [threads.submit(send, number) for number in range(4)]
        for _ in range(80):
            message = ends[1].receive()
            assert message.tensors is not None
            assert (message.tensors["x"] == message.call).all()
        assert [task.result(SECONDS) for task in sent] == [None] * 4


@pytest.mark.parametrize("cut", [0, 3, 30, 200])
def test_connection_that_ends_in_a_frame_is_closed(cut: int) -> None:
    ours, theirs = socket.socketpair()
    sending, other = socket.socketpair()
    with closing(Channel(sending, shares_memory=False)) as sends:
        sends.send(Kind.CALL, placed=sends.place({"x": np.arange(1000)}))
        data = other.recv(100_000)
    other.close()
    theirs.sendall(data[:cut])
    theirs.close()
    with closing(Channel(ours, shares_memory=False)) as channel, pytest.raises(PeerClosed):
        channel.receive()


def test_what_cannot_be_sent_was_not_sent(ends: Ends) -> None:
    box = Mailbox()
    ends[0].send(Kind.CALL, box=box)
    assert box.sent
    ends[0].socket.shutdown(socket.SHUT_RDWR)
    box = Mailbox()
    ends[0].send(Kind.CALL, box=box)
    assert not box.sent


# --- who is let in ---


@pytest.fixture(name="listener")
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def test_each_side_proves_the_secret(listener: socket.socket) -> None:
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(accept, listener, SECRET, SECONDS)
        ours = connect(listener.getsockname()[:2], SECRET)
        theirs = accepted.result(SECONDS)
    with ours, theirs:
        ours.sendall(b"7")
        assert theirs.recv(1) == b"7"


def test_a_stranger_is_turned_away_and_the_server_comes_in(listener: socket.socket) -> None:
    address = listener.getsockname()[:2]
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(accept, listener, SECRET, SECONDS)
        with pytest.raises(OSError, match=r"hung up|does not know the secret|reset"):
            connect(address, b"t" * 32)
        with socket.create_connection(address) as scanner:
            scanner.sendall(b"GET / HTTP/1.1\r\n\r\n" + bytes(64))
            with suppress(ConnectionResetError):
                while scanner.recv(1000):
                    pass
        for connection in (connect(address, SECRET), accepted.result(SECONDS)):
            connection.close()


def test_silent_strangers_do_not_hold_up_the_server(listener: socket.socket) -> None:
    """For a stranger more than `MAX_HANDSHAKES`, the actor drops the oldest, and no other."""
    address = listener.getsockname()[:2]
    with ThreadPoolExecutor(1) as threads, ExitStack() as strangers:
        accepted = threads.submit(accept, listener, SECRET, SECONDS)
        oldest, second, *_ = (
            strangers.enter_context(socket.create_connection(address, SECONDS)) for _ in range(MAX_HANDSHAKES + 1)
        )
        assert len(received(oldest)) == NONCE
        second.sendall(bytes(NONCE))
        with second.makefile("rb") as answers:
            assert len(answers.read(2 * NONCE)) == 2 * NONCE
        for connection in (connect(address, SECRET), accepted.result(SECONDS)):
            connection.close()
        assert received(second) == b""  # Closed once the server is connected.


def received(connection: socket.socket) -> bytes:
    """Return all bytes until the other side closes the connection."""
    data = b""
    with suppress(ConnectionResetError):
        while more := connection.recv(1000):
            data += more
    return data


def drip(connection: socket.socket) -> bool:
    """Send nonce and proof slowly, byte by byte; return whether the other side closed the connection meanwhile."""
    with connection:
        try:
            for _ in range(2 * NONCE):
                connection.sendall(b"0")
                time.sleep(HANDSHAKE_SECONDS / 8)
        except OSError:
            return True
    return False


def test_a_stranger_cannot_prolong_a_handshake(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "HANDSHAKE_SECONDS", HANDSHAKE_SECONDS)
    address = listener.getsockname()[:2]
    with ThreadPoolExecutor(1) as threads:
        accepted = threads.submit(accept, listener, SECRET, SECONDS)
        assert drip(socket.create_connection(address, SECONDS))
        monkeypatch.undo()
        for connection in (connect(address, SECRET), accepted.result(SECONDS)):
            connection.close()


def test_an_impostor_cannot_prolong_a_handshake(listener: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray_connection, "HANDSHAKE_SECONDS", HANDSHAKE_SECONDS)
    with ThreadPoolExecutor(1) as threads:
        impostor = threads.submit(lambda: drip(listener.accept()[0]))
        with pytest.raises(TimeoutError):
            connect(listener.getsockname()[:2], SECRET)
        assert impostor.result(SECONDS)


def test_server_rejects_a_false_actor(listener: socket.socket) -> None:
    def pretend() -> None:
        with listener.accept()[0] as connection:
            connection.sendall(connection.recv(32))  # Its own nonce: what it proves is then what it has to prove.
            connection.sendall(connection.recv(32))

    thread = threading.Thread(target=pretend)
    thread.start()
    with pytest.raises(OSError, match="does not know the secret"):
        connect(listener.getsockname()[:2], SECRET)
    thread.join()


def test_an_actor_does_not_wait_for_ever(listener: socket.socket) -> None:
    with pytest.raises(TimeoutError):
        accept(listener, SECRET, 0.05)
