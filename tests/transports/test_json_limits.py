"""How much JSON a REST request may have, on all routes: bytes, inflated ones too, strings, values, levels."""

from __future__ import annotations

import gzip
import io
from contextlib import AbstractAsyncContextManager

import pytest

from tests.scheduling.scripted_models import Plain
from tests.transports.live import Live, live
from triglot.transports.http2.core.limits import MIB
from triglot.transports.inflate import MAX_GZIP_MEMBERS

pytestmark = pytest.mark.both_transports

BODIES = {
    "/v2/models/same/infer": '{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[3]MORE}]}',
    "/v1/models/same:predict": '{"instances":[3]MORE}',
    "/grps/v1/infer/predict?model=same-1": '{"ndarray":[3]MORE}',
}
JSON = {"content-type": "application/json"}
every_route = pytest.mark.parametrize("path", BODIES)


async def post(here: Live, path: str, body: bytes, **headers: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{here.server.rest_port}{path}"
    async with here.session.post(url, data=io.BytesIO(body), headers=JSON | headers) as answer:
        return answer.status, await answer.text()


def served(**options: int) -> AbstractAsyncContextManager[Live]:
    return live({"same": Plain(lambda inputs: {"y": inputs["x"]})}, **options)


def body_of(path: str, data: str = "[3]", more: str = "") -> bytes:
    """`data`: in place of the values; `more`: of a key that no protocol knows."""
    return BODIES[path].replace("[3]", data).replace("MORE", f',"more":{more}' if more else "").encode()


@every_route
@pytest.mark.parametrize("size", [20_000, 3 * MIB])
async def test_bytes(path: str, size: int) -> None:
    async with served(max_json_size=size) as here:
        exact = body_of(path).ljust(size)
        assert (await post(here, path, exact))[0] == 200
        status, text = await post(here, path, exact + b" ")
        assert (status, "max_json_size" in text) == (413, True)


@pytest.mark.parametrize("path", [path for path in BODIES if "grps" not in path])
async def test_bytes_that_are_inflated(path: str) -> None:
    size, gzipped = 3 * MIB, {"content-encoding": "gzip"}
    async with served(max_json_size=size) as here:
        exact = body_of(path).ljust(size)
        assert (await post(here, path, gzip.compress(exact), **gzipped))[0] == 200
        status, text = await post(here, path, gzip.compress(exact + b" "), **gzipped)
        assert (status, "max_json_size" in text) == (413, True)


@pytest.mark.parametrize(
    ("members", "status"),
    [(2, 200), (MAX_GZIP_MEMBERS, 200), (MAX_GZIP_MEMBERS + 1, 400), (100_000, 400)],
)
async def test_members_of_gzip(members: int, status: int) -> None:
    """Several are legal (RFC 1952, 2.2), and very many an attack."""
    path = "/v2/models/same/infer"
    body = gzip.compress(body_of(path)) + gzip.compress(b"") * (members - 1)
    async with served() as here:
        got, text = await post(here, path, body, **{"content-encoding": "gzip"})
    wrong = f"the compressed request body has more than {MAX_GZIP_MEMBERS} members"
    assert (got, wrong in text) == (status, status == 400)
    assert status == 400 or '"data":[3.0]' in text


@every_route
async def test_a_string_has_a_quarter_of_them(path: str) -> None:
    """Where bodies are too long to be parsed at once."""
    async with served(max_json_size=20 * MIB) as here:
        assert (await post(here, path, body_of(path, more=f'"{"x" * (5 * MIB - 400_000)}"')))[0] == 200
        status, text = await post(here, path, body_of(path, more=f'"{"x" * (5 * MIB + 400_000)}"'))
        assert (status, "a quarter of option max_json_size" in text) == (413, True)


@every_route
async def test_values(path: str) -> None:
    async with served(max_json_values=50_000) as here:
        numbers = f"[{'1,' * 60_000}1]"
        status, text = await post(here, path, body_of(path, numbers))
        assert (status, "option max_json_values" in text) == (413, True)


@every_route
async def test_levels(path: str) -> None:
    """grps has one code for what a client does wrong (grps 3.4)."""
    async with served() as here:
        status, text = await post(here, path, body_of(path, more="[" * 1100 + "]" * 1100))
        assert (status, "nested too deep" in text) == (500 if "grps" in path else 400, True)
