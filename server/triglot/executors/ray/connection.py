"""The TCP connection between the server and an actor, mutually authenticated.

The server connects. Ray has carried a secret to the actor; each side proves that it knows the secret before any
frame is sent. Like Ray's own traffic, the connection is not encrypted.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from contextlib import suppress
from multiprocessing.connection import wait

_NONCE = 32
_SERVER, _ACTOR = b"server", b"actor"
HANDSHAKE_SECONDS = 10.0
"""Limit on the seconds to connect, and on those of a whole handshake."""
MAX_HANDSHAKES = 64
"""Limit on the unfinished handshakes of an actor; for one more, it drops the oldest.

A server finishes its handshake in one round trip, so it is dropped only if as many others connect meanwhile.
"""
_DEAD_SECONDS = 10
"""Seconds without an acknowledgement after which a peer counts as gone, such as a machine that lost power."""


class NotOurs(ConnectionError):
    """The other side does not know the secret."""


class _Handshake:
    """One side of the handshake on a new connection: each proves that it knows the secret, by the other's nonce.

    `ours` and `theirs` name the two sides, so that a proof cannot be sent back to its sender. `until` is the
    instant of `time.monotonic` at which it has to be finished. Raise `OSError` when the connection fails.
    """

    def __init__(self, connection: socket.socket, secret: bytes, ours: bytes, theirs: bytes) -> None:
        self.connection = connection
        self.until = time.monotonic() + HANDSHAKE_SECONDS
        self._secret = secret
        self._ours = ours
        nonce = os.urandom(_NONCE)
        self._expected = _proof(secret, theirs, nonce)
        self._received = b""
        connection.sendall(nonce)

    def receive(self) -> bool:
        """Receive once, and send the proof when it is due; return whether the other side has proved itself.

        Raise `NotOurs` when its proof is wrong or the connection is closed, `OSError` when the connection fails.
        """
        before = len(self._received)
        if not (data := self.connection.recv(2 * _NONCE - before)):
            raise NotOurs("the other side hung up")
        self._received += data
        nonce, proof = self._received[:_NONCE], self._received[_NONCE:]
        if before < _NONCE == len(nonce):
            self.connection.sendall(_proof(self._secret, self._ours, nonce))
        if len(proof) < _NONCE:
            return False
        if not hmac.compare_digest(proof, self._expected):
            raise NotOurs("the other side does not know the secret")
        self.connection.settimeout(None)
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return True


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + nonce, "sha256")


def connect(address: tuple[str, int], secret: bytes) -> socket.socket:
    """Return the server's connection to an actor. Blocks.

    Raise `OSError` when it cannot connect, `NotOurs` when the other side does not know the secret.
    """
    connection = socket.create_connection(address, HANDSHAKE_SECONDS)
    try:
        handshake = _Handshake(connection, secret, _SERVER, _ACTOR)
        while not handshake.receive():
            connection.settimeout(_seconds_until(handshake.until))
    except BaseException:
        connection.close()
        raise
    return connection


def accept(listener: socket.socket, secret: bytes, timeout: float) -> socket.socket:
    """Return, in the actor, the connection of its server. Blocks.

    Any host in the network can connect, so handshakes run concurrently: none waits for another.

    Raise `TimeoutError` when the server has not connected within `timeout` seconds.
    """
    until = time.monotonic() + timeout
    listener.setblocking(False)
    running: dict[socket.socket, _Handshake] = {}  # The oldest first.
    try:
        while True:
            next_end = min([until, *[handshake.until for handshake in running.values()]])
            ready = wait([listener, *running], _seconds_until(next_end))
            if (now := time.monotonic()) >= until:
                raise TimeoutError(f"the server has not connected within {timeout:g} s")
            for connection in [connected for connected in running if connected in ready]:
                try:
                    if running[connection].receive():
                        del running[connection]
                        return connection
                except OSError:
                    del running[connection]
                    connection.close()
            if listener in ready and (begun := _begin(listener, secret)):
                running[begun.connection] = begun
            for connection, handshake in list(running.items()):
                if handshake.until <= now or len(running) > MAX_HANDSHAKES:
                    del running[connection]
                    connection.close()
    finally:
        for connection in running:
            connection.close()


def _begin(listener: socket.socket, secret: bytes) -> _Handshake | None:
    """Return the handshake on the next connection, None if that has been closed already."""
    with suppress(BlockingIOError, ConnectionError):
        connection, _ = listener.accept()
        connection.setblocking(False)
        try:
            return _Handshake(connection, secret, _ACTOR, _SERVER)
        except OSError:
            connection.close()
    return None


def _seconds_until(until: float) -> float:
    """Return the seconds until an instant of `time.monotonic`: positive, since 0 would mean not to block."""
    return max(0.001, until - time.monotonic())


def watch(connection: socket.socket) -> None:
    """Have the system end the connection when the other machine is gone.

    For a connection on which data is sent all the time: only missing acknowledgements reveal it.
    """
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _DEAD_SECONDS)
