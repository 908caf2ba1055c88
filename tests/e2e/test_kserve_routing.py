"""KServe's routing, by a real proxy: one rule for KServe's own gRPC service, and one for everything else."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.e2e.haproxy import gateway
from tests.process import SECONDS, Triglot, unused_ports, write_model
from tests.protocol_clients.every_protocol import INTERFACES, MODEL
from tests.transports.live import streaming
from triglot.core.errors import Code

DOUBLE = """
import triglot

class Double(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [1])]
    outputs = [triglot.TensorSpec("y", "FP32", [1])]

    def infer(self, inputs):
        return {"y": 2 * inputs["x"]}
"""


class Through:
    """The clients of `INTERFACES`, of a port that takes everything."""

    def __init__(self, port: int, channel: grpc.aio.Channel, session: aiohttp.ClientSession) -> None:
        self.url = f"http://127.0.0.1:{port}/v2"
        self.channel, self.session = channel, session
        self.stream_infer = streaming(channel)


@asynccontextmanager
async def through(port: int) -> AsyncIterator[Through]:
    """Clients of the port."""
    options = [("grpc.use_local_subchannel_pool", 1)]
    async with (
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options) as channel,
        aiohttp.ClientSession() as session,
    ):
        yield Through(port, channel, session)


async def health(clients: Through) -> bool:
    """grpc.health.v1."""
    answer = await health_pb2_grpc.HealthStub(clients.channel).Check(
        health_pb2.HealthCheckRequest(service=MODEL), timeout=SECONDS
    )
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


async def reflection(clients: Through) -> bool:
    """The list of services."""
    call = reflection_pb2_grpc.ServerReflectionStub(clients.channel).ServerReflectionInfo(
        iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=SECONDS
    )
    answer = await anext(aiter(call))
    return "inference.GRPCInferenceService" in {service.name for service in answer.list_services_response.service}


async def infers(interface: Any, clients: Through) -> bool:
    """A value comes back twice as large."""
    outcome = await interface(clients, 3.5)
    return bool(outcome.code is Code.OK and outcome.value == 7.0)


async def rest_health(clients: Through) -> bool:
    """The probe of readiness."""
    async with clients.session.get(f"{clients.url}/health/ready") as response:
        return response.status == 200


def checks() -> dict[str, Callable[[Through], Any]]:
    """Every interface, by its name."""
    of_interfaces = {
        name: lambda clients, interface=interface: infers(interface, clients)
        for name, interface in INTERFACES.items()
    }
    return {**of_interfaces, "health gRPC": health, "reflection gRPC": reflection, "REST health": rest_health}


async def answered(port: int) -> set[str]:
    """The interfaces that are answered at the port."""
    names = set()
    async with through(port) as clients:
        for name, check in checks().items():
            try:
                if await check(clients):
                    names.add(name)
            except (grpc.aio.AioRpcError, aiohttp.ClientError, AssertionError, ValueError):
                pass
    return names


@contextmanager
def served(folder: Path, grpc_port: int, rest_port: int) -> Iterator[None]:
    """The model, at these ports."""
    write_model(folder / "models", DOUBLE)
    ports = ("--grpc-port", str(grpc_port), "--rest-port", str(rest_port))
    with Triglot(folder / "models", "--model-name", MODEL, *ports) as server:
        server.stderr.wait_for(r"gRPC on \S+ and REST on ")
        yield


async def test_one_port_is_right_by_both_rules(tmp_path: Path) -> None:
    port, _ = unused_ports()
    async with gateway(tmp_path) as running:
        with served(tmp_path, port, port):
            running.route([port], [port])
            assert await answered(running.port) == set(checks())


async def test_with_a_port_for_each_rule_all_other_services_of_grpc_fail(tmp_path: Path) -> None:
    grpc_port, rest_port = unused_ports()
    async with gateway(tmp_path, other_protocol="h1") as running:
        with served(tmp_path, grpc_port, rest_port):
            running.route([grpc_port], [rest_port])
            names = set(checks())
            lost = {"TF Serving gRPC", "grps gRPC", "grps gRPC stream", "health gRPC", "reflection gRPC"}
            assert await answered(running.port) == names - lost
            assert lost == {name for name in names if "gRPC" in name} - {"KServe gRPC"}
