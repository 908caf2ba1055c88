"""A server with models of all datatypes, and a client at each interface of KServe."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio

import triglot
from tests.process import PLAIN_MODELS
from tests.protocol_clients.kserve_async import GrpcClient, RestClient
from tests.transports.grpc_transport import transport_options
from triglot import backends
from triglot.repository.manager.loader import Load

MODELS = Path(__file__).resolve().parents[1] / "models"


@dataclass(frozen=True)
class Served:
    """A running server and a client for each of its protocols."""

    server: triglot.Server
    grpc: GrpcClient
    rest: RestClient

    def client(self, name: str) -> GrpcClient | RestClient:
        return self.grpc if name == "grpc" else self.rest


UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@asynccontextmanager
async def serve_models(
    paths: Sequence[Path] = (MODELS, *sorted(PLAIN_MODELS.glob("identity_*"))),
    load: Load = backends.load,
    **options: Any,
) -> AsyncIterator[Served]:
    """A server on free ports; by default with the models of tests/models and the identities."""
    config = triglot.Config(**{"grpc_port": 0, "rest_port": 0, "grace": 1.0} | transport_options(**options))
    async with (
        triglot.Server(paths, config, load=load) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=UNLIMITED) as channel,
        aiohttp.ClientSession(f"http://127.0.0.1:{server.rest_port}") as session,
    ):
        yield Served(server, GrpcClient(channel), RestClient(session))
