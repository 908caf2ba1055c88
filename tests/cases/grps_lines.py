"""Cases of grps as lines of JSON: one call each, or several at once, and what is expected of the answers.

    name        unique
    server      the set-up that it goes to; "default" when it is omitted
    note        why it is here

HTTP:
    send        "VERB PATH", the path as it goes over the wire
    headers     of the request; none but those of http.client when it is omitted
    body        a text, sent as it is, or an object, sent as compact JSON
    body_base64 bytes
    repeat      how many times the text is sent, one after the other

    status      the number
    answer_headers  some headers of the answer
    text        the whole body
    base64      the whole body
    json        some of the body, which is one JSON document
    contains    parts of the body
    length      of the body, in bytes
    documents   some of each of the JSON documents that are the body, one after the other
    chunks      how many chunks of HTTP bring the body
    document_per_chunk  whether each chunk is one JSON document
    series      how many points a series has
    series_x    their first numbers

gRPC:
    call        "Service/Method" of the package grps.protos.v1
    request     a GrpsMessage in protobuf's JSON; empty when it is omitted
    request_base64  bytes of a request, of whatever kind
    request_zeros   a request of bin_data of so many bytes, all 0

    status      the name of the code
    reply       some of the message
    replies     some of each message of a stream
    count       how many messages a stream has
    reply_zeros the message's bin_data is so many bytes, all 0

Several at once:
    parallel    how many calls; $i in the line is the number of the call, from 0
    values      what $i stands for instead, one value for each call

    codes       `status.code` of every answer
    each_matches    a regular expression that is found in every answer's `str_data`
    some_matches    one that is found in at least one answer's `str_data`
    some_status     what `status` is in at least one answer

"Some of" an object are these keys, of a list all elements. Numbers are equal within 1e-6. In place of a value may
stand {"$contains": a part of a text}, {"$prefix": how a text begins}, or {"$absent": true}: the key is not there.
"""

from __future__ import annotations

import base64
import json
import math
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPMessage, HTTPResponse
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format

from tests.cases.case_lines import Line, read_lines
from tests.process import SECONDS
from triglot.pb import POOL
from triglot.pb.grps.grps_pb2 import GrpsMessage

FOLDER = Path(__file__).parent / "grps"
PACKAGE = "grps.protos.v1."
TOLERANCE = 1e-6


@dataclass(frozen=True)
class Answer:
    """`body` and the sizes of its `chunks` are HTTP's, `replies` are gRPC's messages."""

    status: int | str
    body: bytes = b""
    headers: HTTPMessage = field(default_factory=HTTPMessage)
    chunks: tuple[int, ...] = ()
    replies: tuple[GrpsMessage, ...] = ()

    @property
    def text(self) -> str:
        """The body as a text."""
        return self.body.decode()

    def documents(self) -> list[Any]:
        """The messages, or the JSON documents of the body."""
        return [_as_json(reply) for reply in self.replies] or list(_documents(self.text))

    def document(self) -> Any:
        """The only one of them. Raise `AssertionError` for none or several."""
        documents = self.documents()
        assert len(documents) == 1, f"expected one message, got {documents}"
        return documents[0]


def load(file: str) -> list[Line]:
    """The lines of a file. Raise `AssertionError` for unknown keys, and a duplicate name."""
    return read_lines(FOLDER / file, KEYS, CHECKS)


def check(line: Line, answers: Sequence[Answer]) -> None:
    """Raise `AssertionError` unless the answers are what the line expects."""
    for key, holds in CHECKS["send" if "send" in line else "call"].items():
        if key in line:
            enough = any if key.startswith("some_") else all
            assert enough(holds(answer, line[key]) for answer in answers), (
                f"{key}: expected {line[key]!r}, got {[_shown(answer) for answer in answers]}"
            )


def _shown(answer: Answer) -> str:
    replies = [_as_json(reply) for reply in answer.replies]
    return f"{answer.status} {answer.body[:2000]!r} {answer.headers.items()} {answer.chunks[:20]} {replies}"[:4000]


# --- the calls ---


def ask(line: Line, port: int, channel: grpc.Channel) -> list[Answer]:
    """The answers to the line's calls, which are made at once."""
    count = line.get("parallel", 1)
    values = line.get("values", range(count))
    assert len(values) == count, f"{line['name']}: expected {count} values, got {values}"
    text = json.dumps(line)
    lines = [json.loads(text.replace("$i", str(value))) for value in values]
    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(lambda line: _send(line, port) if "send" in line else _call(line, channel), lines))


def _send(line: Line, port: int) -> Answer:
    """On a connection of its own."""
    verb, path = line["send"].split(" ", 1)
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request(verb, path, _body(line) or None, line.get("headers", {}))
        response = connection.getresponse()
        chunks = list(_chunks(response))
        return Answer(response.status, b"".join(chunks), response.headers, tuple(map(len, chunks)))
    finally:
        connection.close()


def _body(line: Line) -> bytes:
    if "body_base64" in line:
        return base64.b64decode(line["body_base64"])
    body = line.get("body", "")
    text: str = body if isinstance(body, str) else json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    return text.encode() * int(line.get("repeat", 1))


def _chunks(response: HTTPResponse) -> Iterator[bytes]:
    """The body as it was cut by the server; http.client itself would join the chunks."""
    if not response.chunked:
        yield response.read()
        return
    while size := int(response.fp.readline(), 16):
        yield response.fp.read(size)
        response.fp.readline()


def _call(line: Line, channel: grpc.Channel) -> Answer:
    method = f"/{PACKAGE}{line['call']}"
    replies = []
    try:
        if line["call"].endswith("Streaming"):
            stream = channel.unary_stream(method, response_deserializer=GrpsMessage.FromString)
            for reply in stream(_request(line), timeout=SECONDS):
                replies.append(reply)  # noqa: PERF402 - what came before an error counts
        else:
            unary = channel.unary_unary(method, response_deserializer=GrpsMessage.FromString)
            replies.append(unary(_request(line), timeout=SECONDS))
    except grpc.RpcError as error:
        return Answer(error.code().name, error.details().encode(), replies=tuple(replies))
    return Answer("OK", replies=tuple(replies))


def _request(line: Line) -> bytes:
    if "request_base64" in line:
        return base64.b64decode(line["request_base64"])
    request = GrpsMessage()
    json_format.ParseDict(line.get("request", {}), request, descriptor_pool=POOL)
    if "request_zeros" in line:
        request.bin_data = bytes(line["request_zeros"])
    return request.SerializeToString()


# --- what is expected ---


def is_part(part: Any, answer: Any) -> bool:
    """Whether `answer` is what the pattern `part` says, see above."""
    if isinstance(part, dict):
        if "$contains" in part:
            return isinstance(answer, str) and part["$contains"] in answer
        if "$prefix" in part:
            return isinstance(answer, str) and answer.startswith(part["$prefix"])
        return isinstance(answer, dict) and all(
            key not in answer if _is_absent(expected) else key in answer and is_part(expected, answer[key])
            for key, expected in part.items()
        )
    if isinstance(part, list):
        return isinstance(answer, list) and len(part) == len(answer) and all(map(is_part, part, answer))
    if _is_number(part) and _is_number(answer):
        return math.isclose(part, answer, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    return type(part) is type(answer) and part == answer


def _is_absent(part: Any) -> bool:
    return isinstance(part, dict) and part.get("$absent") is True


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _as_json(message: GrpsMessage) -> Any:
    return json_format.MessageToDict(message, preserving_proto_field_name=True, descriptor_pool=POOL)


def _documents(text: str) -> Iterator[Any]:
    """JSON documents, one after the other. Raise `ValueError` for anything else."""
    decoder = json.JSONDecoder()
    while text := text.lstrip():
        document, end = decoder.raw_decode(text)
        yield document
        text = text[end:]


def _one_per_chunk(answer: Answer, expected: bool) -> bool:
    start, each = 0, True
    for size in answer.chunks:
        each = each and len(list(_documents(answer.body[start : start + size].decode()))) == 1
        start += size
    return each == expected


def _found(expected: str, answer: Answer) -> bool:
    return re.search(expected, answer.document().get("str_data", "")) is not None


Check = Callable[[Answer, Any], bool]
EVERY: dict[str, Check] = {
    "status": lambda answer, expected: answer.status == expected,
    "codes": lambda answer, expected: answer.document()["status"]["code"] == expected,
    "each_matches": lambda answer, expected: _found(expected, answer),
    "some_matches": lambda answer, expected: bool(answer.documents()) and _found(expected, answer),
    "some_status": lambda answer, expected: answer.status == expected,
}
CHECKS: dict[str, dict[str, Check]] = {
    "send": {
        **EVERY,
        "answer_headers": lambda answer, expected: is_part(
            expected, {name.lower(): value for name, value in answer.headers.items()}
        ),
        "text": lambda answer, expected: answer.text == expected,
        "base64": lambda answer, expected: answer.body == base64.b64decode(expected),
        "json": lambda answer, expected: is_part(expected, json.loads(answer.text)),
        "contains": lambda answer, expected: all(part in answer.text for part in expected),
        "length": lambda answer, expected: len(answer.body) == expected,
        "documents": lambda answer, expected: is_part(expected, answer.documents()),
        "chunks": lambda answer, expected: len(answer.chunks) == expected,
        "document_per_chunk": _one_per_chunk,
        "series": lambda answer, expected: len(answer.document()["data"]) == expected,
        "series_x": lambda answer, expected: [x for x, _ in answer.document()["data"]] == expected,
    },
    "call": {
        **EVERY,
        "reply": lambda answer, expected: is_part(expected, answer.document()),
        "replies": lambda answer, expected: is_part(expected, answer.documents()),
        "count": lambda answer, expected: len(answer.replies) == expected,
        "reply_zeros": lambda answer, expected: [reply.bin_data for reply in answer.replies] == [bytes(expected)],
    },
}
_BOTH = {"name", "server", "note", "parallel", "values"}
KEYS = {
    "send": _BOTH | {"send", "headers", "body", "body_base64", "repeat"},
    "call": _BOTH | {"call", "request", "request_base64", "request_zeros"},
}
