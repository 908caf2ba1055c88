"""Makes the calls of a soak: good and bad ones over all protocols, on kept and on new connections."""

import asyncio
import hashlib
import json
import socket
import struct
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import aiohttp
import grpc
import grpc.aio
import jwt
import numpy as np
from cryptography.hazmat.primitives.asymmetric import rsa

from bench import h2frames, payloads
from bench.h2client import headers_of
from bench.headers import Metadata
from bench.payloads import GRPC_PATH, STREAM_PATH, Exchange, Floats
from bench.tally import BenchError
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb

LIMIT = 60.0
"""Deadline of each call in seconds."""
FRIEND, NARROW, LIMITED = "friend", "narrow", "limited"
"""Clients, whose tokens are their names: with all rights, with one model, and with a rate that it exceeds."""
IDENTITY, TOKENS, WAITS, RELOADED = "identity_fp32", "tokens", "waits", "reloaded"
CHANNELS = 4
SERVICE = "/inference.GRPCInferenceService/"
HEAD = """
import asyncio
import triglot

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1])]
"""
MODELS = {
    WAITS: """
    async def infer(self, inputs):
        await asyncio.Event().wait()  # Until its caller leaves.
""",
    RELOADED: """
    def infer(self, inputs):
        return {"y": inputs["x"]}
""",
}
UNAUTHENTICATED, DENIED = grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED
INVALID, NOT_FOUND = grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND


class NotRefused(Exception):
    """A bad call ended otherwise than expected."""


class Issuer:
    """Signs JWTs, and writes the JWKS file with its public key."""

    def __init__(self, folder: Path) -> None:
        self._key = rsa.generate_private_key(65537, 2048)
        algorithm = jwt.algorithms.RSAAlgorithm(jwt.algorithms.RSAAlgorithm.SHA256)
        key = algorithm.to_jwk(self._key.public_key(), as_dict=True) | {
            "kid": "bench",
            "use": "sig",
            "alg": "RS256",
        }
        self.file = folder / "jwks.json"
        self.file.write_text(json.dumps({"keys": [key]}))

    def token(self, subject: str = "client") -> str:
        """Return a JWT that is valid for an hour."""
        claims = {"iss": "bench", "aud": "triglot", "sub": subject, "exp": int(time.time()) + 3600}
        return jwt.encode(claims, self._key, "RS256", headers={"kid": "bench"})


def access_tables(issuer: Issuer) -> str:
    """Return the access file."""

    def client(name: str, more: str = "") -> str:
        digest = hashlib.sha256(name.encode()).hexdigest()
        return f'[client.{name}]\ntokens_sha256 = ["{digest}"]\n{more}'

    return f"""
{client(FRIEND)}operations = ["infer", "inspect", "administer"]
{client(NARROW)}operations = ["infer"]
models = ["tokens"]
{client(LIMITED)}operations = ["infer"]
rate = 1
[issuer.bench]
issuer = "bench"
audience = "triglot"
jwks = "{issuer.file}"
operations = ["infer"]
[anonymous]
operations = ["health"]
"""


def write_models(folder: Path) -> None:
    """Write the models that the bench does not have already."""
    for name, code in MODELS.items():
        (folder / name).mkdir()
        (folder / name / "model.py").write_text(HEAD + code)


class Calls:
    """Makes calls of all kinds to one server. Each raises an exception unless it ends as expected."""

    def __init__(self, grpc_port: int, rest_port: int, models: Path, issuer: Issuer) -> None:
        self._grpc_port, self._rest_port = grpc_port, rest_port
        self._url = f"http://127.0.0.1:{rest_port}"
        self._models, self._issuer = models, issuer
        self._random = Random(1)
        self._numbers = np.random.default_rng(1)
        self._loads = 0
        self._loading = asyncio.Lock()
        self._channels: Sequence[grpc.aio.Channel] = ()
        self._session: aiohttp.ClientSession
        self._stream: Any = None
        self._streaming = asyncio.Lock()

    @asynccontextmanager
    async def connected(self) -> AsyncIterator["Calls"]:
        """Keep `CHANNELS` gRPC connections and REST connections open during the block."""
        async with AsyncExitStack() as ends:
            self._session = await ends.enter_async_context(aiohttp.ClientSession())
            self._channels = [await ends.enter_async_context(self._new_channel()) for _ in range(CHANNELS)]
            yield self
            if self._stream is not None:
                self._stream.cancel()

    @property
    def _channel(self) -> grpc.aio.Channel:
        """Any of the kept ones."""
        return self._random.choice(self._channels)

    # --- good calls ---

    async def unary(self) -> None:
        """Call over gRPC in any protocol, on the kept connection."""
        await self._exchange(self._channel, self._any_unary())

    async def unary_anew(self) -> None:
        """Call over gRPC on a new connection."""
        async with self._new_channel() as channel:
            await self._exchange(channel, self._any_unary())

    async def unary_large(self) -> None:
        """Call over gRPC or REST with up to 256 KiB."""
        if self._random.random() < 0.5:
            await self._exchange(self._channel, self._any_unary(rows=4096))
        else:
            await self._post(self._session, self._any_rest(rows=4096))

    async def unary_signed(self) -> None:
        """Call with a JSON Web Token of a user who has hardly called before."""
        token = self._issuer.token(f"user-{self._random.randrange(10**6)}")
        await self._exchange(self._channel, self._any_unary(), token)

    async def stream(self) -> None:
        """Call five times on a new ModelStreamInfer stream, on the kept connection."""
        call: Any = self._channel.stream_stream(STREAM_PATH)(metadata=_metadata(FRIEND), timeout=LIMIT)
        for _ in range(5):
            await self._streamed(call)
        await call.done_writing()
        if (code := await call.code()) is not grpc.StatusCode.OK:
            raise BenchError(f"the stream ended with {code}")

    async def stream_kept(self) -> None:
        """Call on a ModelStreamInfer stream that stays open."""
        async with self._streaming:
            if self._stream is None:
                self._stream = self._channel.stream_stream(STREAM_PATH)(metadata=_metadata(FRIEND))
            try:
                await self._streamed(self._stream)
            except BaseException:
                self._stream = None
                raise

    async def many_messages(self) -> None:
        """Read a stream of 1,000 messages over grps."""
        exchange = payloads.grps_stream_exchange(TOKENS, self._values())
        call: Any = self._channel.unary_stream(exchange.path)(
            exchange.body, metadata=_metadata(FRIEND), timeout=LIMIT
        )
        exchange.check({}, payloads.framed([message async for message in call]))

    async def rest(self) -> None:
        """Call over REST in any protocol, on a kept connection."""
        await self._post(self._session, self._any_rest())

    async def rest_anew(self) -> None:
        """Call over REST on a new connection."""
        async with aiohttp.ClientSession() as session:
            await self._post(session, self._any_rest())

    async def inspect(self) -> None:
        """Read metrics, statistics, metadata or an index."""
        paths = ("/metrics", "/v2/models/stats", f"/v2/models/{IDENTITY}", f"/v1/models/{IDENTITY}", "/v2")
        await self._get(self._random.choice(paths), FRIEND)

    async def inspect_grpc(self) -> None:
        """Read metadata over gRPC."""
        request = pb.ModelMetadataRequest(name=IDENTITY).SerializeToString()
        await self._unary(self._channel, f"{SERVICE}ModelMetadata", request, FRIEND)

    async def health(self) -> None:
        """Ask whether the server is ready, without credentials, as a probe: each time on a new connection."""
        if self._random.random() < 0.5:
            async with aiohttp.ClientSession() as session:
                await self._get("/v2/health/ready", "", session)
            return
        async with self._new_channel() as channel:
            await self._unary(channel, "/grpc.health.v1.Health/Check", b"", "")

    async def load(self) -> None:
        """Load a changed model, call it, and unload it."""
        async with self._loading:
            self._loads += 1
            code = f"{HEAD}{MODELS[RELOADED]}\nLOADED = {self._loads}\n"
            (self._models / RELOADED / "model.py").write_text(code)  # Without a change, nothing would be loaded.
            load = pb.RepositoryModelLoadRequest(model_name=RELOADED).SerializeToString()
            await self._unary(self._channel, f"{SERVICE}RepositoryModelLoad", load, FRIEND)
            await self._exchange(self._channel, payloads.grpc_exchange(RELOADED, self._values(), self._id()))
            await self._post(self._session, payloads.json_exchange(RELOADED, self._values(), self._id()))
            if self._loads % 2:
                unload = pb.RepositoryModelUnloadRequest(model_name=RELOADED).SerializeToString()
                await self._unary(self._channel, f"{SERVICE}RepositoryModelUnload", unload, FRIEND)

    # --- bad calls ---

    async def wrong_token(self) -> None:
        """Call with an unknown token, with one of another model, or with none."""
        exchange = self._any_unary()
        token, code = self._random.choice(
            ((self._text(), UNAUTHENTICATED), ("", UNAUTHENTICATED), (NARROW, DENIED))
        )
        await self._refused(self._channel, exchange.path, exchange.body, token, code)

    async def wrong_token_anew(self) -> None:
        """Call with an unknown token, on a new connection."""
        exchange = self._any_unary()
        async with self._new_channel() as channel:
            await self._refused(channel, exchange.path, exchange.body, self._text(), UNAUTHENTICATED)

    async def wrong_token_rest(self) -> None:
        """Call over REST with an unknown token, or with one of another model."""
        token, status = self._random.choice(((self._text(), 401), ("", 401), (NARROW, 403)))
        exchange = self._any_rest()
        await self._rest_refused(self._session, exchange, token, status)

    async def wrong_token_rest_anew(self) -> None:
        """Call over REST with an unknown token, on a new connection."""
        exchange = self._any_rest()
        async with aiohttp.ClientSession() as session:
            await self._rest_refused(session, exchange, self._text(), 401)

    async def unknown_model(self) -> None:
        """Call a model that does not exist, each time another one."""
        body = payloads.infer_request(self._text(), self._values()).SerializeToString()
        await self._refused(self._channel, GRPC_PATH, body, FRIEND, NOT_FOUND)

    async def unknown_model_rest(self) -> None:
        """Call a model that does not exist over REST."""
        exchange = payloads.json_exchange(self._text(), self._values())
        await self._rest_refused(self._session, exchange, FRIEND, 404)

    async def malformed(self) -> None:
        """Send bytes that are no message."""
        path = self._random.choice((GRPC_PATH, payloads.PREDICT_PATH))
        body = b"\xff" + self._random.randbytes(self._random.randrange(400))
        await self._refused(self._channel, path, body, FRIEND, INVALID)

    async def malformed_rest(self) -> None:
        """Send invalid JSON, or JSON that ends too early."""
        exchange = self._any_json()
        body = self._random.choice((self._text().encode(), exchange.body[: len(exchange.body) // 2]))
        await self._rest_refused(self._session, replace(exchange, body=body), FRIEND, 400)

    async def wrong_shape(self) -> None:
        """Send fewer values than the shape has."""
        request = payloads.infer_request(IDENTITY, self._values())
        request.inputs[0].shape[1] += 1
        await self._refused(self._channel, GRPC_PATH, request.SerializeToString(), FRIEND, INVALID)

    async def wrong_shape_rest(self) -> None:
        """Send a name, a datatype, or a shape that the model does not have."""
        x = {"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}
        wrong = self._random.choice(({"name": self._text()}, {"datatype": "INT8"}, {"shape": [1, 3]}))
        body = json.dumps({"inputs": [x | wrong]}).encode()
        exchange = payloads.json_exchange(IDENTITY, self._values())
        await self._rest_refused(self._session, replace(exchange, body=body), FRIEND, 400)

    async def no_such_row(self) -> None:
        """Call methods and routes that do not exist."""
        if self._random.random() < 0.5:
            await self._refused(
                self._channel, f"/{self._text()}/Method", b"", FRIEND, grpc.StatusCode.UNIMPLEMENTED
            )
        else:
            exchange = replace(self._any_rest(), path=f"/v9/{self._text()}")
            await self._rest_refused(self._session, exchange, FRIEND, 404)

    async def head_refused(self) -> None:
        """Call a route with another verb, or with a header field that is too long."""
        verb, headers, status = self._random.choice(
            (("DELETE", {}, 405), ("GET", {}, 405), ("POST", {"x-field": self._id() * 5000}, 431))
        )
        url = f"{self._url}/v2/models/{IDENTITY}/infer"
        async with asyncio.timeout(LIMIT), self._session.request(verb, url, headers=headers) as answer:
            text = await answer.text()
        if answer.status != status:
            raise NotRefused(f"{verb} {url}: expected {status}, got {answer.status} {text[:300]}")

    async def too_often(self) -> None:
        """Call more often than the client's rate, which lets some calls pass."""
        exchange = self._any_unary()
        codes = grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.OK
        await self._refused(self._channel, exchange.path, exchange.body, LIMITED, *codes)

    async def load_refused(self) -> None:
        """Load a model without the right, or one that does not exist."""
        load = pb.RepositoryModelLoadRequest(model_name=self._text()).SerializeToString()
        token, code = self._random.choice(((LIMITED, DENIED), (FRIEND, grpc.StatusCode.INTERNAL)))
        await self._refused(self._channel, f"{SERVICE}RepositoryModelLoad", load, token, code)

    async def deadline(self) -> None:
        """Call a model that never answers, with a short deadline."""
        body = payloads.infer_request(WAITS, self._values()).SerializeToString()
        code = grpc.StatusCode.DEADLINE_EXCEEDED
        await self._refused(self._channel, GRPC_PATH, body, FRIEND, code, timeout=0.05)

    async def cancelled(self) -> None:
        """Cancel a call of a model that never answers."""
        body = payloads.infer_request(WAITS, self._values()).SerializeToString()
        call = self._channel.unary_unary(GRPC_PATH)(body, metadata=_metadata(FRIEND))
        await asyncio.sleep(0.02)  # The call may be at any stage by then, on purpose.
        call.cancel()
        with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
            await call

    async def stream_cut(self) -> None:
        """Leave a stream of 1,000 messages after some of them."""
        exchange = payloads.grps_stream_exchange(TOKENS, self._values())
        call: Any = self._channel.unary_stream(exchange.path)(exchange.body, metadata=_metadata(FRIEND))
        for _ in range(self._random.randrange(20)):
            await call.read()
        call.cancel()

    async def cut_rest(self) -> None:
        """Send a part of a request over HTTP/1.1, and reset the connection."""
        exchange = self._any_rest()
        head = f"POST {exchange.path} HTTP/1.1\r\nhost: x\r\nx-api-key: {FRIEND}\r\ncontent-length: 9999\r\n\r\n"
        sent = head.encode() + exchange.body
        await self._cut(self._rest_port, sent[: self._random.randrange(len(sent))])

    async def cut_grpc(self) -> None:
        """Send a part of a request over HTTP/2, and reset the connection, amid a frame mostly."""
        metadata = Metadata([(b"x-api-key", FRIEND.encode())])
        block = headers_of(self._grpc_port, GRPC_PATH).block(metadata=metadata)
        body = payloads.framed([payloads.infer_request(WAITS, self._values()).SerializeToString()])
        sent = (
            h2frames.PREFACE
            + h2frames.settings()
            + h2frames.frame(h2frames.HEADERS, h2frames.END_HEADERS, 1, block)
            + h2frames.frame(h2frames.DATA, h2frames.END_STREAM, 1, body)
        )
        await self._cut(self._grpc_port, sent[: self._random.randrange(len(sent) + 1)])

    async def garbage(self) -> None:
        """Send bytes of no protocol, or none, and leave."""
        port = self._random.choice((self._grpc_port, self._rest_port))
        await self._cut(port, self._random.randbytes(self._random.randrange(2000)), reset=False)

    # --- parts ---

    def _new_channel(self) -> grpc.aio.Channel:
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.enable_retries", 0)]
        return grpc.aio.insecure_channel(f"127.0.0.1:{self._grpc_port}", options=options)

    def _values(self, rows: int = 8) -> Floats:
        """Return values that JSON keeps, of up to this many rows."""
        shape = self._random.randint(1, rows), 16
        return (self._numbers.integers(1, 1000, shape) + 0.5).astype(np.float32)

    def _text(self) -> str:
        return self._random.randbytes(self._random.randint(4, 60)).hex()

    def _id(self) -> str:
        return self._random.randbytes(8).hex()

    def _any_unary(self, rows: int = 8) -> Exchange:
        makings = (
            payloads.grpc_exchange,
            payloads.contents_exchange,
            payloads.predict_content_exchange,
            payloads.predict_values_exchange,
            payloads.grps_exchange,
        )
        return self._random.choice(makings)(IDENTITY, self._values(rows), self._id())

    def _any_json(self, rows: int = 8) -> Exchange:
        makings = payloads.json_exchange, payloads.predict_json_exchange
        return self._random.choice(makings)(IDENTITY, self._values(rows), self._id())

    def _any_rest(self, rows: int = 8) -> Exchange:
        if self._random.random() < 0.6:
            return self._any_json(rows)
        making = self._random.choice((payloads.binary_exchange, payloads.grps_json_exchange))
        return making(IDENTITY, self._values(rows), self._id())

    async def _unary(
        self, channel: grpc.aio.Channel, path: str, body: bytes, token: str, timeout: float = LIMIT
    ) -> bytes:
        return bytes(await channel.unary_unary(path)(body, metadata=_metadata(token), timeout=timeout))

    async def _exchange(self, channel: grpc.aio.Channel, exchange: Exchange, token: str = FRIEND) -> None:
        exchange.check({}, await self._unary(channel, exchange.path, exchange.body, token))

    async def _streamed(self, call: Any) -> None:
        exchange = payloads.stream_exchange(IDENTITY, self._values(), self._id())
        async with asyncio.timeout(LIMIT):
            await call.write(exchange.body)
            reply = await call.read()
        if reply is grpc.aio.EOF:
            raise BenchError(f"the stream ended with {await call.code()}: {await call.details()}")
        exchange.check({}, reply)

    async def _refused(
        self,
        channel: grpc.aio.Channel,
        path: str,
        body: bytes,
        token: str,
        *codes: grpc.StatusCode,
        timeout: float = LIMIT,
    ) -> None:
        code, details = grpc.StatusCode.OK, ""
        try:
            reply = await self._unary(channel, path, body, token, timeout)
        except grpc.aio.AioRpcError as error:
            code, details = error.code(), error.details() or ""
        else:
            if path == payloads.GRPS_PATH:  # Its errors about models are in the message.
                status = grps_pb2.GrpsMessage.FromString(reply).status
                code, details = DENIED if status.code == 403 else code, status.msg
        if code not in codes:
            raise NotRefused(f"{path}: expected {codes[0].name}, got {code.name} {details}")

    async def _post(self, session: aiohttp.ClientSession, exchange: Exchange, token: str = FRIEND) -> None:
        headers = exchange.headers | {"x-api-key": token}
        async with asyncio.timeout(LIMIT):
            async with session.post(self._url + exchange.path, data=exchange.body, headers=headers) as answer:
                body = await answer.read()
                if answer.status != 200:
                    raise BenchError(f"{exchange.path}: {answer.status} {body[:300]!r}")
                exchange.check({name.lower(): value for name, value in answer.headers.items()}, body)

    async def _get(self, path: str, token: str, session: aiohttp.ClientSession | None = None) -> None:
        headers = {"x-api-key": token} if token else {}
        async with asyncio.timeout(LIMIT):
            async with (session or self._session).get(self._url + path, headers=headers) as answer:
                body = await answer.read()
                if answer.status != 200:
                    raise BenchError(f"{path}: {answer.status} {body[:300]!r}")

    async def _rest_refused(
        self, session: aiohttp.ClientSession, exchange: Exchange, token: str, status: int
    ) -> None:
        headers = exchange.headers | ({"x-api-key": token} if token else {})
        async with asyncio.timeout(LIMIT):
            async with session.post(self._url + exchange.path, data=exchange.body, headers=headers) as answer:
                text = await answer.text()
        if answer.status != status:
            raise NotRefused(f"{exchange.path}: expected {status}, got {answer.status} {text[:300]}")

    async def _cut(self, port: int, sent: bytes, *, reset: bool = True) -> None:
        async with asyncio.timeout(LIMIT):
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(sent)
            await asyncio.sleep(self._random.choice((0, 0.05)))  # Before or after the server has read it.
            if reset:
                linger = struct.pack("ii", 1, 0)
                writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                writer.transport.abort()
            else:
                writer.close()
            with suppress(OSError):
                await writer.wait_closed()


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of call, and how often it is made in proportion to others."""

    make: Callable[[Calls], Awaitable[None]]
    weight: float
    good: bool = True


GOOD = (
    Kind(Calls.unary, 16),
    Kind(Calls.unary_anew, 4),
    Kind(Calls.unary_large, 0.5),
    Kind(Calls.unary_signed, 8),  # So often that the cache of verified tokens is full long before the last hour.
    Kind(Calls.stream, 3),
    Kind(Calls.stream_kept, 4),
    Kind(Calls.many_messages, 0.1),
    Kind(Calls.rest, 12),
    Kind(Calls.rest_anew, 4),
    Kind(Calls.inspect, 1),
    Kind(Calls.inspect_grpc, 1),
    Kind(Calls.health, 1),
    Kind(Calls.load, 0.03),
)
BAD = tuple(
    Kind(make, weight, good=False)
    for make, weight in (
        (Calls.wrong_token, 4.0),
        (Calls.wrong_token_anew, 2),
        (Calls.wrong_token_rest, 5),
        (Calls.wrong_token_rest_anew, 3),
        (Calls.unknown_model, 3),
        (Calls.unknown_model_rest, 3),
        (Calls.malformed, 3),
        (Calls.malformed_rest, 4),
        (Calls.wrong_shape, 2),
        (Calls.wrong_shape_rest, 3),
        (Calls.no_such_row, 2),
        (Calls.head_refused, 2),
        (Calls.too_often, 2),
        (Calls.load_refused, 0.5),
        (Calls.deadline, 2),
        (Calls.cancelled, 2),
        (Calls.stream_cut, 0.3),
        (Calls.cut_rest, 3),
        (Calls.cut_grpc, 3),
        (Calls.garbage, 2),
    )
)
KINDS: Sequence[Kind] = (*GOOD, *BAD)


def _metadata(token: str) -> tuple[tuple[str, str], ...]:
    return (("x-api-key", token),) if token else ()
