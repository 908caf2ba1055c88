"""A page in a browser calls a model through Envoy, by gRPC-Web and Connect, as docs/proxies.md configures it."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from aiohttp import web

from tests.e2e.browser import IN_ONE_BROWSER, visiting
from tests.e2e.foreign.clients import MODELS
from tests.e2e.proxies import PROXIES, running
from tests.e2e.server_process import ServerProcess
from tests.process import PLAIN_MODELS, unused_ports
from tests.transports.live import METHOD
from tests.transports.tls_server import Authority
from triglot.core.errors import Code
from triglot.pb.kserve import inference_pb2 as pb

pytestmark = IN_ONE_BROWSER

CALL = """async ([url, type, body]) => {
    const own = type.includes("grpc-web") ? "x-grpc-web" : "connect-protocol-version";
    const headers = {"content-type": type, [own]: "1"};
    const response = await fetch(url, {method: "POST", headers, body: new Uint8Array(body)});
    const read = [];
    for (const reader = response.body.getReader(); ;) {
        const {value, done} = await reader.read();
        if (done) break;
        read.push(...value);
    }
    return [response.status, response.headers.get("grpc-status"), read];
}"""
"""JavaScript: calls, and returns the HTTP status, a status in the headers and the bytes of the body."""
GRPC_WEB, CONNECT, CONNECT_STREAM = "application/grpc-web+proto", "application/proto", "application/connect+proto"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def called(browser: object, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Any]:
    """Calls a method from a page of another origin: its name, content type and body."""
    folder = tmp_path_factory.mktemp("grpc_web")
    Authority(folder).server()
    shutil.copy(folder / "server.pem", folder / "server.crt")
    (envoy,) = (proxy for proxy in PROXIES if proxy.name == "Envoy")
    page_port, _ = unused_ports()
    origin = f"http://127.0.0.1:{page_port}"
    models = (str(PLAIN_MODELS), str(MODELS), "--model-control-mode=explicit", "--load-model=identity_uint8,steps")
    with (
        ServerProcess(*models) as server,
        running(envoy, folder, server.grpc_address, server.rest_address, origin) as port,
    ):
        runner = web.AppRunner(web.Application())
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", page_port).start()
        async with visiting(ignore_https_errors=True) as visitor:
            await visitor.page.goto(origin)  # Not found, but a page of that origin.

            async def call(method: str, content_type: str, body: bytes) -> tuple[int, str | None, bytes]:
                arguments = [f"https://127.0.0.1:{port}{METHOD}{method}", content_type, list(body)]
                status, code, received = await visitor.page.evaluate(CALL, arguments)
                return status, code, bytes(received)

            yield call
        await runner.cleanup()


def infer(model: str = "identity_uint8") -> bytes:
    """A request whose raw contents come back."""
    request = pb.ModelInferRequest(model_name=model, raw_input_contents=[b"abc"])
    request.inputs.add(name="x", datatype="UINT8", shape=[1, 3])
    return request.SerializeToString()


def steps(count: int) -> bytes:
    request = pb.ModelInferRequest(model_name="steps")
    for name, value in (("n", count), ("ms", 0)):
        request.inputs.add(name=name, datatype="INT32", shape=[1]).contents.int_contents.append(value)
    return request.SerializeToString()


def frame(message: bytes) -> bytes:
    """A message as gRPC-Web and streams of Connect have it."""
    return b"\0" + len(message).to_bytes(4, "big") + message


def frames(body: bytes) -> list[tuple[int, bytes]]:
    """The flags and the content of each frame."""
    found = []
    while body:
        end = 5 + int.from_bytes(body[1:5], "big")
        found.append((body[0], body[5:end]))
        body = body[end:]
    return found


def of(message: bytes) -> list[bytes]:
    return list(pb.ModelInferResponse.FromString(message).raw_output_contents)


async def test_grpc_web(called: Any) -> None:
    status, _, body = await called("ModelInfer", GRPC_WEB, frame(infer()))
    (_, message), (flags, trailers) = frames(body)
    assert (status, of(message), flags) == (200, [b"abc"], 0x80)
    assert b"grpc-status:0\r\n" in trailers


async def test_grpc_web_stream(called: Any) -> None:
    _, _, body = await called("ModelStreamInfer", GRPC_WEB, frame(steps(3)))
    *messages, (flags, trailers) = frames(body)
    assert (len(messages), flags) == (3, 0x80)
    assert b"grpc-status:0\r\n" in trailers


async def test_grpc_web_error(called: Any) -> None:
    _, code, body = await called("ModelInfer", GRPC_WEB, frame(infer("unknown")))
    assert (code, body) == (str(Code.NOT_FOUND.value), b"")


async def test_connect(called: Any) -> None:
    status, _, body = await called("ModelInfer", CONNECT, infer())
    assert (status, of(body)) == (200, [b"abc"])


async def test_connect_stream(called: Any) -> None:
    _, _, body = await called("ModelStreamInfer", CONNECT_STREAM, frame(steps(3)))
    *messages, (flags, end) = frames(body)
    assert (len(messages), flags, end) == (3, 2, b"{}")


async def test_connect_error(called: Any) -> None:
    status, _, body = await called("ModelInfer", CONNECT, infer("unknown"))
    assert status == 404
    assert b'"code":"not_found"' in body
