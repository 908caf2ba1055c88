"""In the server: the Ray cluster, reached through the driver process, and the state of each actor it reports."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from triglot.core.errors import MissingDependency
from triglot.executors.process.process import log_descriptor

log = logging.getLogger(__name__)

_DRIVER = "import sys; sys.path[:] = {path!r}; from triglot.executors.ray.driver_start import main; main()"
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    # Seconds after which a driver that has lost its cluster ends; the next driver connects again.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
_LOOK_SECONDS = 0.02
"""Seconds between checks whether the connection to an actor is closed."""
_END_SECONDS = 10.0
"""Seconds for the driver to end, after which it is killed."""


class ActorBody:
    """The `Body` of one actor, as far as Ray reports on it. Any thread may use it.

    `name` is unique in the cluster; `title` names the actor in logs. `closed` returns whether its connection is
    closed.
    """

    def __init__(self, cluster: Cluster, title: str) -> None:
        self.name = f"{title}/{uuid.uuid4().hex[:12]}"
        self.title = title
        self.settled = threading.Event()
        """Set once it is placed on a node, or has ended."""
        self.ended = threading.Event()
        self.placed: Mapping[str, Any] = {}
        """The driver's "placed" event, with what `Instance.open` returned; empty before."""
        self.placed_at = 0.0
        """Time of that event, in seconds of `time.monotonic`."""
        self.why = ""
        """Reason for its end; "" before."""
        self.closed: Callable[[], bool] = lambda: False
        self._waits = False
        self._cluster = cluster

    @property
    def pid(self) -> int:
        """Its process id on its node; 0 before it has one."""
        return int(self.placed.get("pid", 0))

    @property
    def node(self) -> str:
        """Address of its node; "" before it is placed."""
        return str(self.placed.get("node", ""))

    def take(self, event: Mapping[str, Any]) -> None:
        """Handle an event of the driver: "pending", "placed" or "ended"."""
        state = event["state"]
        if state == "pending":
            if not self._waits:
                self._waits = True
                log.warning("%s: waits for a node of the Ray cluster that has the resources", self.title)
        elif state == "placed":
            self.placed_at, self.placed = time.monotonic(), event
            self.settled.set()
        else:
            self.end(event["why"])

    def end(self, why: str) -> None:
        """Note that it has ended; the first reason counts."""
        self.why = self.why or why
        self.ended.set()
        self.settled.set()

    def poll(self) -> int | None:
        """See `Body`. The status is always 1; `why` has the reason."""
        return 1 if self.ended.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """See `Body`. Returns also when the connection to it is closed."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self.ended.wait(_LOOK_SECONDS) and not self.closed():
            if until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(self.name, timeout or 0.0)
        return 1

    def kill(self) -> None:
        """See `Body`. The server treats it as ended at once, even if Ray cannot kill it now."""
        if not self.ended.is_set():
            self._cluster.kill(self.name)
            self.end("was killed")

    terminate = kill


class Cluster:
    """The cluster at an address, shared by all models that run there: each model opens and closes it once.

    The driver process is started with the first actor, and again with the next actor after it has ended. Any
    thread may use it.
    """

    _by_address: dict[str, Cluster] = {}
    _registry = threading.Lock()

    def __init__(self, address: str) -> None:
        self.address = address
        self._users = 0
        self._lock = threading.Lock()
        self._driver: subprocess.Popen[bytes] | None = None
        self._connection: socket.socket | None = None
        self._bodies: dict[str, ActorBody] = {}

    @classmethod
    def open(cls, address: str, file: Path) -> Cluster:
        """Return the cluster at this address, for the model of `file`.

        Raises `MissingDependency` when Ray is not installed.
        """
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency(
                f"{file}: execution 'ray' needs ray, which is not installed; run: pip install 'triglot[ray]'"
            )
        with cls._registry:
            cluster = cls._by_address.setdefault(address, cls(address))
            cluster._users += 1
            return cluster

    def close(self) -> None:
        """Release one model's use; the last one ends the driver. Blocks, for about `_END_SECONDS` at most."""
        with self._registry:
            self._users -= 1
            if self._users:
                return
            self._by_address.pop(self.address, None)
        with self._lock:
            driver, self._driver = self._driver, None
            connection, self._connection = self._connection, None
        if connection is not None and driver is not None:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_WR)
            try:
                driver.wait(_END_SECONDS)
            except subprocess.TimeoutExpired:
                driver.kill()
                driver.wait()
            connection.close()

    def start(self, title: str, order: Mapping[str, Any]) -> ActorBody:
        """Return a new actor, which Ray places later. Raises `OSError` when the driver cannot be reached.

        `title` names it in logs; `order` holds the other fields of the driver's order.
        """
        body = ActorBody(self, title)
        with self._lock:
            if self._driver is None:
                self._start_driver()
            self._bodies[body.name] = body
        try:
            self._order({"start": body.name, "title": title, **order})
        except OSError:
            self._bodies.pop(body.name, None)
            raise
        return body

    def kill(self, name: str) -> None:
        """Have Ray kill the actor of this name, if the driver can be reached."""
        with suppress(OSError):
            self._order({"kill": name})

    def _order(self, order: Mapping[str, Any]) -> None:
        with self._lock:
            if self._connection is None:
                raise OSError(f"there is no connection to the Ray cluster at {self.address!r}")
            self._connection.sendall(json.dumps(order).encode() + b"\n")

    def _start_driver(self) -> None:
        ours, theirs = socket.socketpair()
        path = [str(one) for one in sys.path]
        output = log_descriptor()
        with theirs:
            self._driver = subprocess.Popen(
                [sys.executable, "-c", _DRIVER.format(path=path), str(theirs.fileno()), self.address],
                env=_SETTINGS | os.environ,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self._connection = ours
        threading.Thread(target=self._read, args=(ours, self._driver), name="Ray's driver", daemon=True).start()

    def _read(self, connection: socket.socket, driver: subprocess.Popen[bytes]) -> None:
        why = f"the connection to the Ray cluster at {self.address!r} was lost"
        with suppress(OSError), connection.makefile("rb") as events:
            for line in events:
                event = json.loads(line)
                if "failed" in event:
                    why = event["failed"]
                elif "actor" in event:
                    self._handle_event(event)
        with self._lock:
            bodies = list(self._bodies.values())
            self._bodies.clear()  # The next driver does not know the running actors.
            if self._connection is connection:
                self._driver = self._connection = None
                log.error("%s; running actors keep serving", why)
                connection.close()
        driver.wait()
        for body in bodies:
            if not body.placed:
                body.end(f"could not be started: {why}")

    def _handle_event(self, event: Mapping[str, Any]) -> None:
        body = self._bodies.get(event["actor"])
        if body is not None:
            body.take(event)
            if body.ended.is_set():
                self._bodies.pop(body.name, None)
