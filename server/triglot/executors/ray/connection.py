"""The two TCP connections between the server and an actor, each of which knows that the other is the right one.

The server connects. Both sides have a secret that Ray has carried, and prove it before a frame is sent; what they
send is not encrypted, as what Ray sends.
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
"""For a connection and its proofs."""
_DEAD_SECONDS = 10
"""After which a peer that acknowledges nothing is gone, as a machine that was switched off."""
CONNECTIONS = 2
"""The first one is for frames, the second one for what is said apart from calls."""


class NotOurs(ConnectionError):
    """The other side does not know the secret."""


def connect(address: tuple[str, int], secret: bytes) -> list[socket.socket]:
    """In the server: the connections to an actor. Blocks. Raises `OSError`."""
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
    """In the actor: the connections of its server. Blocks. Raises `TimeoutError` if it does not come in time."""
    made: list[socket.socket] = []
    until = time.monotonic() + timeout
    while len(made) < CONNECTIONS:
        listener.settimeout(max(0.01, until - time.monotonic()))
        connection, _ = listener.accept()
        try:
            connection.settimeout(GREETING_SECONDS)
            _greet(connection, secret, _ACTOR, _SERVER)
            _settle(connection)
        except OSError:  # A stranger: anybody in the network can come.
            connection.close()
        else:
            made.append(connection)
    return made


def _greet(connection: socket.socket, secret: bytes, ours: bytes, theirs: bytes) -> None:
    """Prove the secret to each other. Raises `OSError`."""
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
    """Have the system end it when the other machine is gone; of one over which something goes all the time."""
    with suppress(OSError, AttributeError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 1000 * _DEAD_SECONDS)


def _close(connections: list[socket.socket]) -> None:
    for one in connections:
        one.close()
