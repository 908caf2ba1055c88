"""Who may make a call: tokens in every form that stock clients send, over every transport."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

import triglot
from tests.access.access_clients import GuardedServer, guarded_server, infer_request
from tests.access.access_files import anonymous, client, hash_of, write
from tests.process import PLAIN_MODELS, write_model
from tests.waiting import SECONDS, until, until_found
from triglot import testing
from triglot.access.control import AccessControl
from triglot.config.options import ConfigError
from triglot.pb.kserve import inference_pb2 as pb

BASIC = "Basic " + base64.b64encode(b"friend:secret-of-friend").decode()
GOOD: list[dict[str, str]] = [
    {"authorization": "Bearer secret-of-friend"},
    {"authorization": "bearer secret-of-friend"},
    {"authorization": BASIC},
    {"x-api-key": "secret-of-friend"},
    {"authorization": "Bearer second-of-friend"},
]
BAD: list[dict[str, str]] = [
    {},
    {"authorization": "Bearer wrong"},
    {"authorization": "Bearer "},
    {"x-api-key": ""},
    {"authorization": "secret-of-friend"},
    {"authorization": "Digest secret-of-friend"},
    {"authorization": "Basic " + base64.b64encode(b"stranger:secret-of-friend").decode()},
    {"authorization": "Basic !!!"},
    {"authorization": "Bearer secret-of-friend", "x-api-key": "secret-of-friend"},
    {"x-api-key": hash_of("secret-of-friend")},
]


FRIEND = client("friend", ["secret-of-friend", "second-of-friend"], ["infer"])


@pytest.fixture(params=["h2", "aio"])
def transports(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"grpc_transport": request.param, "http_transport": {"h2": "h1", "aio": "aiohttp"}[request.param]}


async def test_credentials_of_stock_clients(tmp_path: Path, transports: dict[str, Any]) -> None:
    async with guarded_server(tmp_path, FRIEND, anonymous(["health"]), **transports) as here:
        for headers in GOOD:
            assert await here.code(headers) is grpc.StatusCode.OK, headers
            assert (await here.status(headers))[0] == 200, headers
        for headers in BAD:
            assert await here.code(headers) is grpc.StatusCode.UNAUTHENTICATED, headers
            status, text, asked = await here.status(headers)
            assert (status, asked) == (401, 'Bearer realm="triglot"'), headers
            assert "secret" not in text
        async with here.session.get(f"{here.url}/v2/health/ready") as answer:
            assert answer.status == 200
        async with here.session.get(f"{here.url}/v2") as answer:
            assert answer.status == 401
        async with here.session.get(f"{here.url}/v2", headers=GOOD[0]) as answer:
            assert answer.status == 403
            assert await answer.json() == {"error": "client 'friend' may not use metadata"}


async def test_streams_without_credentials(tmp_path: Path) -> None:
    async with guarded_server(tmp_path, FRIEND, grpc_transport="h2") as here:
        for _ in range(200):
            stream = here.stream_infer(iter([infer_request()]))
            with pytest.raises(grpc.aio.AioRpcError, match="UNAUTHENTICATED"):
                await anext(aiter(stream))


async def test_two_authorization_headers(tmp_path: Path, transports: dict[str, Any]) -> None:
    async with guarded_server(tmp_path, FRIEND, **transports) as here:
        twice = [("authorization", "Bearer secret-of-friend")] * 2
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await here.infer(pb.ModelInferRequest(model_name="x"), metadata=twice)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        async with here.session.post(f"{here.url}/v2/models/x/infer", data=b"{}", headers=twice) as answer:
            assert answer.status == 401


async def test_the_file_is_read_again(tmp_path: Path, transports: dict[str, Any]) -> None:
    async with guarded_server(tmp_path, FRIEND, **transports) as here:
        headers = {"x-api-key": "new"}
        assert await here.code(headers) is grpc.StatusCode.UNAUTHENTICATED
        write(here.file, client("friend", ["new"], ["infer"]))
        await until_found(lambda: here.code(headers), lambda code: code is grpc.StatusCode.OK)
        assert await here.code(GOOD[0]) is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[client.friend]\ntoken_sha256 = []\n", "did you mean 'tokens_sha256'?"),
        ("a = " + "[" * 100_000, "nested"),
    ],
    ids=["key", "depth"],
)
async def test_a_broken_file_leaves_the_old_one_in_force(
    tmp_path: Path, transports: dict[str, Any], caplog: pytest.LogCaptureFixture, text: str, problem: str
) -> None:
    async with guarded_server(tmp_path, FRIEND, **transports) as here:
        caplog.set_level("INFO", "triglot")
        write(here.file, text)
        await until(lambda: problem in caplog.text)
        assert await here.code(GOOD[0]) is grpc.StatusCode.OK
        write(here.file, FRIEND + "\n")
        await until(lambda: "the new access file is in force" in caplog.text)
        assert caplog.text.count("previous one stays in force") == 1


async def test_an_open_stream_ends_with_its_token(tmp_path: Path, transports: dict[str, Any]) -> None:
    async with guarded_server(tmp_path, FRIEND, **transports) as here:
        stream = here.stream_infer(metadata=list(GOOD[0].items()))
        await stream.write(infer_request())
        assert (await stream.read()).infer_response.model_name == "identity_fp32"
        write(here.file, client("friend", ["new"], ["infer"]))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await asyncio.wait_for(stream.read(), SECONDS)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert "withdrawn" in raised.value.details()


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("[client", "is not TOML"),
        ("[clients.x]", "unknown key 'clients', did you mean 'client'?"),
        ("[client.x]\noperations = ['infer']", "client.x: expected tokens_sha256 or certificates"),
        ("[client.x]\ntokens_sha256 = ['abc']\noperations = []", "client.x.tokens_sha256: expected the 64"),
        ("[client.x]\ntokens_sha256 = []", "client.x: expected tokens_sha256 or certificates"),
        (f"[client.x]\ntokens_sha256 = ['{hash_of('a')}']", "client.x.operations: missing"),
        ("[anonymous]\noperations = ['infr']", "anonymous.operations: unknown operation 'infr', did you mean"),
        (
            "[anonymous]\noperations = ['health']\nrate = -1",
            "anonymous.rate: expected requests a second, 0.001 or more, got -1",
        ),
        ("[anonymous]\noperations = ['health']\nconcurrent = 1.5", "anonymous.concurrent: expected a number"),
        ("[anonymous]\noperations = 'health'", "anonymous.operations: expected a list of texts, got str"),
        (client("x", [""], ["infer"]), "client.x.tokens_sha256: the hash of an empty text is no token's"),
        (client("a", ["t"], ["infer"]) + client("b", ["t"], ["infer"]), "client.a has the same one"),
    ],
)
def test_a_file_that_says_nothing_sensible(tmp_path: Path, text: str, problem: str) -> None:
    file = write(tmp_path / "access.toml", text)
    with pytest.raises(ConfigError) as raised:
        AccessControl(triglot.Config(access=str(file)))
    assert str(raised.value).startswith("access: ")
    assert problem in str(raised.value)


READS = """
import triglot

class Reads(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [1, 2])]
    outputs = [triglot.TensorSpec("y", "FP32", [1, 2])]

    def infer(self, inputs, call):
        if call.metadata.get("authorization") != "Bearer of the model":
            raise triglot.InvalidArgument("another token")
        return {"y": inputs["x"]}
"""


async def test_without_tokens_in_the_file_these_headers_are_the_models(
    tmp_path: Path, transports: dict[str, Any]
) -> None:
    write_model(tmp_path / "models" / "reads", READS)
    request = infer_request()
    request.model_name = "reads"
    async with guarded_server(tmp_path, anonymous(["infer"]), models=tmp_path / "models", **transports) as here:
        assert await here.infer(request, metadata=[("authorization", "Bearer of the model"), ("x-api-key", "a")])
        with pytest.raises(grpc.aio.AioRpcError, match="another token"):
            await here.infer(request, metadata=[("authorization", "Bearer wrong")])
        assert (await here.status({"authorization": "Bearer wrong"}))[0] == 200


async def test_clients_of_the_socket(tmp_path: Path, transports: dict[str, Any]) -> None:
    socket = tmp_path / "socket"
    async with guarded_server(
        tmp_path, FRIEND, anonymous(["health"]), grpc_socket=str(socket), **transports
    ) as here:
        await here.channel.close()
        here.channel = grpc.aio.insecure_channel(f"unix:{socket}")
        here.infer = here.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        live = here.channel.unary_unary("/inference.GRPCInferenceService/ServerLive")
        assert await live(b"")
        body = infer_request().SerializeToString()
        assert await here.infer(body, metadata=list(GOOD[0].items()))
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await here.infer(body)
        assert raised.value.code() is grpc.StatusCode.UNAUTHENTICATED


async def test_tokens_without_tls_are_for_loopback(tmp_path: Path) -> None:
    file = write(tmp_path / "access.toml", FRIEND)
    with pytest.raises(ConfigError, match=r"without TLS to 0\.0\.0\.0"):
        await testing.serve(PLAIN_MODELS, access=str(file), host="0.0.0.0").__aenter__()
    async with testing.serve(PLAIN_MODELS, access=str(file), host="0.0.0.0", tls_in_front=True):
        pass


async def test_tokens_without_tls_that_a_changed_file_brings(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rules = anonymous(["health", "infer"])
    async with guarded_server(tmp_path, rules, host="0.0.0.0") as here:
        write(here.file, client("friend", ["secret-of-friend"], ["infer"]))
        await until(lambda: "without TLS to 0.0.0.0" in caplog.text)
        assert "previous one stays in force" in caplog.text
        assert await here.code({}) is grpc.StatusCode.OK


async def test_the_groups_that_triton_restricts(tmp_path: Path, transports: dict[str, Any]) -> None:
    options: dict[str, Any] = {
        "grpc_restricted_protocol": "model-repository,metadata:admin=one,inference:infer-key=two",
        "http_restricted_api": "inference:X-Key=three",
    }
    async with testing.serve(PLAIN_MODELS, **options, **transports) as server, aiohttp.ClientSession() as session:
        here = GuardedServer(server.server, tmp_path, session)
        assert await here.code({"triton-grpc-protocol-infer-key": "two"}) is grpc.StatusCode.OK
        for headers in ({}, {"triton-grpc-protocol-infer-key": "one"}, {"infer-key": "two"}):
            assert await here.code(headers) is grpc.StatusCode.UNAVAILABLE
        assert (await here.status({"x-key": "three"}))[0] == 200
        status, text, _ = await here.status({"x-key": "two"})
        assert (status, text) == (403, '{"error": "This API is restricted, expecting header \'x-key\'"}')
        async with session.get(f"{here.url}/v2") as answer:
            assert answer.status == 200
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await here.server_metadata(pb.ServerMetadataRequest())
        assert raised.value.details() == (
            "This protocol is restricted, expecting header 'triton-grpc-protocol-admin'"
        )
        await here.channel.close()


@pytest.mark.parametrize(
    "text", ["inference", "inference:key", "inference:=x", "infer:a=b", "health:a=b,health:c=d"]
)
def test_groups_that_mean_nothing(text: str) -> None:
    with pytest.raises(ConfigError) as raised:
        AccessControl(triglot.Config(grpc_restricted_protocol=text))
    assert str(raised.value).startswith("grpc_restricted_protocol: ")


def test_a_key_of_binary_metadata_is_none_for_grpc() -> None:
    with pytest.raises(ConfigError) as raised:
        AccessControl(triglot.Config(grpc_restricted_protocol="health:a=b,inference:key-Bin=secret"))
    assert "'key-Bin'" in str(raised.value)
    assert "secret" not in str(raised.value)
    AccessControl(triglot.Config(http_restricted_api="inference:key-bin=b"))  # REST has no such rule.
