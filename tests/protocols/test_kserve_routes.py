"""Every route of the protocol, with and without a version, and what is none (spec 3.1)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
from yarl import URL

from tests.scheduling.scripted_models import Scripted
from tests.transports.live import Live, live

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "/v2/models/m"
OF_A_VERSION = [
    ("GET", "/trace/setting"),
    ("POST", "/trace/setting"),
    ("GET", "/ready"),
    ("GET", ""),
    ("POST", "/infer"),
    ("GET", "/config"),
    ("GET", "/stats"),
    ("POST", "/predict"),
    ("POST", "/generate"),
    ("POST", "/generate_stream"),
    ("POST", "/infer_stream"),
]
OF_THE_SERVER = [
    ("GET", "/v2"),
    ("GET", "/v2/"),
    ("GET", "/v2/health/live"),
    ("GET", "/v2/health/ready"),
    ("GET", "/v2/models"),
    ("GET", "/v2/models/stats"),
    ("POST", "/v2/repository/index"),
    ("POST", "/v2/repository/models/m/load"),
    ("POST", "/v2/repository/models/m/unload"),
    ("POST", "/v2/repository/named/index"),
    ("POST", "/v2/repository/named/models/m/load"),
    ("POST", "/v2/repository/named/models/m/unload"),
    *[
        ("GET", f"/v2/{kind}sharedmemory{place}/status")
        for kind in ("system", "cuda")
        for place in ("", "/region/r")
    ],
    *[("POST", f"/v2/{kind}sharedmemory/region/r/register") for kind in ("system", "cuda")],
    *[
        ("POST", f"/v2/{kind}sharedmemory{place}/unregister")
        for kind in ("system", "cuda")
        for place in ("", "/region/r")
    ],
    ("GET", "/v2/trace/setting"),
    ("POST", "/v2/trace/setting"),
    ("GET", "/v2/logging"),
    ("POST", "/v2/logging"),
]
ROUTES = [
    *OF_THE_SERVER,
    *[(verb, f"{MODEL}{version}{path}") for version in ("", "/versions/1") for verb, path in OF_A_VERSION],
]
NO_ROUTES = [
    "/v2/models/",
    f"{MODEL}/",
    f"{MODEL}/infer/",
    f"{MODEL}/versions",
    f"{MODEL}/versions/1/",
    f"{MODEL}/versions//generate_stream",
    f"{MODEL}/nothing",
    "/v2/nothing",
    "/v3",
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Live]:
    async with live({"m": Scripted()}) as opened:
        yield opened


async def ask(server: Live, verb: str, path: str) -> tuple[int, bytes]:
    url = URL(f"http://127.0.0.1:{server.server.rest_port}{path}", encoded=True)
    async with server.session.request(verb, url, data=b"{}" if verb == "POST" else None) as response:
        return response.status, await response.read()


@pytest.mark.parametrize(("verb", "path"), ROUTES)
async def test_route_is_served(server: Live, verb: str, path: str) -> None:
    status, reply = await ask(server, verb, path)
    # What it answers is for other tests; a route that is missing has this text.
    assert (status, reply) != (404, b'{"error": "Not Found"}')
    assert status != 405


@pytest.mark.parametrize(("verb", "path"), ROUTES)
async def test_another_verb_is_not_allowed(server: Live, verb: str, path: str) -> None:
    assert await ask(server, "DELETE", path) == (405, b'{"error": "Method Not Allowed"}')
    other = "POST" if verb == "GET" else "GET"
    if (other, path) not in ROUTES:
        assert (await ask(server, other, path))[0] == 405


@pytest.mark.parametrize("path", NO_ROUTES)
@pytest.mark.parametrize("verb", ["GET", "POST"])
async def test_what_is_no_route(server: Live, verb: str, path: str) -> None:
    assert await ask(server, verb, path) == (404, b'{"error": "Not Found"}')


@pytest.mark.parametrize(("verb", "path"), OF_A_VERSION)
async def test_missing_version(server: Live, verb: str, path: str) -> None:
    status, reply = await ask(server, verb, f"{MODEL}/versions/9{path}")
    assert status == 404
    assert json.loads(reply)["error"] == "Request for unknown model: 'm' version 9 is not found"


@pytest.mark.parametrize("version", ["", "/versions/1"])
@pytest.mark.parametrize(("verb", "path"), OF_A_VERSION)
async def test_a_name_is_decoded(server: Live, verb: str, path: str, version: str) -> None:
    status, reply = await ask(server, verb, f"/v2/models/a%20b%2Fc{version}{path}")
    assert status == 404
    assert "'a b/c'" in json.loads(reply)["error"]
