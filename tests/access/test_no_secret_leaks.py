"""No secret that a client or a file has is in anything that the server writes, prints, counts or answers."""

from __future__ import annotations

import asyncio
import base64
import json
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import aiohttp
import grpc.aio
import pytest
import trustme

from tests.access.access_clients import infer_request
from tests.access.access_files import anonymous, client, write
from tests.access.signed_tokens import Signer, hmac_token, issuer, key_server, keyset
from tests.process import FREE_PORTS, PLAIN_MODELS, SECONDS, Triglot, run_triglot, write_model
from tests.transports.h2_peers import Client, data
from tests.transports.tls_server import HOST
from triglot.pb.kserve import inference_pb2 as pb
from triglot.transports.http2.core import frames

RAISES = """
import triglot

class Raises(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [1, 2])]
    outputs = [triglot.TensorSpec("y", "FP32", [1, 2])]

    def infer(self, inputs, call):
        raise RuntimeError(f"for {call.client}")
"""
ODD_ISSUER = "https://odd.example"
"""What its keys are fetched with cannot be sent."""
SERVICE = "/inference.GRPCInferenceService/"
BODY = json.dumps({"inputs": [{"name": "x", "datatype": "FP32", "shape": [1, 2], "data": [1, 2]}]}).encode()
Headers = list[tuple[str, str]]


class Secrets:
    """Secrets, by what they are."""

    def __init__(self) -> None:
        names = (
            "token",
            "rotated",
            "wrong",
            "password",
            "grpc group",
            "rest group",
            "jwks",
            "odd jwks",
            "misplaced",
        )
        self.of = {name: secrets.token_urlsafe(32) for name in names}
        self.signer = Signer("leaks")
        stranger = Signer("stranger")
        good = self.signer.token()
        jwts = {
            "good JWT": good,
            "expired JWT": self.signer.token(exp=1),
            "JWT of others": stranger.token(),
            "odd issuer": self.signer.token(iss=ODD_ISSUER),
            "shared secret": hmac_token(b"x" * 32),
            "damaged JWT": good[:-8] + "AAAAAAAA",
            "cut JWT": good.rpartition(".")[0] + ".",
        }
        self.of |= jwts

    def credentials(self) -> Iterator[Headers]:
        """As clients send them, right and wrong."""
        for token in self.of.values():
            yield [("authorization", f"Bearer {token}")]
            yield [("x-api-key", token)]
            yield [("authorization", _basic(f"friend:{token}"))]
        for token in (self.of["token"], self.of["wrong"], self.of["good JWT"]):
            yield [("authorization", token)]
            yield [("authorization", f"Digest {token}")]
            yield [("authorization", _basic(f"{token}:x"))]
            yield [("authorization", _basic(token))]
            yield [("authorization", f"Basic {token}")]
            yield [("authorization", f"Bearer {token}"), ("x-api-key", token)]
            yield [("authorization", f"Bearer {token}")] * 2
            yield [("authorization", f"Bearer {token}" * 3)]
        for name in ("grpc group", "rest group", "wrong"):
            for key in ("triton-grpc-protocol-key", "key"):
                yield [("x-api-key", self.of["token"]), (key, self.of[name])]

    def found_in(self, text: str) -> list[str]:
        """Those that the text has, in any form."""
        return [name for name, secret in self.of.items() for part in _parts(secret) if part in text]


def _basic(pair: str) -> str:
    return "Basic " + base64.b64encode(pair.encode()).decode()


def _parts(secret: str) -> set[str]:
    """Forms of a secret that are as good as it; of a JWT the signature is the secret."""
    secret = secret.rpartition(".")[2] or secret
    encoded = secret.encode()
    # Wherever it begins in what is encoded, without the characters that depend on what is beside it.
    shifted = (base64.b64encode(bytes(shift) + encoded)[4:-4].decode() for shift in range(3))
    return {secret, quote(secret), encoded.hex(), *shifted}


class Seen:
    """All that came back."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.allowed = self.refused = 0

    def note(self, allowed: bool, *texts: object) -> None:
        self.texts += map(str, texts)
        self.allowed += allowed
        self.refused += not allowed


async def over_grpc(port: int, credentials: Iterable[Headers], seen: Seen) -> None:
    """Calls of each kind of row, to models that answer, fail or are not there."""
    good, raises, none = infer_request(), infer_request(), infer_request()
    raises.model_name, none.model_name = "raises", "none"
    calls: list[tuple[str, Any]] = [("ModelInfer", request) for request in (good, raises, none)]
    calls += [("ModelStatistics", pb.ModelStatisticsRequest()), ("NoSuchMethod", pb.ServerLiveRequest())]
    calls += [("RepositoryModelLoad", pb.RepositoryModelLoadRequest(model_name="none"))]
    calls += [("ModelStreamInfer", request) for request in (good, raises)]
    async with grpc.aio.insecure_channel(f"{HOST}:{port}") as channel:
        for metadata in credentials:
            for name, request in calls:
                kind = channel.stream_stream if name == "ModelStreamInfer" else channel.unary_unary
                message = request.SerializeToString()
                sent: Any = iter([message]) if name == "ModelStreamInfer" else message
                call = kind(SERVICE + name)(sent, metadata=metadata, timeout=SECONDS)
                try:
                    answers = [response async for response in call] if name == "ModelStreamInfer" else [await call]
                    seen.note(True, *answers)
                except grpc.aio.AioRpcError as error:
                    seen.note(False, error, error.debug_error_string(), error.trailing_metadata())
                seen.note(True, await call.initial_metadata(), await call.trailing_metadata())


async def over_http1(port: int, credentials: Iterable[Headers], seen: Seen) -> None:
    """As `over_grpc`."""
    calls = [("POST", f"/v2/models/{name}/infer", BODY) for name in ("identity_fp32", "raises", "none")]
    calls += [("GET", "/v2/models/stats", b""), ("POST", "/v2/repository/models/none/load", b"{}")]
    calls += [("POST", "/v1/models/identity_fp32:predict", b"{"), ("GET", "/none", b""), ("PUT", "/v2", b"")]
    async with aiohttp.ClientSession(f"http://{HOST}:{port}") as session:
        for headers in credentials:
            for verb, path, body in calls:
                async with session.request(verb, path, data=body, headers=headers) as answer:
                    seen.note(answer.status < 300, await answer.text(), answer.headers)


async def malformed(port: int, credentials: Iterable[Headers], seen: Seen) -> None:
    """Requests of HTTP/1.1 that are none, with credentials in them."""
    ends = ("Bad Name: x\r\n\r\n", "Content-Length: x\r\n\r\n", "\x00\r\n\r\n", "Transfer-Encoding: x\r\n\r\n")
    for headers in credentials:
        fields = "".join(f"{name}: {value}\r\n" for name, value in headers)
        for end in ends:
            reader, writer = await asyncio.open_connection(HOST, port)
            writer.write(f"POST /v2/models/none/infer HTTP/1.1\r\nHost: localhost\r\n{fields}{end}".encode())
            writer.write_eof()
            seen.note(False, (await reader.read()).decode("latin-1"))
            writer.close()


async def over_http2(port: int, credentials: Iterable[Headers], seen: Seen) -> None:
    """REST over HTTP/2."""
    for headers in credentials:
        peer = Client(*await asyncio.open_connection(HOST, port))
        await peer.greet()
        path = "/v2/models/identity_fp32/infer"
        fields = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "localhost")]
        await peer.send(peer.raw_headers(1, [*fields, *headers]), data(1, BODY))
        got = peer.fields((await peer.next(frames.HEADERS)).payload)
        seen.note(got[":status"] == "200", got)
        seen.note(got[":status"] == "200", (await peer.next(frames.DATA)).payload.decode())
        await peer.close()


def broken_files(misplaced: str) -> Iterator[str]:
    """With a secret where none belongs."""
    yield client("friend", [], ["infer"]).replace("tokens_sha256 = []", f'tokens_sha256 = ["{misplaced}"]')
    yield client("friend", [], ["infer"]).replace("[]", f'"{misplaced}"')
    yield client("friend", ["x"], [misplaced])
    yield client("friend", ["x"], ["infer"], rate=f'"{misplaced}"')
    yield client("friend", ["x"], ["infer"], concurrent=f'"{misplaced}"')
    yield client("friend", ["x"], ["infer"], **{misplaced: 1})
    yield client("friend", ["x"], ["infer"]) + f"\n{misplaced}\n"
    yield f'[anonymous]\noperations = "{misplaced}"\n'


@pytest.mark.parametrize(("grpc_transport", "http_transport"), [("h2", "h1"), ("aio", "aiohttp")])
def test_no_secret_is_anywhere(tmp_path: Path, grpc_transport: str, http_transport: str) -> None:
    write_model(tmp_path / "models" / "raises", RAISES)
    all_secrets, seen = Secrets(), Seen()
    of, authority = all_secrets.of, trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    (tmp_path / "jwks-token").write_text(of["jwks"])
    (tmp_path / "odd-token").write_text(of["odd jwks"] + "\u20ac")
    trace, audit = tmp_path / "trace", tmp_path / "audit"
    with key_server(keyset(all_secrets.signer), tls=authority.issue_cert("localhost")) as keys:
        tables = (
            client("friend", [of["token"], of["rotated"], of["password"]], ["infer", "inspect", "administer"]),
            issuer("some", keys.url, jwks_token_file="'jwks-token'", jwks_ca="'ca.pem'"),
            issuer("odd", keys.url, issuer=f"'{ODD_ISSUER}'", jwks_token_file="'odd-token'", jwks_ca="'ca.pem'"),
            anonymous(["health"]),
        )
        access = write(tmp_path / "access.toml", *tables)
        arguments = (
            *(PLAIN_MODELS, tmp_path / "models", *FREE_PORTS, "--access", access, "--audit-log", audit),
            *("--log-level", "debug", "--log-verbose-level", "2", "--trace-file", trace, "--trace-rate", "1"),
            *(
                "--trace-level",
                "TIMESTAMPS,TENSORS",
            ),
            *("--grpc-transport", grpc_transport, "--http-transport", http_transport),
        )
        environment = {
            "TRIGLOT_GRPC_RESTRICTED_PROTOCOL": f"statistics:key={of['grpc group']}",
            "TRIGLOT_HTTP_RESTRICTED_API": f"statistics:key={of['rest group']}",
        }
        with Triglot(*arguments, environment=environment) as server:
            asyncio.run(_use(server, all_secrets, seen, grpc_transport))
            for number, text in enumerate(broken_files(of["misplaced"]), 1):
                write(access, text)
                server.stderr.wait_for(rf"(?s)(previous one stays in force.*){{{number}}}")
            server.stop()
            printed = server.stdout.text()
            log = server.stderr.text()
        assert any(of["jwks"] in fields.get("authorization", "") for fields in keys.seen)
    places = {
        "standard output": printed,
        "log": log,
        "audit log": audit.read_text(),
        "traces": "".join(file.read_text() for file in tmp_path.glob("trace*")),
        "answers": "\n".join(seen.texts),
        "help": run_triglot("serve", "--help", environment=environment).stdout,
        "wrong group": run_triglot("serve", environment=dict.fromkeys(environment, of["wrong"])).stderr,
    }
    leaks = {name: found for name, text in places.items() if (found := all_secrets.found_in(text))}
    assert leaks == {}
    assert all(places.values())
    assert "friend" in places["log"]
    assert "UNAUTHENTICATED" in places["audit log"]
    assert "identity_fp32" in places["traces"]
    assert seen.allowed > 50
    assert seen.refused > 500


async def _use(server: Triglot, all_secrets: Secrets, seen: Seen, grpc_transport: str) -> None:
    grpc_port, rest_port = server.ports()
    credentials = list(all_secrets.credentials())
    await over_grpc(grpc_port, credentials, seen)
    await over_http1(rest_port, credentials, seen)
    await malformed(rest_port, credentials, seen)
    if grpc_transport == "h2":
        await over_http2(grpc_port, credentials, seen)
    headers = {"x-api-key": all_secrets.of["token"], "key": all_secrets.of["rest group"]}
    async with aiohttp.ClientSession(f"http://{HOST}:{rest_port}", headers=headers) as session:
        for path in ("/metrics", "/grps/v1/monitor/overview", "/v2/logging", "/v2/trace/setting", "/openapi.json"):
            async with session.get(path) as answer:
                assert answer.status == 200, path
                seen.note(True, await answer.text(), answer.headers)
