"""What a worker is told when it is started, on its command line."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from triglot.config.options import Config
from triglot.transports.listening import Bound
from triglot.workers.ports import Ports


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """Which worker it is, and the file descriptors that it has. `run` counts the starts of all workers."""

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
        """For a worker that inherits these; `tallies`: the file that workers count clients' calls in."""
        grpc, rest = ([one.fileno() for one in some] for some in (sockets.grpc, sockets.rest))
        return cls(number, run, ports.grpc, ports.rest, channel.fileno(), grpc, rest, tallies)

    def text(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> WorkerSpec:
        """The spec of `text`."""
        return cls(**json.loads(text))

    def take(self) -> tuple[socket.socket, Bound]:
        """The channel's end and the ports' sockets, which processes of this one do not inherit."""
        for descriptor in (self.channel, *self.grpc, *self.rest, self.tallies):
            os.set_inheritable(descriptor, False)
        grpc, rest = ([socket.socket(fileno=one) for one in some] for some in (self.grpc, self.rest))
        return socket.socket(fileno=self.channel), Bound(grpc, rest)

    def configured(self, config: Config) -> Config:
        """The configuration of this worker: the ports that were chosen, and a file of its own for traces."""
        traces = Path(config.trace_file) if config.trace_file else None
        # By its run: a successor has the number of who still writes.
        own = "" if traces is None else str(traces.with_name(f"{traces.stem}-worker{self.run}{traces.suffix}"))
        return replace(config, grpc_port=self.grpc_port, rest_port=self.rest_port, trace_file=own)
