"""No way around the access file: every row, with every kind of credential, over every transport, obeys it.

What a call has to end with is worked out here, from the file's text alone.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import time
import tomllib
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import jwt
import pytest
from yarl import URL

import triglot
from tests.access.access_files import anonymous, client, write
from tests.access.every_model_call import NAME, grpc_asks, rest_asks
from tests.access.signed_tokens import AUDIENCE, Signer, issuer, keyset
from tests.state_changes import REFUSED_ANYWAY, changing_server, path_of, rows_of
from tests.transports.h2_peers import Client, data, message, request_fields
from tests.transports.tls_server import HOST, Authority
from tests.waiting import until_found
from triglot.core.operation import Operation
from triglot.protocols.rows import Method, Route
from triglot.transports.http2.core import frames

ALLOWED, UNAUTHENTICATED, DENIED = "allowed", "unauthenticated", "denied"
WORDS = {
    "health": {"health"},
    "inspect": {
        *("metadata", "model-config", "model-index", "statistics", "metrics"),
        *("shared-memory-status", "trace-status", "log-status"),
    },
    "infer": {"infer"},
    "administer": {
        *("model-control", "shared-memory-control", "trace-settings", "log-settings", "grps-state"),
    },
}
"""What the words of the files below stand for."""
EVERYTHING = set().union(*WORDS.values())
OUTCOMES = {"401": UNAUTHENTICATED, "16": UNAUTHENTICATED, "403": DENIED, "7": DENIED}
"""By the status of HTTP or of gRPC."""
MACHINE = "machine@here"
"""In the certificate of a client that the file knows."""
SIGNER = Signer(algorithm="ES256")
EXPIRED = SIGNER.token(exp=int(time.time()) - 60)
UNNAMED, BY_ITS_PATH = "/grps/v1/monitor/model", "POST /v1/models/half"
"""Of the model without a name, which is as any other; and what TensorFlow Serving accepts from no client."""
OPTIONS: dict[str, Any] = {"monitoring_path": "/tf/metrics", "health_route": "/own/health", "cors": True}


@dataclass(frozen=True)
class Cell:
    """A call of a row; without a verb it is gRPC's. `of_models`: it is about models that have other names."""

    verb: str
    path: str
    operation: str
    body: bytes = b""
    of_models: bool = False

    def __str__(self) -> str:
        return f"{self.verb or 'gRPC'} {self.path} ({self.operation})"


@dataclass(frozen=True)
class Credential:
    """What a client sends. `certificate`: it has the one that the file knows."""

    name: str
    token: str | None = None
    certificate: bool = False


def cells(config: triglot.Config) -> list[Cell]:
    """One for each row that a server with this configuration has."""
    services, routes = rows_of(config)
    rpcs = [
        Cell("", f"/{service.name}/{method.name}", method.operation.value)
        for service in services
        for method in service.methods
    ]
    return rpcs + [
        Cell(route.verb.replace("*", "PUT"), path_of(route), route.operation.value, b"{}") for route in routes
    ]


def cells_of_models(config: triglot.Config) -> list[Cell]:
    """As `cells`, with requests that name a model where they can."""
    services, routes = rows_of(config)
    rpcs = [
        Cell("", ask.path, ask.method.operation.value, ask.request(NAME), ask.names or ask.of_all)
        for ask in grpc_asks(services)
    ]
    rest = [
        Cell(ask.verb, ask.target, ask.operation, ask.body, ask.names or ask.of_all or ask.target == UNNAMED)
        for ask in rest_asks(routes)
        if ask.operation and not (REFUSED_ANYWAY.search(ask.target) or f"{ask.verb} {ask.target}" == BY_ITS_PATH)
    ]
    return rpcs + rest


def credentials(operation: str) -> list[Credential]:
    """Those that a call for this operation is tried with."""
    return [
        Credential("none"),
        Credential("wrong", "wrong"),
        Credential("removed", "removed"),
        Credential("expired", EXPIRED),
        Credential("other group", f"all-but-{operation}"),
        Credential("right", "all"),
        Credential("signed", SIGNER.token()),
        Credential("certificate", certificate=True),
        Credential("certificate and wrong", "wrong", certificate=True),
    ]


OTHER_MODEL = Credential("other model", "other-model")


def access_text(keys: Path) -> str:
    """Who may do what: one client for everything, one for everything but each of the operations.

    Also one for everything with other models, and an issuer whose keys are in this file.
    """
    all_but = [
        client(f"all-but-{operation}", [f"all-but-{operation}"], sorted(EVERYTHING - {operation}))
        for operation in sorted(EVERYTHING)
    ]
    machine = '[client.machine]\ncertificates = ["machine@here"]\noperations = ["infer", "inspect"]\n'
    everything = [client("all", ["all"], list(WORDS)), issuer("signer", keys, operations=list(WORDS))]
    others = client("others", ["other-model"], list(WORDS), models='["other-*"]')
    return "\n".join([*everything, others, machine, *all_but, anonymous(["health"])])


class Oracle:
    """What the file says of a call."""

    def __init__(self, text: str) -> None:
        rules = tomllib.loads(text)
        self._clients = rules["client"].values()
        self._issuers = rules["issuer"].values()
        self._anonymous = self._operations(rules["anonymous"])

    def outcome(self, cell: Cell, sent: Credential) -> str:
        """What the call has to end with."""
        operation = cell.operation
        if operation == "public":
            return ALLOWED
        known: Mapping[str, Any] | None = None
        if sent.token is not None:
            known = self._issuer(sent.token) if "." in sent.token else self._client(sent.token)
            if known is None:
                return UNAUTHENTICATED
        elif sent.certificate:
            known = next(client for client in self._clients if MACHINE in client.get("certificates", ()))
        if operation in self._anonymous:
            return ALLOWED
        if known is not None and operation in self._operations(known):
            return DENIED if cell.of_models and "models" in known else ALLOWED
        return UNAUTHENTICATED if known is None else DENIED

    def _client(self, token: str) -> Mapping[str, Any] | None:
        digest = hashlib.sha256(token.encode()).hexdigest()
        return next((client for client in self._clients if digest in client.get("tokens_sha256", ())), None)

    def _issuer(self, token: str) -> Mapping[str, Any] | None:
        try:
            claims = jwt.decode(token, SIGNER.pem, [SIGNER.algorithm], audience=AUDIENCE, leeway=30)
        except jwt.InvalidTokenError:
            return None
        known: Mapping[str, Any] = next(issuer for issuer in self._issuers if issuer["issuer"] == claims["iss"])
        return known

    def _operations(self, grant: Mapping[str, Any]) -> set[str]:
        return set().union(*(WORDS.get(word, {word}) for word in grant["operations"]))


def outcome_of(status: str, body: bytes) -> str:
    """How a call has ended. Some answers contain errors themselves: those of grps, and those of streams."""
    if b"may not use model" in body or b"may use some models only" in body:
        return DENIED
    return OUTCOMES.get(status, ALLOWED)


class Connection(Protocol):
    """A connection of one client by one transport."""

    def takes(self, cell: Cell) -> bool:
        """Whether it carries such calls."""

    async def outcome(self, cell: Cell, headers: Mapping[str, str]) -> str:
        """How the call has ended."""


class Http1Connection:
    """One connection of HTTP/1.1."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session, self.url = session, url

    def takes(self, cell: Cell) -> bool:
        return bool(cell.verb)

    async def outcome(self, cell: Cell, headers: Mapping[str, str]) -> str:
        url = URL(self.url + cell.path, encoded=True)
        sent = {"content-type": "application/json", **headers}
        async with self.session.request(cell.verb, url, data=cell.body, headers=sent) as answer:
            return outcome_of(str(answer.status), await answer.read())


class H2Connection:
    """One connection of HTTP/2, for gRPC or for REST."""

    def __init__(self, connection: Client, *, is_grpc: bool) -> None:
        self.connection = connection
        self._is_grpc = is_grpc
        self._stream = -1

    def takes(self, cell: Cell) -> bool:
        return self._is_grpc is not bool(cell.verb)

    async def outcome(self, cell: Cell, headers: Mapping[str, str]) -> str:
        self._stream = stream = self._stream + 2
        fields = [(":authority", "localhost"), *request_fields(cell.path)]
        if not self._is_grpc:
            fields = [(":method", cell.verb), (":scheme", "https"), (":path", cell.path)]
            fields.append(("content-type", "application/json"))
        head = self.connection.raw_headers(stream, [*fields, *headers.items()])
        await self.connection.send(head, data(stream, message(cell.body) if self._is_grpc else cell.body))
        return outcome_of(*await self._answer(stream))

    async def _answer(self, stream: int) -> tuple[str, bytes]:
        """The status and the body that it ends with, or begins: some never end."""
        connection = self.connection
        status, body = "", b""
        while True:
            got = await connection.next(frames.HEADERS, frames.DATA, frames.RST_STREAM)
            head = connection.fields(got.payload) if got.kind == frames.HEADERS else {}
            if got.kind == frames.DATA and got.payload:
                await connection.send(frames.window_update(0, len(got.payload)))
            if got.stream == stream:
                status = head.get("grpc-status") or head.get(":status") or status
                assert status, f"{got} and no answer"
                if got.kind == frames.DATA:
                    body += got.payload
                if got.kind == frames.DATA and self._is_grpc:
                    await connection.send(frames.rst_stream(stream, frames.ErrorCode.CANCEL))
                    return status, body
                if got.kind == frames.RST_STREAM or got.flags & frames.END_STREAM:
                    return status, body


@asynccontextmanager
async def connections(
    server: triglot.Server, authority: Authority, name: str | None
) -> AsyncIterator[dict[str, Connection]]:
    """One connection by each transport of a client whose certificate has this name, or that has none."""
    context, by_h2 = authority.client(), authority.client("h2")
    if name is not None:
        issued = authority.ca.issue_cert(name)
        for target in (context, by_h2):
            issued.configure_cert(target)
    async with AsyncExitStack() as stack:
        session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=context, limit=1))
        await stack.enter_async_context(session)
        found: dict[str, Connection] = {"HTTP/1.1": Http1Connection(session, f"https://{HOST}:{server.rest_port}")}
        for kind in ("gRPC", "HTTP/2") if server.config.grpc_transport == "h2" else ("gRPC",):
            connection = Client(*await asyncio.open_connection(HOST, server.grpc_port, ssl=by_h2))
            stack.callback(connection.writer.transport.abort)
            await connection.greet(initial_window_size=2**24)
            found[kind] = H2Connection(connection, is_grpc=kind == "gRPC")
        yield found


async def differing(server: triglot.Server, oracle: Oracle, authority: Authority) -> tuple[int, list[str]]:
    """How many cells there were, and those that are not as the file says."""
    count, wrong = 0, list[str]()
    stranger = None if server.config.client_auth == "optional" else "stranger@here"
    async with (
        connections(server, authority, MACHINE) as machines,
        connections(server, authority, stranger) as strangers,
    ):
        await until_found(
            lambda: strangers["HTTP/1.1"].outcome(Cell("GET", "/v2", "metadata"), bearer("removed")),
            lambda outcome: outcome == UNAUTHENTICATED,
        )
        tried = [(cell, credential) for cell in cells(server.config) for credential in credentials(cell.operation)]
        # First, as the others may unload the model.
        for cell, credential in [*((cell, OTHER_MODEL) for cell in cells_of_models(server.config)), *tried]:
            expected = oracle.outcome(cell, credential)
            for name, connection in (machines if credential.certificate else strangers).items():
                if connection.takes(cell):
                    count += 1
                    got = await connection.outcome(cell, bearer(credential.token))
                    if got != expected:
                        wrong.append(f"{cell} over {name}, {credential.name}: {got}, expected {expected}")
    return count, wrong


def bearer(token: str | None) -> dict[str, str]:
    """The header fields with the token."""
    return {} if token is None else {"authorization": f"Bearer {token}"}


@pytest.mark.parametrize(("grpc_transport", "http_transport"), [("h2", "h1"), ("aio", "aiohttp")])
async def test_every_cell_is_what_the_file_says(tmp_path: Path, grpc_transport: str, http_transport: str) -> None:
    (tmp_path / "keys.json").write_bytes(keyset(SIGNER))
    text = access_text(tmp_path / "keys.json")
    file = write(tmp_path / "access.toml", text, client("removed", ["removed"], list(WORDS)))
    authority = Authority(tmp_path)
    options = OPTIONS | {"grpc_transport": grpc_transport, "http_transport": http_transport}
    options |= {"tls_client_auth": "optional" if grpc_transport == "h2" else "required"}
    async with changing_server(tmp_path, access=str(file), **options, **authority.server(mutual=True)) as here:
        write(file, text)
        count, wrong = await differing(here.server, Oracle(text), authority)
    assert not wrong, f"{len(wrong)} of {count} cells:\n" + "\n".join(wrong[:40])
    assert count > 1000


async def test_who_only_looks_changes_nothing(tmp_path: Path) -> None:
    looks = client("looks", ["looks"], ["health", "inspect"])
    file = write(tmp_path / "access.toml", looks, anonymous(["health", "inspect"]))
    async with changing_server(tmp_path, access=str(file), **OPTIONS) as here:
        before = await here.state()
        for change in here.changes:
            for headers in ({}, bearer("looks")):
                url = URL(here.url + change.path, encoded=True)
                async with here.session.request(change.verb, url, data=change.body, headers=headers) as answer:
                    assert answer.status == (403 if headers else 401), str(change)
        assert await here.state() == before


async def test_every_row_is_for_something() -> None:
    found = {cell.operation for cell in cells(triglot.Config(**OPTIONS))}
    assert found == EVERYTHING | {"public"} == {operation.value for operation in Operation}


def test_a_row_has_to_say_what_it_is_for() -> None:
    for row in (Method, Route):
        given = inspect.signature(row).parameters["operation"]
        assert given.default is inspect.Parameter.empty
