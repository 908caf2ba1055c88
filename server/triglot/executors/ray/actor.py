"""The actor: waits for its server, and runs the model as a process of the server's would."""

from __future__ import annotations

import os
import socket
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import ray

from triglot.executors.process.child import Child
from triglot.executors.process.session import Session
from triglot.executors.process.unpacking import Unpacked
from triglot.executors.ray.connection import accept, watch
from triglot.executors.ray.control import ActorControl
from triglot.executors.ray.remote_channel import RemoteChannel
from triglot.platform.archives import unpack
from triglot.version import __version__

CONNECT_SECONDS = 60
"""For the driver's next order, and for the server to connect: an actor that nobody uses ends."""


class Instance:
    """One instance of a model. `name` is what Ray's log calls it, `version` the server's."""

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
        """End if nothing comes: who has started it may be gone, and Ray keeps it."""
        used = self._used = threading.Event()

        def end_unless_used() -> None:
            if not used.wait(CONNECT_SECONDS):
                _end_at_once()

        threading.Thread(target=end_unless_used, daemon=True).start()

    def open(self, digest: str, parts: list[Any]) -> dict[str, Any]:
        """Where it listens, and the folder of the model's files, which come in `parts`; "": it needs none."""
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
        """Run what the server sends, until it says that this is the end, or is gone."""
        assert self._listener is not None
        with self._listener:
            frames, beside = accept(self._listener, self._secret, 2 * CONNECT_SECONDS)
        self._used.set()
        watch(beside)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        control = ActorControl(beside, _end_at_once)
        session = Session(RemoteChannel(frames), control)
        child = Child(session, control.outbox)
        for work, arguments in ((child.beat, (os.getppid(),)), (session.wait, (_never,))):
            # The second one reads while a call runs, so that the next one is there when it has ended.
            threading.Thread(target=work, args=arguments, daemon=True).start()
        child.run()
        if self._files is not None:
            self._files.close()
        ray.actor.exit_actor()


def _end_at_once() -> None:
    """There is nobody left to answer to, whatever the model still does."""
    os._exit(1)


def _never() -> bool:
    return False


def _unpack(parts: list[Any], folder: Path) -> None:
    """The archive that lies in Ray's object store, in parts."""
    with tempfile.NamedTemporaryFile(dir=folder.parent, suffix=".tar") as archive:
        for part in parts:
            archive.write(ray.get(part))
        archive.flush()
        unpack(Path(archive.name), folder)
