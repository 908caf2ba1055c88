"""In the server: one actor of a model, as a `Process` of its pool, and the `Place` that starts such actors."""

from __future__ import annotations

import asyncio
import os
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from triglot.core.errors import Code, ModelLoadError
from triglot.executors.process.process import Process, Program
from triglot.executors.ray.cluster import ActorBody, Cluster
from triglot.executors.ray.connection import connect, watch
from triglot.executors.ray.remote_channel import RemoteChannel
from triglot.model.config import ModelConfig
from triglot.version import __version__

MIN_SILENCE = 10.0
"""Minimum seconds without a heartbeat before an actor counts as hung.

The network may be interrupted, and the server cannot see whether the actor's code uses its processor.
"""
REASON_SECONDS = 0.3
"""Limit on the seconds that failed calls wait for Ray to report why the actor has ended.

Of a lost node, Ray reports it later; the calls there do not wait for that.
"""


class ActorProcess(Process):
    """One actor; see `Process`. It is connected in `load`, once Ray has placed it on a node.

    `body` is the actor as Ray reports it, `secret` authenticates the connections, `root` is the folder of the
    model's files on the server, and `take_metrics` gets the changes of its model's metrics.
    """

    kind = "actor"
    remote = True

    def __init__(
        self,
        program: Program,
        number: int,
        body: ActorBody,
        secret: bytes,
        root: Path,
        take_metrics: Callable[[Any], object],
    ) -> None:
        super().__init__(program.name, number, body, RemoteChannel(socket.socket()), take_metrics)
        self.body = body
        self._secret = secret
        self._root = root
        body.closed = lambda: self.channel.gone

    @property
    def place(self) -> Mapping[str, str]:
        """See `Process`."""
        node_id = str(self.body.placed.get("node_id", ""))
        return {"node": self.body.node, "node_id": node_id[:8]} if node_id else {}

    def _where(self) -> str:
        return f"pid {self.pid} on node {self.body.node}" if self.body.placed else "not placed yet"

    def load(self, program: Program, loop: Callable[[], asyncio.AbstractEventLoop]) -> dict[str, Any]:
        """See `Process`. Waits until Ray has placed the actor, and connects to it."""
        self.body.settled.wait()
        try:
            if self.lost or self.body.ended.is_set():
                raise ModelLoadError(f"{program.file}: its actor {self.why_gone()}", Code.UNAVAILABLE)
            self._connect()
        except OSError as error:
            raise ModelLoadError(
                f"{program.file}: cannot connect to its actor on node {self.body.node}: {error}", Code.UNAVAILABLE
            ) from error
        try:
            return super().load(program, loop)
        except ModelLoadError as error:
            if (folder := self.body.placed["folder"]) and folder in str(error):  # A path of the actor's node.
                text = str(error).replace(folder, str(self._root))
                raise type(error)(text, error.code) from error.__cause__
            raise

    def _connect(self) -> None:
        host, port = self.body.placed["address"]
        connection = connect((host, port), self._secret)
        watch(connection)
        self.channel.close()
        self._use(RemoteChannel(connection))
        if self.lost:  # Killed while it connected.
            self.kill(self.lost)

    def _file(self, program: Program) -> Path:
        folder, file = self.body.placed.get("folder", ""), super()._file(program)
        return Path(folder) / file.relative_to(self._root) if folder else file

    def _capacity(self, program: Program) -> float:
        # While one call runs, the next ones are sent already, and wait in the actor.
        return program.ray.max_inflight

    # --- while it lives ---

    def check(self, hang_seconds: float, longest_run: float) -> None:
        """See `Process`."""
        super().check(max(hang_seconds, MIN_SILENCE) if hang_seconds else 0.0, longest_run)

    def check_loading(self, age: float, timeout: float) -> None:
        """See `Process`. The timeout starts once Ray has placed the actor on a node."""
        super().check_loading(time.monotonic() - self.body.placed_at if self.body.placed else 0.0, timeout)

    def why_gone(self) -> str:
        """See `Process`. Waits up to `REASON_SECONDS` for Ray's reason."""
        if not self.lost:
            self.body.ended.wait(REASON_SECONDS)
            self.kill(self._ended(1))
        return self.lost

    def _ended(self, status: int) -> str:
        if not self.body.placed:
            return self.body.why or "was not placed"
        where = f"on node {self.body.node}"
        return f"ended {where}: {self.body.why}" if self.body.why else f"closed its connection {where}"


class RayPlace:
    """The cluster at `address`, where the actors of one model run; see `Place`.

    `root` is the folder of the model's files; `only` names the one file that is sent, "" for all.
    """

    def __init__(self, address: str, root: Path, only: str) -> None:
        self._address = address
        self._root = root
        self._only = only
        self._cluster: Cluster | None = None

    def open(self) -> None:
        """Open the cluster. Raises `MissingDependency` when Ray is not installed."""
        self._cluster = Cluster.open(self._address, self._root / self._only)

    def give_up(self) -> None:
        """See `Loading`. Does nothing: the pool ends the actors."""

    def close(self) -> None:
        """See `Place`."""
        cluster, self._cluster = self._cluster, None
        if cluster is not None:
            cluster.close()

    def start(self, program: Program, number: int, take_metrics: Callable[[Any], object]) -> ActorProcess:
        """Return a new actor, which waits for `load`; see `Process.start`.

        Raises `OSError` when the driver cannot be reached, or loading was cancelled.
        """
        if self._cluster is None:
            raise OSError("loading was cancelled")
        secret = os.urandom(32)
        options = program.ray
        order = {
            "version": __version__,
            "secret": secret.hex(),
            "options": options.of_actor(_gpus(program.config)),
            "files": {"root": str(self._root), "only": self._only} if options.send_files else None,
        }
        title = f"{program.name}: actor {number}"
        return ActorProcess(program, number, self._cluster.start(title, order), secret, self._root, take_metrics)


def _gpus(config: ModelConfig) -> float:
    """Return the default number of GPUs of an instance: 1 if the model has an instance group of kind GPU."""
    return float(any(group.kind == "GPU" for group in config.instance_groups))
