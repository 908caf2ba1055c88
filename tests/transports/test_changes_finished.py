"""Calls that change the server: they run to their end when their client disconnects, over every transport."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest

import triglot
from tests.protocol_clients.channel import SERVICE
from tests.served_models import SECONDS, Function, twice
from tests.waiting import until
from triglot.core.operation import EVERYTHING
from triglot.pb.kserve import inference_pb2 as pb
from triglot.transports.row_call import LAST_MESSAGE_SECONDS

LOAD = pb.RepositoryModelLoadRequest(model_name="twice").SerializeToString()
DEADLINE = 2.0
PATH = "/v2/repository/models/twice/load"


class Loading:
    """A server whose only model loads when the test opens the `gate`."""

    def __init__(self, folder: Path, transport: str, **options: Any) -> None:
        (folder / "models" / "twice").mkdir(parents=True)
        (folder / "models" / "twice" / "model.py").touch()
        self.begun, self.gate = threading.Event(), threading.Event()
        self.audit = folder / "audit"
        self.entrypoint = "gRPC" if transport in ("h2", "aio") else "REST"
        self.row = "RepositoryModelLoad" if self.entrypoint == "gRPC" else PATH.replace("twice", "{model}")
        options["grpc_transport" if self.entrypoint == "gRPC" else "http_transport"] = transport
        self.server = triglot.Server(
            [folder / "models"],
            triglot.Config(
                grpc_port=0,
                rest_port=0,
                grace=0.2,
                drain_delay=0,
                model_control_mode="explicit",
                access_log=True,
                audit_log=str(self.audit),
                **options,
            ),
            load=self._load,
        )

    def _load(self, *_: object) -> triglot.Model:
        self.begun.set()
        assert self.gate.wait(SECONDS)
        return Function(twice)

    async def load_and_disconnect(self) -> None:
        """Begin a load, and disconnect; returns when the server knows: it answers what was sent after that."""
        if self.entrypoint == "gRPC":
            async with grpc.aio.insecure_channel(f"127.0.0.1:{self.server.grpc_port}") as channel:
                call = channel.unary_unary(SERVICE + "RepositoryModelLoad")(LOAD)
                await until(self.begun.is_set)
                call.cancel()
                await channel.unary_unary(SERVICE + "ServerLive")(b"")
            return
        with socket.create_connection(("127.0.0.1", self.server.rest_port)) as client:
            client.sendall(f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n".encode())
            await until(self.begun.is_set)
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await self.get("/v2/health/live")

    async def get(self, path: str) -> str:
        """Return what the server answers over REST."""
        url = f"http://127.0.0.1:{self.server.rest_port}{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            return await answer.text()

    async def outcome(self) -> str:
        """Return what the audit log says of the load, once it has ended."""
        await until(lambda: bool(self.audit.read_text()))
        [line] = map(json.loads, self.audit.read_text().splitlines())
        assert (line["model"], line["transport"]) == ("twice", self.entrypoint)
        return str(line["outcome"])


@asynccontextmanager
async def loading(folder: Path, transport: str, **options: Any) -> AsyncIterator[Loading]:
    it = Loading(folder, transport, **options)
    try:
        async with it.server:
            yield it
    finally:
        it.gate.set()


over = pytest.mark.parametrize("transport", ["h2", "aio", "h1", "aiohttp"])


@over
async def test_a_load_whose_client_disconnects_is_finished_and_counted_as_it_ends(
    tmp_path: Path, transport: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    async with loading(tmp_path, transport) as here:
        await here.load_and_disconnect()
        assert here.audit.read_text() == ""  # It has not ended.
        assert not here.server.dataplane.model_ready(EVERYTHING, "twice")
        here.gate.set()
        assert await here.outcome() == "OK"
        assert here.server.dataplane.model_ready(EVERYTHING, "twice")
        count_lines = [line for line in (await here.get("/metrics")).splitlines() if here.row in line]
        assert {line.partition("{")[0] for line in count_lines} >= {"triglot_requests_total"}
        assert all('code="OK"' in line for line in count_lines if "code=" in line)
    [line] = [record.getMessage() for record in caplog.records if here.row in record.getMessage()]
    assert "code=OK" in line


@over
async def test_a_load_whose_deadline_passes_is_finished(tmp_path: Path, transport: str) -> None:
    async with loading(tmp_path, transport, rest_timeout=DEADLINE) as here:
        passed = time.monotonic() + DEADLINE + LAST_MESSAGE_SECONDS
        if here.entrypoint == "gRPC":
            async with grpc.aio.insecure_channel(f"127.0.0.1:{here.server.grpc_port}") as channel:
                with pytest.raises(grpc.aio.AioRpcError, match="DEADLINE_EXCEEDED"):
                    await channel.unary_unary(SERVICE + "RepositoryModelLoad")(LOAD, timeout=DEADLINE)
        url = f"http://127.0.0.1:{here.server.rest_port}{PATH}"
        async with aiohttp.ClientSession() as session:
            if here.entrypoint == "REST":
                answering = asyncio.ensure_future(session.post(url))
            await until(here.begun.is_set)
            await until(lambda: time.monotonic() > passed)
            here.gate.set()
            assert await here.outcome() == "OK"
            if here.entrypoint == "REST":
                async with await answering as answer:
                    assert answer.status == 200


@over
async def test_a_load_without_a_client_ends_when_the_server_stops(tmp_path: Path, transport: str) -> None:
    async with loading(tmp_path, transport) as here:
        await here.load_and_disconnect()
        stopped = asyncio.ensure_future(here.server.stop())
        assert await here.outcome() == "UNAVAILABLE"
        here.gate.set()
        async with asyncio.timeout(SECONDS):
            await stopped
