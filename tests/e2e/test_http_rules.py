"""What clients rely on in the bytes of an HTTP answer, seen with nothing but the standard library."""

from __future__ import annotations

import gzip
import http.client
import json
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest

from tests.e2e.server_process import ServerProcess

SECONDS = 30
INFER = "/v2/models/half_plus_two/infer"
X: dict[str, Any] = {"name": "x", "datatype": "FP32", "shape": [2]}
BINARY_X = X | {"parameters": {"binary_data_size": 8}}
DATA = b"\x00\x00\x80\x3f\x00\x00\x00\x40"
Call = Callable[..., "Answer"]


@dataclass(frozen=True)
class Answer:
    """`headers` by their names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    def json(self) -> Any:
        """The JSON part, which is all of it unless a header says otherwise."""
        length = int(self.headers.get("inference-header-content-length", len(self.body)))
        return json.loads(self.body[:length])


@pytest.fixture
def call(server: ServerProcess) -> Call:
    """`call(verb, path, body, **headers)` on a connection of its own; _ in a header's name stands for -."""

    def send(verb: str, path: str, body: bytes | None = None, **headers: str) -> Answer:
        connection = http.client.HTTPConnection(server.rest_address, timeout=SECONDS)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(verb, path, body, named)
            response = connection.getresponse()
            answer_headers = {name.lower(): value for name, value in response.getheaders()}
            return Answer(response.status, answer_headers, response.read())
        finally:
            connection.close()

    return send


def binary_body(**changes: Any) -> tuple[bytes, str]:
    """A request with one binary tensor, and the length of its JSON part."""
    head = json.dumps({"inputs": [BINARY_X]} | changes).encode()
    return head + DATA, str(len(head))


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/v2/health/live", {"live": True}),
        ("/v2/health/ready", {"ready": True, "live": True}),
        ("/v2/models/half_plus_two/ready", {"name": "half_plus_two", "ready": True}),
        ("/v2/models/half_plus_two/versions/1/ready", {"name": "half_plus_two", "ready": True}),
    ],
)
def test_health_has_a_json_body(call: Call, path: str, expected: dict[str, Any]) -> None:
    answer = call("GET", path)
    assert (answer.status, answer.json()) == (200, expected)
    assert answer.headers["content-type"] == "application/json"


def test_server_metadata_with_and_without_a_slash(call: Call) -> None:
    assert call("GET", "/v2").json() == call("GET", "/v2/").json()


@pytest.mark.parametrize(
    ("verb", "path", "body", "status"),
    [
        ("GET", "/v2/models/nope", None, 404),
        ("GET", "/v2/models/nope/ready", None, 404),
        ("POST", "/v2/models/nope/infer", b'{"inputs": []}', 404),
        ("POST", INFER, b"{", 400),
        ("POST", INFER, b"", 400),
        ("POST", INFER, b'{"inputs": []}', 400),
        ("POST", "/v2/models/token_stream/infer", b'{"inputs": []}', 501),
        ("GET", INFER, None, 405),
        ("POST", "/v2/health/live", b"", 405),
        ("GET", "/no/such/route", None, 404),
        ("POST", f"{INFER}/", b"", 404),
    ],
)
def test_an_error_is_json_without_a_charset(
    call: Call, verb: str, path: str, body: bytes | None, status: int
) -> None:
    answer = call(verb, path, body)
    assert answer.status == status
    assert answer.headers["content-type"] == "application/json"
    error = answer.json()
    assert set(error) == {"error"}
    assert isinstance(error["error"], str)
    assert error["error"]


def test_a_binary_answer_says_how_long_its_json_is(call: Call) -> None:
    body, length = binary_body(outputs=[{"name": "y", "parameters": {"binary_data": True}}])
    answer = call("POST", INFER, body, Inference_Header_Content_Length=length)
    assert answer.status == 200
    assert answer.headers["content-type"] == "application/octet-stream"
    assert answer.json()["outputs"][0]["parameters"] == {"binary_data_size": 8}
    json_length = int(answer.headers["inference-header-content-length"])
    assert answer.body[json_length:] == b"\x00\x00\x20\x40\x00\x00\x40\x40"


def test_a_json_answer_has_no_length_header_and_no_parameters(call: Call) -> None:
    body, length = binary_body()
    for listed in (True, False):
        if listed:
            body, length = binary_body(outputs=[{"name": "y"}], parameters={"binary_data_output": True})
        answer = call("POST", INFER, body, Inference_Header_Content_Length=length)
        assert answer.status == 200
        assert answer.headers["content-type"] == "application/json"
        assert "inference-header-content-length" not in answer.headers
        assert answer.json()["outputs"] == [{"name": "y", "datatype": "FP32", "shape": [2], "data": [2.5, 3.0]}]


@pytest.mark.parametrize("content_type", ["application/octet-stream", "text/plain", "application/json"])
def test_the_content_type_decides_nothing(call: Call, content_type: str) -> None:
    body = json.dumps({"inputs": [X | {"data": [1, 2]}]}).encode()
    assert call("POST", INFER, body, Content_Type=content_type).status == 200
    body, length = binary_body()
    assert (
        call("POST", INFER, body, Content_Type=content_type, Inference_Header_Content_Length=length).status == 200
    )


def test_a_length_header_may_cover_the_whole_body(call: Call) -> None:
    """So do C++ clients, with an empty id."""
    body = json.dumps({"id": "", "inputs": [X | {"data": [[1], [2]]}], "unknown": 1}).encode()
    answer = call("POST", INFER, body, Inference_Header_Content_Length=str(len(body)))
    assert answer.status == 200
    assert "id" not in answer.json()


def test_a_wrong_length_header(call: Call) -> None:
    body, _ = binary_body()
    for length in (str(len(body) + 1), "-1", "x"):
        answer = call("POST", INFER, body, Inference_Header_Content_Length=length)
        assert answer.status == 400
        text = f"inference header size should be in range (0, {len(body)}), got: {length}"
        assert answer.json()["error"] == text


def test_binary_data_that_is_too_short_or_too_long(call: Call) -> None:
    body, length = binary_body()
    short = call("POST", INFER, body[:-1], Inference_Header_Content_Length=length)
    text = "unexpected size for input 'x', expecting 1 additional bytes for model 'half_plus_two'"
    assert (short.status, short.json()["error"]) == (400, text)
    long = call("POST", INFER, body + b"\0", Inference_Header_Content_Length=length)
    assert long.status == 400
    assert "unexpected additional input data for model 'half_plus_two'" in long.json()["error"]


def test_data_given_twice(call: Call) -> None:
    body, length = binary_body(inputs=[BINARY_X | {"data": [1, 2]}])
    answer = call("POST", INFER, body, Inference_Header_Content_Length=length)
    assert answer.status == 400
    assert answer.json()["error"].startswith("Input must set only one of the following fields")


@pytest.mark.parametrize("key", ["triton_x", "triton_enable_empty_final_response"])
def test_a_reserved_parameter(call: Call, key: str) -> None:
    body = json.dumps({"inputs": [X | {"data": [1, 2]}], "parameters": {key: True}}).encode()
    answer = call("POST", INFER, body)
    assert answer.status == 400
    assert f"'{key}'" in answer.json()["error"]


CODINGS = pytest.mark.parametrize(("coding", "compress"), [("gzip", gzip.compress), ("deflate", zlib.compress)])


@CODINGS
def test_request_codings(call: Call, coding: str, compress: Callable[[bytes], bytes]) -> None:
    body, length = binary_body()
    answer = call("POST", INFER, compress(body), Content_Encoding=coding, Inference_Header_Content_Length=length)
    assert answer.json()["outputs"][0]["data"] == [2.5, 3.0]


@CODINGS
@pytest.mark.parametrize("damage", ["not compressed", "cut off"])
def test_a_damaged_compressed_body(
    call: Call, coding: str, compress: Callable[[bytes], bytes], damage: str
) -> None:
    body, length = binary_body()
    sent = body if damage == "not compressed" else compress(body)[:-12]
    answer = call("POST", INFER, sent, Content_Encoding=coding, Inference_Header_Content_Length=length)
    assert answer.status == 400
    assert answer.headers["content-type"] == "application/json"
    assert answer.json()["error"]


@pytest.mark.parametrize("coding", ["br", "zstd", "snappy"])
def test_an_unknown_request_coding(call: Call, coding: str) -> None:
    answer = call("POST", INFER, b"x", Content_Encoding=coding)
    assert answer.status == 501
    assert answer.headers["content-type"] == "application/json"
    assert answer.headers["accept-encoding"] == "gzip, deflate"
    assert f"'{coding}'" in answer.json()["error"]


def test_an_answer_is_never_br(call: Call) -> None:
    body = json.dumps({"inputs": [X | {"shape": [50_000], "data": [1] * 50_000}]}).encode()
    answer = call("POST", INFER, body, Accept_Encoding="gzip;q=0.1, deflate;q=0.1, br;q=1")
    assert answer.status == 200
    assert answer.headers.get("content-encoding", "identity") in ("identity", "gzip", "deflate")
