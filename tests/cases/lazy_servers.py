"""Server processes by name, each started when a case first asks for it."""

from __future__ import annotations

import signal
from abc import ABC, abstractmethod
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, Self, TypeVar

from tests.process import Triglot

Address = TypeVar("Address")


class LazyServers(ABC, Generic[Address]):
    """`servers[NAME]` is where the server of that name listens. All are ended together."""

    def __init__(self) -> None:
        self._addresses: dict[str, Address | AssertionError] = {}
        self._servers: list[Triglot] = []
        self._running = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # All at once: TensorFlow takes a while to leave.
        for server in self._servers:
            server.signal(signal.SIGTERM)
        self._running.close()

    def __getitem__(self, name: str) -> Address:
        """Raise `AssertionError` when the server does not start; it is started once all the same."""
        if name not in self._addresses:
            try:
                self._addresses[name] = self._start(name)
            except AssertionError as error:
                self._addresses[name] = error
        address = self._addresses[name]
        if isinstance(address, AssertionError):
            raise address
        return address

    def _keep(self, server: Triglot) -> tuple[int, int]:
        """The ports for gRPC and REST of a server that runs from now on until the end."""
        self._running.enter_context(server)
        ports = server.ports()
        self._servers.append(server)
        self._running.callback(self._check_end, server)
        return ports

    @abstractmethod
    def _start(self, name: str) -> Address:
        """Start the server of this name, and keep it. Raise `AssertionError`."""

    @abstractmethod
    def _check_end(self, server: Triglot) -> None:
        """Check a server that was terminated. Raise `AssertionError`."""
