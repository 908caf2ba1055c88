"""A token that is removed while the body of its call is being sent: the call does not begin."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.access.access_files import anonymous, client, write
from tests.state_changes import ChangingServer, changing_server
from tests.transports.h2_peers import SECONDS, Client, data, message, request_fields
from tests.transports.test_h2_rest import answer
from tests.transports.tls_server import HOST
from tests.waiting import until_found
from triglot.core.operation import WITHDRAWN
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb

BODY = b'{"log_info": false}'
BEARER = ("authorization", "Bearer now")
SILENT = pb.LogSettingsRequest()
SILENT.settings["log_info"].bool_param = False
GRPC = {
    "/inference.GRPCInferenceService/LogSettings": SILENT.SerializeToString(),
    "/grps.protos.v1.GrpsService/PredictStreaming": grps_pb2.GrpsMessage(model="half-1").SerializeToString(),
}
both = pytest.mark.parametrize(("grpc_transport", "http_transport"), [("h2", "h1"), ("aio", "aiohttp")])


async def token_is_removed(here: ChangingServer, file: Path) -> None:
    """From now on, after a request of its client has been taken."""
    await here.state()
    write(file, anonymous(["health", "inspect"]), client("later", ["later"], ["administer", "infer"]))

    async def status() -> int:
        url = here.url + "/v2/repository/models/none/unload"
        async with here.session.post(url, data=b"{}", headers=dict([BEARER])) as answer:
            return answer.status

    await until_found(status, lambda status: status == 401)


def access(folder: Path) -> Path:
    return write(
        folder / "access.toml", anonymous(["health", "inspect"]), client("now", ["now"], ["administer", "infer"])
    )


@both
@pytest.mark.parametrize("path", GRPC)
async def test_over_grpc(tmp_path: Path, grpc_transport: str, http_transport: str, path: str) -> None:
    file, transports = access(tmp_path), {"grpc_transport": grpc_transport, "http_transport": http_transport}
    async with changing_server(tmp_path, access=str(file), **transports) as here:
        before = await here.state()
        peer = Client(*await asyncio.open_connection(HOST, here.server.grpc_port))
        await peer.greet()
        authority = (":authority", "localhost")
        await peer.send(peer.raw_headers(1, [authority, *request_fields(path), BEARER]))
        live = [authority, *request_fields("/inference.GRPCInferenceService/ServerLive")]
        await peer.send(peer.raw_headers(3, live), data(3, message(b"")))
        assert (await peer.status(3))["grpc-status"] == "0"
        await token_is_removed(here, file)
        await peer.send(data(1, message(GRPC[path])))
        trailers = await peer.status(1)
        assert trailers["grpc-status"] == "16", trailers
        assert WITHDRAWN.split()[-1] in trailers["grpc-message"]
        assert await here.state() == before
        await peer.close()


@both
async def test_over_http1(tmp_path: Path, grpc_transport: str, http_transport: str) -> None:
    file, transports = access(tmp_path), {"grpc_transport": grpc_transport, "http_transport": http_transport}
    async with changing_server(tmp_path, access=str(file), **transports) as here:
        before = await here.state()
        reader, writer = await asyncio.open_connection(HOST, here.server.rest_port)
        head = f"POST /v2/logging HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(BODY)}\r\n"
        writer.write(f"{head}Authorization: Bearer now\r\nConnection: close\r\n\r\n".encode() + BODY[:3])
        await token_is_removed(here, file)
        writer.write(BODY[3:])
        got = await asyncio.wait_for(reader.read(), SECONDS)
        assert got.startswith(b"HTTP/1.1 401 ")
        assert b'\r\nWWW-Authenticate: Bearer realm="triglot"\r\n' in got
        assert WITHDRAWN.encode() in got
        assert await here.state() == before
        writer.close()


async def test_over_http2(tmp_path: Path) -> None:
    file = access(tmp_path)
    async with changing_server(tmp_path, access=str(file)) as here:
        before = await here.state()
        peer = Client(*await asyncio.open_connection(HOST, here.server.grpc_port))
        await peer.greet()
        fields = [(":method", "POST"), (":scheme", "http"), (":path", "/v2/logging"), (":authority", "localhost")]
        await peer.send(peer.raw_headers(1, [*fields, BEARER]))
        await peer.wait_until_processed()
        await token_is_removed(here, file)
        await peer.send(data(1, BODY))
        head, _ = await answer(peer)
        assert (head[":status"], head["www-authenticate"]) == ("401", 'Bearer realm="triglot"')
        assert await here.state() == before
        await peer.close()
