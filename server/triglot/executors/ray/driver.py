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
import tarfile
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

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


def run(server: socket.socket, address: str) -> None:
    """Carry out the orders that arrive on the socket, until it is closed; then end the process.

    Raises `ConnectionError` when it cannot connect to the cluster.
    """
    driver = Driver(server)
    local = {"include_dashboard": False} if address == "local" else {}
    try:
        ray.init(address=address, namespace=NAMESPACE, logging_level="warning", **local)
    except Exception as error:
        raise ConnectionError(reason_of(error)) from error
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
        self._files = Files()

    def say(self, event: Mapping[str, Any]) -> None:
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
            self.say({"actor": name, "state": "ended", "why": f"could not be started: {reason_of(error)}"})
            return
        ended = actor.serve.remote()
        self.say({"actor": name, "state": "placed", **opened})
        self.say({"actor": name, "state": "ended", "why": _wait_for_end(actor, ended)})
        self._kill({"kill": name})

    def _opened(self, name: str, order: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        options = {"name": name, "namespace": NAMESPACE, "lifetime": "detached", "max_restarts": 0}
        made = ray.remote(Instance).options(**options, **order["options"])
        actor = made.remote(order["title"], order["version"], bytes.fromhex(order["secret"]))
        digest, parts = self._files.put(order["files"]) if order["files"] else ("", [])
        try:
            opened = actor.open.remote(digest, parts)
            while not ray.wait([opened], timeout=_PENDING_SECONDS)[0]:
                self.say({"actor": name, "state": "pending"})
            return actor, ray.get(opened)
        finally:
            self._files.drop(digest)


def _wait_for_end(actor: Any, ended: Any) -> str:
    """Return the reason for the actor's end, as far as Ray knows it. Blocks until then."""
    while True:
        try:
            ray.get(ended)
        except ActorUnavailableError:
            # Ray does not know yet whether the actor has ended; a later call returns that.
            time.sleep(_UNAVAILABLE_SECONDS)
            ended = actor.serve.remote()
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


class Files:
    """The archives of models' files in Ray's object store, each kept while actors that need it are being started.

    Any thread may use it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._parts: dict[str, list[Any]] = {}
        self._users: dict[str, int] = {}

    def put(self, files: Mapping[str, str]) -> tuple[str, list[Any]]:
        """Return the files' digest, which names them, and references to the parts of their archive.

        `files`: their "root", and in "only" the name of the one file that is meant, "" for all. Each `put` needs a
        `drop`.
        """
        root, only = Path(files["root"]), files["only"]
        digest = _digest(root, only)
        with self._lock:
            if digest not in self._parts:
                self._parts[digest] = _put(root, only)
            self._users[digest] = self._users.get(digest, 0) + 1
            return digest, self._parts[digest]

    def drop(self, digest: str) -> None:
        """Release one use; the last one deletes the archive. Does nothing for ""."""
        with self._lock:
            if digest and not self._release(digest):
                del self._parts[digest], self._users[digest]

    def _release(self, digest: str) -> int:
        self._users[digest] -= 1
        return self._users[digest]


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
