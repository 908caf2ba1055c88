"""Probes of a server under load: health and metadata over gRPC, readiness over REST."""

import asyncio
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass

import grpc
import numpy as np

from bench import openclient
from bench.tally import BenchError, close
from triglot.pb.kserve import inference_pb2 as pb

RATE = 20.0
"""Probes of each kind per second."""
GOAL = 0.05
"""Largest p99 of each kind, in seconds."""


@dataclass(frozen=True, slots=True)
class Probe:
    """A gRPC request, and its reply without load."""

    name: str
    path: str
    message: bytes
    reply: bytes


def of_model(port: int, model: str) -> list[Probe]:
    """Return probes of the gRPC server's health and the model's metadata; calls each once for its reply."""
    metadata = pb.ModelMetadataRequest(name=model).SerializeToString()
    asked = (
        ("gRPC health", "/grpc.health.v1.Health/Check", b""),
        ("gRPC model metadata", "/inference.GRPCInferenceService/ModelMetadata", metadata),
    )
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        return [
            Probe(name, path, message, channel.unary_unary(path)(message, timeout=10))
            for name, path, message in asked
        ]


async def run(probes: Sequence[Probe], grpc_port: int, rest_port: int, seconds: float) -> dict[str, list[float]]:
    """Run the probes, and REST's readiness; returns the latencies of each in seconds, by name."""
    *answers, rest = await asyncio.gather(
        *[_grpc(grpc_port, probe, seconds) for probe in probes], _rest(rest_port, seconds)
    )
    return {probe.name: its for probe, its in zip(probes, answers, strict=True)} | {"REST readiness": rest}


async def _grpc(port: int, probe: Probe, seconds: float) -> list[float]:
    connection = await openclient.connect(port, probe.path, probe.message, probe.reply)
    try:
        offered = await openclient.offer(connection, RATE, seconds)
    finally:
        await close(connection)
    if offered.refused:
        raise BenchError(f"{len(offered.refused)} calls of {probe.path} have failed")
    return offered.good


async def _rest(port: int, seconds: float) -> list[float]:
    """Probe REST's readiness on one connection; returns the latencies in seconds."""
    latencies: list[float] = []
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    end = time.perf_counter() + seconds
    try:
        while (started := time.perf_counter()) < end:
            writer.write(b"GET /v2/health/ready HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
            await reader.readexactly(int(length[1]) if length else 0)
            if b" 200 " not in head.partition(b"\r\n")[0]:
                raise BenchError(f"GET /v2/health/ready answered {head!r}")
            latencies.append(time.perf_counter() - started)
            await asyncio.sleep(1 / RATE)  # The pace.
    finally:
        writer.close()
        await writer.wait_closed()
    return latencies


def times(latencies: Sequence[float]) -> str:
    """Return latencies as text."""
    if not latencies:
        return "none"
    p50, p99 = np.percentile(latencies, (50, 99)) * 1e3
    return f"p50 {p50:.1f} ms, p99 {p99:.1f} ms, longest {max(latencies) * 1e3:.1f} ms"
