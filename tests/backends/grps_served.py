"""A grps project behind a server's real ports, in this process."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc.aio

import triglot
from triglot.backends.grps.project import GrpsProject
from triglot.backends.grps.settings import ProjectSettings
from triglot.cli import grps as grps_cli
from triglot.pb.grps.grps_pb2 import GrpsMessage
from triglot.telemetry.store import Telemetry

SERVICE = "/grps.protos.v1.GrpsService/"
PREDICT = "/grps/v1/infer/predict"
ANY_PORTS = {"TRIGLOT_HOST": "127.0.0.1", "TRIGLOT_REST_PORT": "0", "TRIGLOT_GRPC_PORT": "0"}


class Served:
    """The server and a client for each protocol."""

    def __init__(self, server: triglot.Server, channel: grpc.aio.Channel, session: aiohttp.ClientSession) -> None:
        self.server = server
        self.channel = channel
        self.session = session
        self.url = f"http://127.0.0.1:{server.rest_port}"

    async def predict(self, message: GrpsMessage, method: str = "Predict") -> GrpsMessage:
        """The answer of a unary method."""
        return GrpsMessage.FromString(
            await self.channel.unary_unary(SERVICE + method)(message.SerializeToString())
        )

    async def stream(self, message: GrpsMessage) -> list[GrpsMessage]:
        """All answers of PredictStreaming."""
        call = self.channel.unary_stream(SERVICE + "PredictStreaming")(message.SerializeToString())
        return [GrpsMessage.FromString(answer) async for answer in call]

    async def ask(
        self, verb: str, target: str, body: object = None, content_type: str = "application/json"
    ) -> tuple[int, Any]:
        """Status, and JSON or bytes, of the answer; a body is JSON, or bytes as they are."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"Content-Type": content_type}
        async with self.session.request(verb, self.url + target, data=data, headers=headers) as response:
            content = await response.read()
            is_json = response.headers["Content-Type"] == "application/json" and content
            return response.status, json.loads(content) if is_json else content


@asynccontextmanager
async def served(settings: ProjectSettings, **environment: str) -> AsyncIterator[Served]:
    """Serve the project; `environment` has options of Triglot, such as TRIGLOT_GRPS_HTTP_ERRORS."""
    telemetry = Telemetry()
    models, dag = grps_cli.project_models(GrpsProject(settings, telemetry.monitor))
    config = grps_cli.configuration(settings.server, dag, {}, ANY_PORTS | environment)
    server = triglot.Server(config=config, models=models, telemetry=telemetry, about=grps_cli.metadata(settings))
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with (
        server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}", options=unlimited) as channel,
        aiohttp.ClientSession() as session,
    ):
        yield Served(server, channel, session)
