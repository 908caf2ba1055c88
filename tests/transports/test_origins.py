"""What web pages of other origins may do, over HTTP/1.1 and HTTP/2: nothing that changes the server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

import triglot
from tests.scheduling.scripted_models import Inputs, Plain
from tests.state_changes import ChangingServer, changing_server
from tests.transports.h2_peers import Client, data, greeting
from tests.transports.live import live
from tests.transports.test_h2_rest import answer
from triglot.core.operation import ADMINISTRATION, Operation

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]
HOST = "127.0.0.1"
EVIL = "http://evil.example"
JSON = {"content-type": "application/json"}
IMAGE = {"sec-fetch-mode": "no-cors", "sec-fetch-dest": "image"}
BROWSERS: dict[str, tuple[dict[str, str], str]] = {
    "another site": ({"origin": EVIL, "sec-fetch-site": "cross-site"}, "--allowed-origins"),
    "another port": ({"origin": f"http://{HOST}:1", "sec-fetch-site": "same-site"}, "--allowed-origins"),
    "a browser without Sec-Fetch-Site": ({"origin": EVIL}, "--allowed-origins"),
    "a page without an origin": ({"origin": "null"}, "--allowed-origins"),
    "an image": ({"sec-fetch-site": "cross-site", **IMAGE}, "--allowed-origins"),
    "a text/plain form": ({"origin": EVIL, "content-type": "text/plain"}, "--allowed-origins"),
    "a name that leads here": ({"host": "evil.example", "origin": EVIL}, "--allowed-hosts"),
    "a name that leads here, read only": ({"host": "evil.example:8000"}, "--allowed-hosts"),
}
"""What they send, and the option that their refusal names."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def here(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[ChangingServer]:
    async with changing_server(tmp_path_factory.mktemp("server")) as here:
        yield here


class Http1:
    def __init__(self, here: ChangingServer) -> None:
        self.here = here

    async def send(self, verb: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
        """The status, and the text; without one for HEAD."""
        async with self.here.session.request(verb, self.here.url + path, data=body, headers=headers) as got:
            return got.status, await got.text()


class Http2:
    def __init__(self, client: Client) -> None:
        self.client = client
        self.stream = -1

    async def send(self, verb: str, path: str, body: bytes, headers: Mapping[str, str]) -> tuple[int, str]:
        """As over HTTP/1.1."""
        self.stream += 2
        others = {name: value for name, value in headers.items() if name != "host"}
        fields = [(":method", verb), (":scheme", "http"), (":path", path)]
        fields += [(":authority", headers.get("host", HOST)), *others.items()]
        await self.client.send(self.client.raw_headers(self.stream, fields), data(self.stream, body))
        head, text = await answer(self.client, self.stream)
        return int(head[":status"]), text.decode()


@asynccontextmanager
async def sender(here: ChangingServer, version: str) -> AsyncIterator[Http1 | Http2]:
    if version == "HTTP/1.1":
        yield Http1(here)
        return
    client = Client(*await asyncio.open_connection(HOST, here.server.grpc_port))
    await client.send(greeting())
    yield Http2(client)
    await client.close()


both_versions = pytest.mark.parametrize("version", ["HTTP/1.1", "HTTP/2"])


@both_versions
@pytest.mark.parametrize("browser", BROWSERS)
async def test_no_page_of_another_origin_changes_anything(
    here: ChangingServer, version: str, browser: str
) -> None:
    headers, option = BROWSERS[browser]
    before = await here.state()
    async with sender(here, version) as client:
        for change in here.changes:
            status, text = await client.send(change.verb, change.path, change.body, JSON | headers)
            assert status == 403, (str(change), text)
            by_get = change.verb in ("GET", "HEAD") and change.operation in ADMINISTRATION
            wanted = "use POST" if by_get and option == "--allowed-origins" else option
            assert change.verb == "HEAD" or wanted in text, (str(change), text)
    assert await here.state() == before
    assert before["/v2/models/half/ready"][0] == before["/grps/v1/health/ready"][0] == 200


async def test_the_rows_have_all_that_clients_may_change(here: ChangingServer) -> None:
    changes = [str(change) for change in here.changes if change.operation in ADMINISTRATION and change.takes]
    assert set(changes) == {
        "POST /v2/repository/models/half/load",
        "POST /v2/repository/models/half/unload",
        "POST /v2/logging",
        "POST /v2/models/half/traffic",
        "POST /v2/trace/setting",
        "POST /v2/models/half/trace/setting",
        "POST /v2/models/half/versions/1/trace/setting",
        "POST /v2/systemsharedmemory/region/r/register",
        "POST /v2/systemsharedmemory/region/r/unregister",
        "POST /v2/systemsharedmemory/unregister",
        *(f"{verb} /grps/v1/health/{what}" for verb in ("GET", "HEAD", "POST") for what in ("online", "offline")),
    }
    assert sum(change.operation is Operation.INFER for change in here.changes) > len(set(changes))


@both_versions
@pytest.mark.parametrize("own", [False, True], ids=["no browser", "a page of its own"])
async def test_others_do_as_before(tmp_path: Path, version: str, own: bool) -> None:
    async with changing_server(tmp_path) as here, sender(here, version) as client:
        port = here.server.rest_port
        origin = {"host": f"localhost:{port}", "origin": f"http://localhost:{port}"}
        browser = {**origin, "sec-fetch-site": "same-origin", "user-agent": "Mozilla/5.0"} if own else {}
        inferring = [change for change in here.changes if change.operation is Operation.INFER]
        for change in [*inferring, *(change for change in here.changes if change not in inferring)]:
            if not change.takes or change.path.endswith("/offline") or "/unload" in change.path:
                continue
            status, text = await client.send(change.verb, change.path, change.body, JSON | browser)
            by_get = change.verb in ("GET", "HEAD") and change.operation in ADMINISTRATION
            assert status == (403 if own and by_get else 200), (str(change), text)
        state = await here.state()
        assert '"log_info":false' in state["/v2/logging"][1]
        for path in ("/grps/v1/health/offline", "/v2/repository/models/half/unload"):
            assert (await client.send("POST", path, b"{}", JSON | browser))[0] == 200
        state = await here.state()
        assert state["/grps/v1/health/ready"][0] != 200
        assert state["/v2/models/half/ready"][0] != 200


async def test_stock_client_may_change_state_by_get_and_a_browser_may_not(here: ChangingServer) -> None:
    before = await here.state()
    for headers in (
        {
            "user-agent": "Mozilla/5.0 (X11; Linux x86_64)"
        },  # Without TLS, and away from loopback: no more than that.
        {"sec-fetch-site": "none", "sec-fetch-mode": "navigate"},
        {"sec-fetch-site": "same-origin", **IMAGE},
    ):
        status, text = await Http1(here).send("GET", "/grps/v1/health/offline", b"", headers)
        assert (status, "use POST" in text) == (403, True)
    assert await here.state() == before


# --- Host ---


@pytest.mark.parametrize(
    ("name", "taken"),
    [
        *[
            (name, True)
            for name in ("localhost", "LOCALHOST", "localhost.", "app.localhost", "127.8.9.1", "[::1]")
        ],
        *[(name, True) for name in ("10.0.0.1", "[fe80::1]", "")],
        *[(name, False) for name in ("evil.example", "here", "localhost.evil.example", "127.0.0.1.evil.example")],
        *[(name, False) for name in ("notlocalhost", "[evil]", "a@localhost")],
    ],
)
@both_versions
async def test_names_on_loopback(here: ChangingServer, version: str, name: str, taken: bool) -> None:
    async with sender(here, version) as client:
        for port in ("", ":8000"):
            if name or not port:
                status, text = await client.send("GET", "/v2", b"", {"host": name + port})
                assert (status, "--allowed-hosts" in text) == ((200, False) if taken else (403, True))


def same(inputs: Inputs) -> dict[str, Any]:
    return {"y": inputs["x"]}


@asynccontextmanager
async def asking(**options: Any) -> AsyncIterator[Any]:
    async with live({"same": Plain(same)}, **options) as server:

        async def ask(path: str, headers: Mapping[str, str], verb: str = "GET", body: bytes = b"") -> Any:
            url = f"http://{HOST}:{server.server.rest_port}{path}"
            async with server.session.request(verb, url, headers=headers, data=body) as got:
                return got.status, got.headers, await got.text()

        yield ask


async def test_names_that_are_allowed() -> None:
    async with asking(allowed_hosts="app.example, Other.example") as ask:
        statuses = [
            (await ask("/v2", {"host": host}))[0]
            for host in ("App.Example:80", "other.example", "localhost", "evil.example")
        ]
        assert statuses == [200, 200, 200, 403]
    async with asking(allowed_hosts="*") as ask:
        assert (await ask("/v2", {"host": "evil.example"}))[0] == 200


async def test_a_server_that_others_can_reach_has_names_of_its_own() -> None:
    async with asking(host="0.0.0.0") as ask:
        assert (await ask("/v2", {"host": "gpu-7.example:8000"}))[0] == 200
    async with asking(host="0.0.0.0", allowed_hosts="gpu-7.example") as ask:
        hosts = ("gpu-7.example:8000", "10.1.2.3:8000", "evil.example")
        assert [(await ask("/v2", {"host": host}))[0] for host in hosts] == [200, 200, 403]


# --- pages of other origins that are allowed ---

APP = "https://app.example:8443"
INFER = "/v2/models/same/infer"
TINY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[3]}]}'


async def test_an_origin_that_is_allowed_reads_answers() -> None:
    async with asking(allowed_origins=f"http://localhost:3000,{APP}/") as ask:
        page = {"origin": APP, "sec-fetch-site": "cross-site"}
        wish = {"access-control-request-method": "POST", "access-control-request-headers": "content-type,x-a"}
        status, headers, _ = await ask(INFER, page | wish, "OPTIONS")
        assert (status, headers["access-control-allow-origin"]) == (204, APP)
        assert headers["access-control-allow-methods"] == "POST"
        assert headers["access-control-allow-headers"] == "content-type,x-a"
        for body, expected in ((TINY, 200), (b"{", 400)):
            status, headers, _ = await ask(INFER, JSON | page, "POST", body)
            assert (status, headers["access-control-allow-origin"], headers["vary"]) == (expected, APP, "Origin")
        for origin in (EVIL, "http://app.example:8443", "https://app.example", "null"):
            status, headers, text = await ask(INFER, JSON | page | {"origin": origin}, "POST", TINY)
            assert (status, "--allowed-origins" in text) == (403, True)
            assert "access-control-allow-origin" not in headers
            headers = (await ask(INFER, {"origin": origin} | wish, "OPTIONS"))[1]
            assert "access-control-allow-origin" not in headers


async def test_cors_opens_tensorflow_serving_and_nothing_else() -> None:
    page = {"origin": EVIL, "sec-fetch-site": "cross-site", "content-type": "text/plain"}
    predict = "/v1/models/same:predict", b'{"instances":[[1.0]]}'
    for cors in (False, True):
        async with asking(cors=cors, model_control_mode="explicit", load_model="*") as ask:
            status, headers, _ = await ask(predict[0], page, "POST", predict[1])
            assert (status, headers.get("access-control-allow-origin")) == ((200, "*") if cors else (403, None))
            for path in (INFER, "/v2/logging", "/v2/repository/models/same/unload", "/grps/v1/health/offline"):
                assert (await ask(path, page, "POST", TINY))[0] == 403


@pytest.mark.parametrize(
    ("option", "value"),
    [("allowed_origins", value) for value in ("*", "app.example", "https://a/b", "https://a b")]
    + [("allowed_hosts", value) for value in ("https://a", "a:80", "*.example", "a b")],
)
async def test_values_that_browsers_never_send(option: str, value: str) -> None:
    given: dict[str, Any] = {option: value}
    with pytest.raises(triglot.ConfigError, match=f"{option}: expected"):
        triglot.Config(**given)


# --- what every answer says ---


@both_versions
async def test_every_answer_says_little_of_the_server(here: ChangingServer, version: str) -> None:
    requests = [
        ("GET", "/v2", b""),
        ("GET", "/metrics", b""),
        ("GET", "/nothing", b""),
        ("PUT", "/v2", b""),
        ("POST", "/v2/models/half/infer", b"{"),
        ("POST", "/v2/models/half/generate_stream", b'{"x":1}'),
        ("POST", "/v2/models/nobody/infer", b"{}"),
    ]
    for verb, path, body in requests:
        if version == "HTTP/1.1":
            async with here.session.request(verb, here.url + path, data=body) as got:
                await got.read()  # aiohttp 3.10 keeps a connection of which it reads no more.
                headers = {name.lower(): value for name, value in got.headers.items()}
        else:
            client = Client(*await asyncio.open_connection(HOST, here.server.grpc_port))
            fields = [(":method", verb), (":scheme", "http"), (":path", path), (":authority", HOST)]
            await client.send(greeting(), client.raw_headers(1, fields), data(1, body))
            headers = (await answer(client))[0]
            await client.close()
        assert (headers["server"], headers["x-content-type-options"]) == ("triglot", "nosniff"), path


async def test_an_answer_to_what_is_no_http_says_as_little(here: ChangingServer) -> None:
    reader, writer = await asyncio.open_connection(HOST, here.server.rest_port)
    writer.write(b"GET /v2 HTTP/1.1\r\nHost: localhost\r\njunk\r\n\r\n")
    head = (await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 20)).decode().lower()
    writer.close()
    assert "400" in head.partition("\r\n")[0]
    assert "server: triglot\r\n" in head
    assert "python" not in head


async def test_page_may_not_be_framed_and_runs_only_its_own_script(here: ChangingServer) -> None:
    for path in ("/", "/grps/v1/monitor/metrics"):
        async with here.session.get(here.url + path, headers={"accept": "text/html"}) as page:
            headers = page.headers
        policy = headers["content-security-policy"]
        assert headers["x-frame-options"] == "DENY"
        assert headers["referrer-policy"] == "no-referrer"
        assert "default-src 'none'" in policy
        assert "frame-ancestors 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
