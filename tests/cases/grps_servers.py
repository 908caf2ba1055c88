"""The servers of the toy project that the cases of grps go to, each started when a case first asks for it."""

from __future__ import annotations

import signal
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import grpc

from grps_toys import CONFIGS, TOYS, grps_arguments
from process import Triglot

HEALTH = "health"
"""A server of the default configuration for cases that tell it whether it is ready."""
ENVIRONMENT = {"TRIGLOT_DRAIN_DELAY": "0"}
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
"""As grps' clients have them: messages of any size."""


@dataclass(frozen=True)
class Doors:
    """Where a server listens."""

    http_port: int
    channel: grpc.Channel


class Servers:
    """One server for each configuration of the toy project, and one for HEALTH; their files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._doors: dict[str, Doors | AssertionError] = {}
        self._servers: list[Triglot] = []
        self._running = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for server in self._servers:
            server.signal(signal.SIGTERM)
        self._running.close()

    def __getitem__(self, name: str) -> Doors:
        """Raises `AssertionError` when the server does not start; it is started once all the same."""
        if name not in self._doors:
            try:
                self._doors[name] = self._start(name)
            except AssertionError as error:
                self._doors[name] = error
        doors = self._doors[name]
        if isinstance(doors, AssertionError):
            raise doors
        return doors

    def _start(self, name: str) -> Doors:
        assert name in (*CONFIGS, HEALTH), f"no set-up {name}"
        config = "default" if name == HEALTH else name
        arguments = grps_arguments(TOYS, self._folder / name, config)
        server = self._running.enter_context(Triglot(*arguments, command="grps", environment=ENVIRONMENT))
        grpc_port, http_port = server.ports()
        self._servers.append(server)
        self._running.callback(_check_end, server)
        channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}", OPTIONS)
        return Doors(http_port, self._running.enter_context(channel))


def _check_end(server: Triglot) -> None:
    status = server.wait()
    assert status == 0, server.stderr.text()
