"""The parameters of a worker, passed on its command line."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from triglot.config.options import Config
from triglot.dataplane.control import Bound
from triglot.workers.ports import Ports


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker's number and inherited file descriptors. `run` numbers the starts of all workers."""

    number: int
    run: int
    grpc_port: int
    rest_port: int
    channel: int
    grpc: list[int]
    rest: list[int]
    tallies: int

    @classmethod
    def of(
        cls, number: int, run: int, ports: Ports, channel: socket.socket, sockets: Bound, tallies: int
    ) -> WorkerSpec:
        """Return the spec of a worker that inherits these.

        `tallies`: file of clients' counters, shared by all workers.
        """
        grpc, rest = ([listening.fileno() for listening in some] for some in (sockets.grpc, sockets.rest))
        return cls(number, run, ports.grpc, ports.rest, channel.fileno(), grpc, rest, tallies)

    def text(self) -> str:
        """Return the spec as a command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> WorkerSpec:
        """Parse a command-line argument."""
        return cls(**json.loads(text))

    def take(self) -> tuple[socket.socket, Bound]:
        """Return the channel's socket and the ports' sockets.

        They are not inherited by this process's children.
        """
        for descriptor in (self.channel, *self.grpc, *self.rest, self.tallies):
            os.set_inheritable(descriptor, False)
        grpc, rest = ([socket.socket(fileno=descriptor) for descriptor in some] for some in (self.grpc, self.rest))
        return socket.socket(fileno=self.channel), Bound(grpc, rest)

    def configured(self, config: Config) -> Config:
        """Return the configuration of this worker: the reserved ports, and a trace file of its own."""
        traces = Path(config.trace_file) if config.trace_file else None
        # Named by `run`: a successor has the same number as the worker it replaces, which still writes.
        own = "" if traces is None else str(traces.with_name(f"{traces.stem}-worker{self.run}{traces.suffix}"))
        return replace(config, grpc_port=self.grpc_port, rest_port=self.rest_port, trace_file=own)
