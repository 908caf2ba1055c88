"""Ray's driver, a process of its own: starts and kills actors, and reports their state to the server.

Ray ends the process of a driver that has lost its cluster, and any of its functions may block; in a process of its
own neither affects the server. The actors are detached: they end not with the driver, but with their connection to
the server. Orders and events are lines of JSON on a socket.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import ray
from ray.exceptions import ActorDiedError, ActorUnavailableError, RaySystemError, RayTaskError

from triglot.executors.ray.actor import Instance

NAMESPACE = "triglot"
"""Ray namespace of the actors."""
_PART = 32 * 1024 * 1024
"""Bytes of an archive in one object of Ray's object store."""
_PENDING_SECONDS = 10.0
"""Seconds between "pending" events of an actor that Ray has not placed."""
_MAX_REASON = 300
"""Limit on the characters of a reason."""
_LOOK_SECONDS = 2.0
"""Seconds between checks whether the cluster knows this node."""
_UNAVAILABLE_SECONDS = 0.1
"""Seconds between checks of an actor whose connection was lost: Ray learns the reason shortly after that."""


def main() -> None:
    """Carry out the orders that arrive on a socket, until it is closed. The arguments: SOCKET ADDRESS."""
    server, address = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    driver = Driver(server)
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level="warning", **local)
    except Exception as error:
        driver.send_event({"failed": f"cannot connect to the Ray cluster at {address!r}: {reason_of(error)}"})
        return
    threading.Thread(
        target=_end_without_node, args=(ray.get_runtime_context().get_node_id(),), daemon=True
    ).start()
    with suppress(OSError), server.makefile("rb") as orders:
        for line in orders:
            driver.obey(json.loads(line))
    ray.shutdown()
    os._exit(0)  # Threads may still wait for actors.


def _end_without_node(node_id: str) -> None:
    """End the process once the cluster does not know this driver's node: a new cluster has taken the address."""
    with suppress(RaySystemError):  # Raised while `run` ends.
        while any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes()):
            time.sleep(_LOOK_SECONDS)
        os._exit(1)


class Driver:
    """Carries out the server's orders, each on a thread of its own, and sends it the events of the actors."""

    def __init__(self, server: socket.socket) -> None:
        self._server = server
        self._sending = threading.Lock()
        self._adding = threading.Lock()
        self._archives: WeakValueDictionary[str, Archive] = WeakValueDictionary()
        """By digest of the files, as long as actors that need them are being started."""

    def send_event(self, event: Mapping[str, Any]) -> None:
        """Send an event to the server. On any thread."""
        with self._sending, suppress(OSError):
            self._server.sendall(json.dumps(event).encode() + b"\n")

    def obey(self, order: dict[str, Any]) -> None:
        """Start to carry out an order, to start or to kill an actor."""
        work = self._start if "start" in order else self._kill
        threading.Thread(target=work, args=(order,), daemon=True).start()

    def _kill(self, order: dict[str, Any]) -> None:
        with suppress(Exception):  # Raised when the actor has ended already.
            ray.kill(ray.get_actor(order["kill"], NAMESPACE))

    def _start(self, order: dict[str, Any]) -> None:
        name: str = order["start"]
        try:
            actor, opened = self._opened(name, order)
        except BaseException as error:
            self._kill({"kill": name})
            self.send_event({"actor": name, "state": "ended", "why": f"could not be started: {reason_of(error)}"})
            return
        actor_end = actor.serve.remote()
        self.send_event({"actor": name, "state": "placed", **opened})
        self.send_event({"actor": name, "state": "ended", "why": _wait_for_end(actor, actor_end)})
        self._kill({"kill": name})

    def _opened(self, name: str, order: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": 0}
        made = ray.remote(Instance).options(**options, **order["options"])
        actor = made.remote(order["title"], order["version"], bytes.fromhex(order["secret"]))
        archive, digest = self._archive(order["files"]) if order["files"] else (None, "")
        opened = actor.open.remote(digest, [] if archive is None else archive.parts)
        while not ray.wait([opened], timeout=_PENDING_SECONDS)[0]:
            self.send_event({"actor": name, "state": "pending"})
        return actor, ray.get(opened)

    def _archive(self, files: Mapping[str, str]) -> tuple[Archive, str]:
        """Return the archive of the files, and their digest, which names them."""
        root, only = Path(files["root"]), files["only"]
        digest = _digest(root, only)
        with self._adding:
            archive = self._archives.get(digest)
            if archive is None:
                archive = self._archives[digest] = Archive(root, only)
            return archive, digest


def _wait_for_end(actor: Any, actor_end: Any) -> str:
    """Return the reason for the actor's end, as far as Ray knows it. Blocks until then."""
    while True:
        try:
            ray.get(actor_end)
        except ActorUnavailableError:
            # Ray does not know yet whether the actor has ended; a later call returns that.
            time.sleep(_UNAVAILABLE_SECONDS)
            actor_end = actor.serve.remote()
        except BaseException as error:
            return reason_of(error)
        else:
            return "was shut down"


def reason_of(error: BaseException) -> str:
    """Return the text of one of Ray's errors as one line of at most `_MAX_REASON` characters."""
    if isinstance(error, RayTaskError) and isinstance(error.cause, Exception):
        error = error.cause
    text = " ".join(str(error).split()) or type(error).__name__
    if isinstance(error, ActorDiedError):
        # Names and ids precede the reason, and advice follows it.
        text = text.rpartition("The actor is dead because ")[2].partition(" Some common causes include")[0]
    return text[:_MAX_REASON]


class Archive:
    """A model's files in Ray's object store, in parts: those in `root`, or `only` the one of this name."""

    def __init__(self, root: Path, only: str) -> None:
        self.parts = _put(root, only)


def _digest(root: Path, only: str) -> str:
    """Return a digest of the files' paths, sizes and times: files of gigabytes take too long to read."""
    paths = [root / only] if only else sorted(path for path in root.rglob("*") if path.is_file())
    known = [(str(path.relative_to(root)), path.stat().st_size, path.stat().st_mtime_ns) for path in paths]
    return hashlib.sha256(json.dumps([socket.gethostname(), str(root), known]).encode()).hexdigest()


def _put(root: Path, only: str) -> list[Any]:
    with tempfile.TemporaryFile() as file:
        with tarfile.open(fileobj=file, mode="w", dereference=True) as archive:
            archive.add(root / only if only else root, arcname=only or ".")
        file.seek(0)
        parts = []
        while part := file.read(_PART):
            parts.append(ray.put(part))
        return parts
