"""gzip bodies of several members (RFC 1952, 2.2), which are legal, and of very many, which are an attack."""

from __future__ import annotations

import gzip
import io

import pytest
from live import live
from scripted_models import Scripted

from triglot.transports.inflate import MAX_GZIP_MEMBERS

pytestmark = pytest.mark.both_transports

BODY = b'{"inputs":[{"name":"x","datatype":"FP32","shape":[1],"data":[3]}]}'


@pytest.mark.parametrize(
    ("members", "status"),
    [
        (2, 200),
        (MAX_GZIP_MEMBERS, 200),
        (MAX_GZIP_MEMBERS + 1, 400),
        (100_000, 400),
    ],
)
async def test_members(members: int, status: int) -> None:
    body = gzip.compress(BODY) + gzip.compress(b"") * (members - 1)
    async with live({"scripted": Scripted()}) as server:
        url = f"{server.url}/models/scripted/infer"
        async with server.session.post(
            url, data=io.BytesIO(body), headers={"Content-Encoding": "gzip"}
        ) as response:
            answer = await response.json()
            assert response.status == status
    if status == 200:
        assert answer["outputs"][0]["data"] == [6.0]
    else:
        assert answer["error"] == f"the compressed request body has more than {MAX_GZIP_MEMBERS} members"
