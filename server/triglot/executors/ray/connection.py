"""The two TCP connections between the server and an actor, mutually authenticated.

The server connects. Ray has carried a secret to the actor; each side proves that it knows the secret before any
frame is sent. Like Ray's own traffic, the connections are not encrypted.
"""

from __future__ import annotations

import hmac
import os
import socket
import time
from contextlib import suppress

_NONCE = 32
_SERVER, _ACTOR = b"server", b"actor"
GREETING_SECONDS = 10.0
"""Seconds to connect, and for each send or receive of the handshake."""
_DEAD_SECONDS = 10
"""Seconds without an acknowledgement after which a peer counts as gone, such as a machine that lost power."""
CONNECTIONS = 2
"""Number of connections: the first carries frames, the second control messages and notices."""


class NotOurs(ConnectionError):
    """The other side does not know the secret."""


def connect(address: tuple[str, int], secret: bytes) -> list[socket.socket]:
    """Returns the server's connections to an actor. Blocks.

    Raises `OSError` when it cannot connect, `NotOurs` when the other side does not know the secret.
    """
    made: list[socket.socket] = []
    try:
        for _ in range(CONNECTIONS):
            made.append(connection := socket.create_connection(address, GREETING_SECONDS))
            _greet(connection, secret, _SERVER, _ACTOR)
            _settle(connection)
    except BaseException:
        _close(made)
        raise
    return made


def accept(listener: socket.socket, secret: bytes, timeout: float) -> list[socket.socket]:
    """Returns, in the actor, the connections of its server. Blocks.

    Raises `TimeoutError` when the server has not connected within `timeout` seconds.
    """
    made: list[socket.socket] = []
    until = time.monotonic() + timeout
    while len(made) < CONNECTIONS:
        listener.settimeout(max(0.01, until - time.monotonic()))
        connection, _ = listener.accept()
        try:
            connection.settimeout(GREETING_SECONDS)
            _greet(connection, secret, _ACTOR, _SERVER)
            _settle(connection)
        except OSError:  # Any host in the network can connect.
            connection.close()
        else:
            made.append(connection)
    return made


def _greet(connection: socket.socket, secret: bytes, ours: bytes, theirs: bytes) -> None:
    """Challenge the other side to prove that it knows the secret, and prove it in turn.

    `ours` and `theirs` name the two sides, so that a proof cannot be sent back to its sender. Raises `NotOurs`
    when the proof is wrong or the connection is closed, `OSError` when the connection fails.
    """
    nonce = os.urandom(_NONCE)
    connection.sendall(nonce)
    other = _exactly(connection, _NONCE)
    connection.sendall(_proof(secret, ours, other))
    proof = _exactly(connection, _NONCE)
    if not hmac.compare_digest(proof, _proof(secret, theirs, nonce)):
        raise NotOurs("the other side does not know the secret")


def _proof(secret: bytes, side: bytes, nonce: bytes) -> bytes:
    return hmac.digest(secret, side + nonce, "sha256")


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        if not (more := connection.recv(size - len(data))):
            raise NotOurs("the other side hung up")
        data += more
    return data


def _settle(connection: socket.socket) -> None:
    connection.settimeout(None)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def watch(connection: socket.socket) -> None:
    """Have the system end the connection when the other machine is gone.

    For a connection on which data is sent all the time: only missing acknowledgements reveal it.
    """
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _DEAD_SECONDS)


def _close(connections: list[socket.socket]) -> None:
    for one in connections:
        one.close()
