"""The servers of the toy project that the cases of grps go to, each started when a case first asks for it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from tests.cases.lazy_servers import LazyServers
from tests.grps_toys import CONFIGS, TOYS, grps_arguments
from tests.process import Triglot

HEALTH = "health"
"""A server of the default configuration for cases that tell it whether it is ready."""
ENVIRONMENT = {"TRIGLOT_DRAIN_DELAY": "0"}
OPTIONS = [("grpc.max_receive_message_length", -1), ("grpc.use_local_subchannel_pool", 1)]
"""As grps' clients have them: messages of any size."""


@dataclass(frozen=True)
class Address:
    """Where a server listens."""

    http_port: int
    channel: grpc.Channel


class Servers(LazyServers[Address]):
    """One server for each configuration of the toy project, and one for HEALTH; their files are in `folder`."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder

    def _start(self, name: str) -> Address:
        assert name in (*CONFIGS, HEALTH), f"no set-up {name}"
        config = "default" if name == HEALTH else name
        arguments = grps_arguments(TOYS, self._folder / name, config)
        grpc_port, http_port = self._keep(Triglot(*arguments, command="grps", environment=ENVIRONMENT))
        channel = grpc.insecure_channel(f"127.0.0.1:{grpc_port}", OPTIONS)
        return Address(http_port, self._running.enter_context(channel))

    def _check_end(self, server: Triglot) -> None:
        status = server.wait()
        assert status == 0, server.stderr.text()
