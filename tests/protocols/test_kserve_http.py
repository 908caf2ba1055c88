"""KServe V2 over REST, through a real port: routes, status codes, headers and bodies (spec 0, 3)."""

from __future__ import annotations

import asyncio
import gzip
import json
import re
import struct
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import pytest
import pytest_asyncio

import triglot
from tests.protocols.kserve_served import Served, serve_models

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]
LENGTH = "Inference-Header-Content-Length"
LIMIT = 1_000_000
Y = {"name": "y", "datatype": "FP32", "shape": [1, 2]}
INFER = "/v2/models/identity_fp32/infer"
TWO = struct.pack("<2f", 1.0, 2.0)
X = {"name": "x", "datatype": "FP32", "shape": [1, 2]}
GOOD = {"inputs": [{**X, "data": [1.0, 2.0]}]}
BODY = json.dumps(GOOD).encode()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served() -> AsyncIterator[Served]:
    async with serve_models(max_message_size=LIMIT) as opened:
        yield opened


async def call(
    served: Served, verb: str, path: str, body: Any = b"", headers: Mapping[str, str] | None = None
) -> tuple[int, Any]:
    """The status and the JSON of the answer, which says exactly that it is JSON."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    status, reply_headers, reply = await served.rest.call(verb, path, data, headers)
    assert reply_headers["Content-Type"] == "application/json"
    return status, json.loads(reply)


async def assert_that_all_is_well(served: Served) -> None:
    status, reply = await call(served, "POST", INFER, GOOD)
    assert status == 200
    assert reply["outputs"] == [{**Y, "data": [1.0, 2.0]}]


SERVER = {"name": "triglot", "version": triglot.__version__, "extensions": ["binary_tensor_data", "parameters"]}
VERSIONS = {
    "name": "versions",
    "versions": ["1", "2", "10"],
    "platform": "python",
    "inputs": [{"name": "x", "datatype": "INT32", "shape": [1]}],
    "outputs": [{"name": "version", "datatype": "INT64", "shape": [1]}],
}
UNKNOWN = "Request for unknown model:"


@pytest.mark.parametrize(
    ("path", "status", "body"),
    [
        ("/v2/health/live", 200, {"live": True}),
        ("/v2/health/ready", 200, {"ready": True, "live": True}),
        ("/v2/models/versions/ready", 200, {"name": "versions", "ready": True}),
        ("/v2/models/versions/versions/2/ready", 200, {"name": "versions", "ready": True}),
        ("/v2/models/versions", 200, VERSIONS),
        ("/v2/models/versions/versions/2", 200, {**VERSIONS, "versions": ["2"]}),
        ("/v2/models/%76ersions", 200, VERSIONS),
        ("/v2/models/nothing/ready", 404, {"error": f"{UNKNOWN} 'nothing' is not found"}),
        ("/v2/models/versions/versions/3/ready", 404, {"error": f"{UNKNOWN} 'versions' version 3 is not found"}),
        ("/v2/models/nothing", 404, {"error": f"{UNKNOWN} 'nothing' is not found"}),
        ("/v2/models/a%2Fb%20%C3%A9", 404, {"error": f"{UNKNOWN} 'a/b é' is not found"}),
        ("/v2/models/versions/versions/3", 404, {"error": f"{UNKNOWN} 'versions' version 3 is not found"}),
        *(
            (
                f"/v2/models/versions/versions/{path}",
                404,
                {"error": f"{UNKNOWN} 'versions' version {name} is not found, only 1, 2, 10"},
            )
            for path, name in (("one", "one"), ("%31a", "1a"))
        ),
        ("/", 200, {"status": "alive"}),  # KServe V1's liveness.
        *(
            (path, 404, {"error": "Not Found"})
            for path in (
                "/v2/nothing",
                "/v2/health",
                "/v2/health/live/",
                "/v2/models/",
                "/v2/models/versions/",
                "/v2/models/versions/versions",
                "/v2/models/versions/versions/",
                "/v2/models/versions/ready/",
                "/v2/models/versions/infer/",
                "/V2/health/live",
            )
        ),
        (INFER, 405, {"error": "Method Not Allowed"}),
    ],
)
async def test_what_a_get_answers(served: Served, path: str, status: int, body: Any) -> None:
    assert await call(served, "GET", path) == (status, body)


@pytest.mark.parametrize("version", ["00", "01", "-1", "9" * 19 + "9"])
async def test_versions_that_are_none(served: Served, version: str) -> None:
    status, reply = await call(served, "GET", f"/v2/models/versions/versions/{version}")
    assert status == 400
    assert reply["error"].startswith(f"failed to get model version from specified version string '{version}'")


@pytest.mark.parametrize("path", ["/v2", "/v2/"])
async def test_the_metadata_of_the_server(served: Served, path: str) -> None:
    status, body = await call(served, "GET", path)
    assert status == 200
    assert body.keys() == SERVER.keys()
    assert (body["name"], body["version"]) == (SERVER["name"], SERVER["version"])
    assert set(SERVER["extensions"]) <= set(body["extensions"])


async def test_the_names_of_the_models(served: Served) -> None:
    status, body = await call(served, "GET", "/v2/models")
    assert status == 200
    assert list(body) == ["models"]
    assert {"versions", "two_inputs", "identity_bf16"} <= set(body["models"])


@pytest.mark.parametrize("verb", ["PUT", "DELETE", "PATCH", "POST"])
async def test_another_method(served: Served, verb: str) -> None:
    for path in ("/v2/health/live", "/v2", "/v2/models/versions", "/v2/models/versions/ready"):
        assert await call(served, verb, path) == (405, {"error": "Method Not Allowed"})
    if verb != "POST":
        assert await call(served, verb, INFER) == (405, {"error": "Method Not Allowed"})


async def test_a_405_names_the_methods(served: Served) -> None:
    _, headers, _ = await served.rest.call("GET", INFER)
    assert headers["Allow"] == "POST"


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Content-Type": "application/json"},
        {"Content-Type": "application/octet-stream"},
        {"Content-Type": "text/plain; charset=latin-1"},
        {LENGTH: str(len(BODY))},
        {"Content-Encoding": "identity"},
        {"Accept-Encoding": "br"},
    ],
)
async def test_json_in_json_out(served: Served, headers: dict[str, str]) -> None:
    """Spec 3.5: what the headers call the body is no matter."""
    assert await call(served, "POST", INFER, BODY, headers) == (
        200,
        {"model_name": "identity_fp32", "model_version": "1", "outputs": [{**Y, "data": [1.0, 2.0]}]},
    )


async def test_an_id_comes_back(served: Served) -> None:
    for request_id in ("7", "é"):
        assert (await call(served, "POST", INFER, {**GOOD, "id": request_id}))[1]["id"] == request_id
    assert "id" not in (await call(served, "POST", INFER, {**GOOD, "id": ""}))[1]


@pytest.mark.parametrize("name", [LENGTH, LENGTH.lower(), LENGTH.upper()])
async def test_binary_in_binary_out(served: Served, name: str) -> None:
    tensor = {**X, "parameters": {"binary_data_size": 8}}
    head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
    status, headers, reply = await served.rest.call("POST", INFER, head + TWO, {name: str(len(head))})
    assert (status, headers["Content-Type"]) == (200, "application/octet-stream")
    length = int(headers[LENGTH])
    assert json.loads(reply[:length])["outputs"] == [{**Y, "parameters": {"binary_data_size": 8}}]
    assert reply[length:] == TWO


async def test_tokens_beyond_json(served: Served) -> None:
    body = BODY.replace(b"[1.0, 2.0]", b"[NaN, -Infinity]")
    status, _, reply = await served.rest.call("POST", INFER, body)
    assert status == 200
    assert b'"data":[NaN,-Infinity]' in reply


BINARY = {**X, "parameters": {"binary_data_size": 8}}


@pytest.mark.parametrize(
    ("body", "headers", "status", "text"),
    [
        (b"", {}, 400, "failed to parse the request JSON: Expecting value"),
        (b"{", {}, 400, "failed to parse the request JSON: "),
        (b'{"inputs":"\xff"}', {}, 400, "failed to parse the request JSON: "),
        (b"[" * 100_000, {}, 400, "failed to parse the request JSON: "),
        (b'{"inputs":' + b"[" * 100_000 + b"]" * 100_000 + b"}", {}, 400, "failed to parse the request JSON: "),
        (b'{"inputs":[],"k":1' + b"0" * 3000 + b"}", {}, 400, "[request id: <id_unknown>] expected 1 inputs"),
        ({}, {}, 400, "'inputs' of the request must be an array of objects, got nothing"),
        (BODY, {LENGTH: "9999"}, 400, f"inference header size should be in range (0, {len(BODY)}), got: 9999"),
        (
            {"inputs": [{**X, "parameters": {"shared_memory_region": "r", "shared_memory_byte_size": 8}}]},
            {},
            404,
            "Unable to find shared memory region: 'r'",
        ),
    ],
)
async def test_bodies_that_are_refused(
    served: Served, body: Any, headers: dict[str, str], status: int, text: str
) -> None:
    found, reply = await call(served, "POST", INFER, body, headers)
    assert (found, list(reply)) == (status, ["error"])
    assert reply["error"].startswith(text)
    await assert_that_all_is_well(served)


@pytest.mark.parametrize("body", [b'{"id":"\\ud800",' + BODY[1:], BODY.replace(b'"x"', b'"\\ud800"')])
async def test_text_that_is_not_unicode_is_the_clients_fault(served: Served, body: bytes) -> None:
    status, reply = await call(served, "POST", INFER, body)
    assert (status, list(reply)) == (400, ["error"])
    await assert_that_all_is_well(served)


@pytest.mark.parametrize("datatype", ["FP16", "BF16"])
async def test_datatypes_without_a_json_form(served: Served, datatype: str) -> None:
    path = f"/v2/models/identity_{datatype.lower()}/infer"
    status, reply = await call(served, "POST", path, {"inputs": [{**X, "datatype": datatype, "data": [1, 2]}]})
    assert (status, reply) == (400, {"error": f"input 'x': {datatype} has no JSON form; send it as binary data"})
    tensor = {**X, "datatype": datatype, "parameters": {"binary_data_size": 4}}
    head = json.dumps({"inputs": [tensor]}).encode()
    status, reply = await call(served, "POST", path, head + bytes(4), {LENGTH: str(len(head))})
    assert (status, reply) == (
        400,
        {"error": f"output 'y': {datatype} has no JSON form; request it as binary data"},
    )


async def test_text_that_is_not_utf_8_needs_binary_data(served: Served) -> None:
    tensor = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "parameters": {"binary_data_size": 5}}
    head = json.dumps({"inputs": [tensor]}).encode()
    path = "/v2/models/identity_bytes/infer"
    status, reply = await call(served, "POST", path, head + b"\1\0\0\0\xff", {LENGTH: str(len(head))})
    assert status == 400
    assert reply["error"].startswith(
        "output 'y' has a BYTES element that is not UTF-8; request it as binary data: "
    )
    status, reply = await call(served, "POST", path, head + b"\1\0\0\0a", {LENGTH: str(len(head))})
    assert (status, reply["outputs"][0]["data"]) == (200, ["a"])


async def test_an_array_that_is_not_in_our_byte_order(served: Served) -> None:
    tensor = {"name": "how", "datatype": "BYTES", "shape": [1], "data": ["big endian"]}
    status, reply = await call(served, "POST", "/v2/models/misbehaving/infer", {"inputs": [tensor]})
    assert (status, reply.get("outputs")) == (200, [{**Y, "shape": [2], "data": [1.0, 2.0]}])


def compressed(coding: str, body: bytes) -> bytes:
    if coding == "gzip":
        return gzip.compress(body)
    return zlib.compress(body) if coding == "deflate" else body


@pytest.mark.parametrize("coding", ["gzip", "deflate", "GZIP"])
async def test_compressed_bodies(served: Served, coding: str) -> None:
    headers = {"Content-Encoding": coding}
    status, reply = await call(served, "POST", INFER, compressed(coding.lower(), BODY), headers)
    assert (status, reply["outputs"]) == (200, [{**Y, "data": [1.0, 2.0]}])
    head = json.dumps({"inputs": [BINARY]}).encode()
    body = compressed(coding.lower(), head + TWO)
    # The length of the JSON part is that before compression.
    status, reply = await call(served, "POST", INFER, body, {**headers, LENGTH: str(len(head))})
    assert (status, reply["outputs"]) == (200, [{**Y, "data": [1.0, 2.0]}])


@pytest.mark.parametrize("coding", ["br", "zstd", "compress", "nothing", "gzip, deflate"])
async def test_unknown_content_codings(served: Served, coding: str) -> None:
    status, headers, reply = await served.rest.call("POST", INFER, BODY, {"Content-Encoding": coding})
    assert (status, headers["Content-Type"]) == (501, "application/json")
    assert headers["Accept-Encoding"] == "gzip, deflate"
    assert list(json.loads(reply)) == ["error"]
    await assert_that_all_is_well(served)


@pytest.mark.parametrize(
    ("coding", "body"),
    [
        ("gzip", b"not gzip at all"),
        ("gzip", compressed("gzip", BODY)[:-12]),
        ("deflate", b"\xff\xff\xff\xff"),
        ("deflate", compressed("deflate", BODY)[:10]),
    ],
    # Not the bodies: gzip writes the time into them.
    ids=["no gzip", "gzip cut off", "no deflate", "deflate cut off"],
)
async def test_bodies_that_cannot_be_inflated(served: Served, coding: str, body: bytes) -> None:
    status, reply = await call(served, "POST", INFER, body, {"Content-Encoding": coding})
    assert (status, list(reply)) == (400, ["error"])
    await assert_that_all_is_well(served)


@pytest.mark.parametrize("coding", ["gzip", "deflate", "identity"])
async def test_bodies_that_are_too_large(served: Served, coding: str) -> None:
    """A body is as large as it is without its compression."""
    body = BODY + b" " * LIMIT
    status, reply = await call(served, "POST", INFER, compressed(coding, body), {"Content-Encoding": coding})
    assert (status, list(reply)) == (413, ["error"])
    assert re.search(f"(larger|holds more) than {LIMIT} bytes", reply["error"])
    await assert_that_all_is_well(served)


@pytest.mark.parametrize("transport", ["h1", "aiohttp"])
@pytest.mark.parametrize(
    ("coding", "encode", "status"),
    [
        ("gzip", gzip.compress, b"200"),
        ("deflate", zlib.compress, b"200"),
        ("identity", bytes, b"200"),
        ("br", bytes, b"501"),
        ("gzip", bytes, b"400"),
    ],
)
async def test_compressed_bodies_in_small_chunks(
    transport: str, coding: str, encode: Callable[[bytes], bytes], status: bytes
) -> None:
    body = encode(BODY)
    head = f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Encoding: {coding}\r\nConnection: close\r\n"
    async with serve_models(http_transport=transport) as opened:
        reader, writer = await asyncio.open_connection("127.0.0.1", opened.server.rest_port)
        writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        for at in range(0, len(body), 3):
            piece = body[at : at + 3]
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
        writer.write(b"0\r\n\r\n")
        reply = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        assert reply.split(b" ")[1] == status
        await assert_that_all_is_well(opened)
