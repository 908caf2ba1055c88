"""Compressed answers: what a header asks for, and what is sent (spec 3.4)."""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio
from hypothesis import given
from hypothesis import strategies as st

from tests.scheduling.scripted_models import Plain
from tests.transports.live import Live, live
from triglot import InvalidArgument
from triglot.transports.deflate import Accepted, accepted, deflate

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]
LENGTH = "Inference-Header-Content-Length"
INFLATE: dict[str, Callable[[bytes], bytes]] = {"gzip": gzip.decompress, "deflate": zlib.decompress}
SMALL, LARGE = 4, 100_000


@pytest.mark.parametrize(
    ("header", "coding", "asked"),
    [
        ("", "identity", False),
        ("gzip", "gzip", True),
        ("deflate", "deflate", True),
        ("GZIP", "gzip", True),
        ("x-gzip", "gzip", True),
        ("br", "identity", True),
        ("zstd, br", "identity", False),
        ("*", "identity", True),
        ("gzip, deflate, br", "gzip", False),
        ("deflate,gzip", "deflate", False),
        ("identity", "identity", True),
        ("identity, gzip", "identity", False),
        ("gzip;q=0.5, deflate;q=0.8", "deflate", True),
        ("gzip;q=0.5, deflate ; q=0.5", "gzip", True),
        ("gzip; q = 1.000, identity;q=0.5", "gzip", True),
        ("gzip;q=0.5, identity", "identity", True),
        ("gzip;q=0, deflate;q=0.001", "deflate", True),
        ("gzip;q=0", "identity", True),
        ("br;q=1, gzip;q=0.1", "gzip", True),
        ("gzip;q=2, deflate;q=0.1", "deflate", True),
        ("gzip;q=, deflate;level=3", "identity", True),
        ("gzip;q=0, gzip", "gzip", True),
        (", ,gzip,", "gzip", True),
    ],
)
async def test_what_a_header_means(header: str, coding: str, asked: bool) -> None:
    found = accepted(header)
    assert found.coding == coding
    if coding != "identity":
        assert found.asked == asked


@given(st.text(max_size=60))
async def test_any_header_means_something_known(header: str) -> None:
    assert accepted(header).coding in ("gzip", "deflate", "identity")


@given(st.binary(max_size=300), st.sampled_from(["gzip", "deflate"]), st.integers(1, 400))
async def test_what_is_compressed_can_be_inflated(body: bytes, coding: str, times: int) -> None:
    squeezed = deflate(body * times, Accepted(coding, asked=True))
    assert squeezed is not None
    assert INFLATE[coding](squeezed) == body * times
    on_offer = deflate(body * times, Accepted(coding, asked=False))
    assert on_offer in (None, squeezed)


def doubled(inputs: Mapping[str, Any]) -> dict[str, Any]:
    if inputs["x"][0] < 0:
        raise InvalidArgument("below zero " * 200)
    return {"y": inputs["x"] * 2}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Live]:
    async with live({"doubled": Plain(doubled)}) as opened:
        yield opened


async def infer(
    server: Live,
    values: Any,
    accept: str | list[str] | None,
    *,
    binary: bool = True,
    path: str = "v2/models/doubled/infer",
) -> tuple[int, Any, bytes]:
    """Status, headers and the body as it came."""
    raw = np.asarray(values, np.float32)
    tensor = {"name": "x", "datatype": "FP32", "shape": [raw.size], "parameters": {"binary_data_size": raw.nbytes}}
    text = json.dumps({"parameters": {"binary_data_output": binary}, "inputs": [tensor]}).encode()
    headers = [(LENGTH, str(len(text)))]
    headers += [("Accept-Encoding", coding) for coding in ([accept] if isinstance(accept, str) else accept or [])]
    url = f"http://127.0.0.1:{server.server.rest_port}/{path}"
    async with (
        aiohttp.ClientSession(auto_decompress=False, skip_auto_headers=["Accept-Encoding"]) as session,
        session.post(url, data=text + raw.tobytes(), headers=headers) as response,
    ):
        return response.status, response.headers, await response.read()


@pytest.mark.parametrize("binary", [True, False])
@pytest.mark.parametrize("coding", ["gzip", "deflate"])
async def test_an_answer_comes_as_it_is_asked_for(server: Live, coding: str, binary: bool) -> None:
    # Random numbers: who asks gets it, whether it is worth it or not.
    values = np.random.default_rng(1).random(LARGE, np.float32)
    plain_status, plain_headers, plain = await infer(server, values, None, binary=binary)
    status, headers, body = await infer(server, values, coding, binary=binary)
    assert (plain_status, status) == (200, 200)
    assert headers["Content-Encoding"] == coding
    assert int(headers["Content-Length"]) == len(body) < len(plain)
    assert INFLATE[coding](body) == plain
    # The JSON's length is that before compression (spec 3.3).
    assert headers.get(LENGTH) == plain_headers.get(LENGTH)
    assert headers["Content-Type"] == plain_headers["Content-Type"]
    if binary:
        assert (np.frombuffer(plain[int(plain_headers[LENGTH]) :], "f4") == values * 2).all()


@pytest.mark.parametrize("accept", [None, "br", "identity", "gzip;q=0", "gzip;q=0.3, identity", "*"])
async def test_it_stays_as_it_is_otherwise(server: Live, accept: str | None) -> None:
    _, headers, body = await infer(server, np.zeros(LARGE), accept)
    assert "Content-Encoding" not in headers
    assert len(body) > LARGE * 4


async def test_several_headers_are_one(server: Live) -> None:
    _, headers, _ = await infer(server, np.zeros(LARGE), ["gzip;q=0.5", "deflate"])
    assert headers["Content-Encoding"] == "deflate"


async def test_small_answers_are_not_compressed(server: Live) -> None:
    status, headers, _ = await infer(server, np.zeros(SMALL), "gzip")
    assert status == 200
    assert "Content-Encoding" not in headers


@pytest.mark.parametrize("accept", ["gzip, deflate, br", "gzip, deflate"])
async def test_who_reads_everything_gets_it_where_it_is_worth_it(server: Live, accept: str) -> None:
    _, headers, body = await infer(server, np.zeros(LARGE), accept)
    assert headers["Content-Encoding"] == "gzip"
    assert len(body) < LARGE
    _, headers, _ = await infer(server, np.random.default_rng(1).random(LARGE), accept)
    assert "Content-Encoding" not in headers


async def test_errors_are_not_compressed(server: Live) -> None:
    status, headers, body = await infer(server, [-1.0] * LARGE, "gzip")
    assert status == 400
    assert "Content-Encoding" not in headers
    assert json.loads(body)["error"].startswith("below zero")


async def test_only_infer_compresses(server: Live) -> None:
    url = f"{server.url}/models/doubled"
    async with server.session.get(url, headers={"Accept-Encoding": "gzip"}) as response:
        assert "Content-Encoding" not in response.headers
    body = {"instances": [0.0] * LARGE}
    predict = f"http://127.0.0.1:{server.server.rest_port}/v1/models/doubled:predict"
    async with server.session.post(predict, json=body, headers={"Accept-Encoding": "gzip"}) as response:
        assert response.status == 200
        assert "Content-Encoding" not in response.headers


async def test_a_version_of_the_path_compresses_too(server: Live) -> None:
    _, headers, _ = await infer(server, np.zeros(LARGE), "deflate", path="v2/models/doubled/versions/1/infer")
    assert headers["Content-Encoding"] == "deflate"


async def test_bytes_are_counted_as_they_are_sent(server: Live) -> None:
    async with live({"doubled": Plain(doubled)}) as fresh:
        _, _, body = await infer(fresh, np.zeros(LARGE), "gzip")
        async with fresh.session.get(f"http://127.0.0.1:{fresh.server.rest_port}/metrics") as response:
            lines = (await response.text()).splitlines()
    (sent,) = [
        line
        for line in lines
        if line.startswith("triglot_response_bytes_total{")
        and 'method="infer"' in line
        and 'entrypoint="REST"' in line
    ]
    assert float(sent.rpartition(" ")[2]) == len(body)
