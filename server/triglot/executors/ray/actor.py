"""The actor, on a node of the cluster: waits for its server to connect, then runs the model in a `Child`."""

from __future__ import annotations

import os
import signal
import socket
import struct
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray

from triglot.executors.ray.connection import accept, watch
from triglot.executors.remote.channel import Channel
from triglot.executors.remote.child import Child
from triglot.executors.remote.session import Session, end_at_once
from triglot.platform.archives import unpack
from triglot.platform.unpacked import Unpacked
from triglot.version import __version__

CONNECT_SECONDS = 60
"""Seconds to wait for `open`, and then for the server to connect, after which an unused actor ends."""

SILENCE_SECONDS = 60
"""Seconds after which an actor that has received nothing ends: the server sends ten heartbeats a second."""


class Instance:
    """One instance of a model: the class of the Ray actor, whose methods the driver calls.

    `name` names it in Ray's log; `version` is the server's version of triglot; `secret` authenticates the server's
    connections. Raise `RuntimeError` when the node has another version of triglot.
    """

    def __init__(self, name: str, version: str, secret: bytes) -> None:
        if version != __version__:
            raise RuntimeError(f"expected triglot {version} on this node, as the server's, got {__version__}")
        self._name = name
        self._secret = secret
        self._files: Unpacked | None = None
        self._listener: socket.socket | None = None
        self._used = threading.Event()
        self._wait()

    def __repr__(self) -> str:
        return self._name

    def _wait(self) -> None:
        """Start a timer that ends the actor unless it is used: a detached actor outlives a driver that is gone."""
        used = self._used = threading.Event()

        def end_unless_used() -> None:
            if not used.wait(CONNECT_SECONDS):
                end_at_once()

        threading.Thread(target=end_unless_used, daemon=True).start()

    def open(self, digest: str, parts: list[Any]) -> dict[str, Any]:
        """Unpack the model's files, and listen for the server. Blocks.

        `digest` names the files, and `parts` are references to the parts of their archive; "" if it needs none.
        Return the actor's address, node and pid, and the folder of the files, "" without any.
        """
        self._used.set()
        if digest:
            self._files = Unpacked.made("models", f"files {digest}", lambda folder: _unpack(parts, folder))
        host = ray.util.get_node_ip_address()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._listener = socket.create_server((host, 0), family=family)
        self._wait()
        return {
            "address": self._listener.getsockname()[:2],
            "node": host,
            "node_id": ray.get_runtime_context().get_node_id(),
            "pid": os.getpid(),
            "folder": "" if self._files is None else str(self._files.folder),
        }

    def serve(self) -> None:
        """Accept the server's connections and run its calls until it sends END; end at once if it disconnects."""
        assert self._listener is not None
        with self._listener:
            connection = accept(self._listener, self._secret, 2 * CONNECT_SECONDS)
        self._used.set()
        # Ray's handler raises SystemExit, which would fail the model's call and leave the actor running.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        watch(connection)
        seconds = struct.pack("ll", SILENCE_SECONDS, 0)  # Limits only receiving, unlike `settimeout`.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, seconds)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        session = Session(Channel(connection, shares_memory=False))
        child = Child(session)
        threading.Thread(target=child.beat, args=(os.getppid(),), daemon=True).start()
        # Reads frames while a call runs, so that the next call has arrived when that one ends.
        threading.Thread(target=session.channel.read_until_closed, daemon=True).start()
        child.run()
        if self._files is not None:
            self._files.close()
        ray.actor.exit_actor()


def _unpack(parts: list[Any], folder: Path) -> None:
    """Unpack an archive whose parts lie in Ray's object store."""
    with tempfile.NamedTemporaryFile(dir=folder.parent, suffix=".tar") as archive:
        for part in parts:
            archive.write(ray.get(part))
        archive.flush()
        unpack(Path(archive.name), folder)
