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
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from triglot.core.errors import Code, MissingDependency, ModelLoadError
from triglot.executors.ray.connection import connect, watch
from triglot.executors.remote.place import Body, Program, log_descriptor

log = logging.getLogger(__name__)

_DRIVER = "import sys; sys.path[:] = {path!r}; from triglot.executors.ray.driver import main; main()"
_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_COLOR_PREFIX": "0",
    # Seconds after which a driver that has lost its cluster ends; the next driver connects again.
    "RAY_gcs_rpc_server_reconnect_timeout_s": "10",
}
REASON_SECONDS = 0.3
"""Limit on the seconds that failed calls wait for Ray to report why the actor has ended."""
REACHABLE_SECONDS = 5.0
"""Timeout of the test connection to the cluster, in seconds."""
_END_SECONDS = 10.0
"""Seconds for the driver to end, after which it is killed."""


class ActorBody(Body):
    """One actor, as far as Ray reports on it. `secret` authenticates the connection to it.

    `order` holds the other fields of the driver's order. Raise `OSError` when the driver cannot be reached.
    """

    remote = True

    def __init__(
        self, cluster: Cluster, program: Program, number: int, root: Path, order: Mapping[str, Any]
    ) -> None:
        title = f"{program.name}: actor {number}"
        self.name = f"{title}/{uuid.uuid4().hex[:12]}"
        """Unique in the cluster."""
        self.over = threading.Event()
        """Set once it has ended."""
        self._title = title
        self._file = program.file
        self._root = root
        self._secret = os.urandom(32)
        self._settled = threading.Event()
        """Set once it is placed on a node, or has ended."""
        self.where = "not placed yet"
        self._placed: Mapping[str, Any] = {}
        """The driver's "placed" event, with what `Instance.open` returned; empty before."""
        self._why = ""
        """Reason for its end; "" before."""
        self._waits = False
        self._cluster = cluster
        cluster.start(self, {"title": title, "secret": self._secret.hex(), **order})

    def connect(self) -> socket.socket:
        """See `Body`. Waits until Ray has placed it."""
        self._settled.wait()
        if why := self.exit_reason():
            raise ModelLoadError(f"{self._file}: its actor {why}", Code.UNAVAILABLE)
        host, port = self._placed["address"]
        try:
            connection = connect((host, port), self._secret)
        except OSError as error:
            text = f"{self._file}: cannot connect to its actor on node {self._placed['node']}: {error}"
            raise ModelLoadError(text, Code.UNAVAILABLE) from error
        watch(connection)
        return connection

    def handle(self, event: Mapping[str, Any]) -> None:
        """Handle an event of the driver: "pending", "placed" or "ended"."""
        state = event["state"]
        if state == "pending":
            if not self._waits:
                self._waits = True
                log.warning("%s: waits for a node of the Ray cluster that has the resources", self._title)
        elif state == "placed":
            self._placed, self.pid, node = event, event["pid"], event["node"]
            self.where = f"pid {self.pid} on node {node}"
            self.labels = {"node": node, "node_id": event["node_id"][:8]}
            self.moved = (self._root, Path(event["folder"])) if event["folder"] else None
            self.begun = time.monotonic()
            self._settled.set()
        else:
            self.end(event["why"])

    def end(self, why: str) -> None:
        """Note that it has ended; the first reason counts."""
        self._why = self._why or why
        self.over.set()
        self._settled.set()

    def exit_reason(self) -> str:
        """See `Body`."""
        if not self.over.is_set():
            return ""
        return f"ended on node {self._placed['node']}: {self._why}" if self._placed else self._why

    def why_closed(self) -> str:
        """See `Body`. Of a lost node, Ray reports the reason later; the calls there do not wait for that."""
        self.over.wait(REASON_SECONDS)
        return self.exit_reason() or f"closed its connection on node {self._placed['node']}"

    def wait(self, timeout: float | None) -> bool:
        """See `Body`."""
        return self.over.wait(timeout)

    def kill(self) -> None:
        """See `Body`. The server treats it as ended at once, even if Ray cannot kill it now."""
        if not self.over.is_set():
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

        Raise `MissingDependency` when Ray is not installed.
        """
        if importlib.util.find_spec("ray") is None:
            raise MissingDependency(
                f"{file}: execution 'ray' needs ray, which is not installed; run: pip install ray"
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

    def start(self, body: ActorBody, order: Mapping[str, Any]) -> None:
        """Have the driver start an actor, which Ray places later. Raise `OSError` when it cannot be reached."""
        if self._driver is None:
            self._check_reachable()
        with self._lock:
            if self._driver is None:
                self._start_driver()
            self._bodies[body.name] = body
        try:
            self._order({"start": body.name, **order})
        except OSError:
            self._bodies.pop(body.name, None)
            raise

    def kill(self, name: str) -> None:
        """Have Ray kill the actor of this name, if the driver can be reached."""
        with suppress(OSError):
            self._order({"kill": name})

    def _order(self, order: Mapping[str, Any]) -> None:
        with self._lock:
            if self._connection is None:
                raise OSError(f"there is no connection to the Ray cluster at {self.address!r}")
            self._connection.sendall(json.dumps(order).encode() + b"\n")

    def _check_reachable(self) -> None:
        """Raise `OSError` when nothing listens at the address: Ray itself would retry for minutes."""
        host, _, port = self.address.rpartition(":")
        if host and port.isdecimal() and "/" not in host:
            try:
                socket.create_connection((host.strip("[]"), int(port)), REACHABLE_SECONDS).close()
            except OSError as error:
                raise OSError(f"cannot connect to the Ray cluster at {self.address!r}: {error}") from error

    def _start_driver(self) -> None:
        ours, theirs = socket.socketpair()
        path = [str(entry) for entry in sys.path]
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
            if body.begun is None:
                body.end(f"could not be started: {why}")

    def _handle_event(self, event: Mapping[str, Any]) -> None:
        body = self._bodies.get(event["actor"])
        if body is not None:
            body.handle(event)
            if body.over.is_set():
                self._bodies.pop(body.name, None)
