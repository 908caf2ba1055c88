"""Cases as lines of JSON: one call each, and what is expected of its answer.

    name        unique
    server      the set-up that it goes to; "models" when it is omitted

REST:
    send        "VERB PATH", the path as it goes over the wire
    headers     of the request
    body        a text, sent as it is, or an object, sent as compact JSON
    gzip        whether the body is sent compressed

    status      the number; any when it is omitted
    error       the message of an error: the body is nothing but this, in TensorFlow Serving's form
    text, json  the whole body, as text, or as a value: numbers keep their kind (3 is not 3.0)
    contains    a part of the body
    matches     a regular expression that is found in the body
    kinds       all keys of the body, which is an object, and the kind of each value: string, list, list of N
    answer_headers  some headers of the answer

gRPC:
    call        "Service/Method" of the package tensorflow.serving
    request     a message in protobuf's JSON; empty when it is omitted

    status      the name of the code
    error       the text of the status
    error_contains  a part of it
    reply       the message in protobuf's JSON, without fields of default values
    reply_part  some fields of it; of a list all elements
    then        a second line of gRPC, which holds soon after the first
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from http.client import HTTPConnection, HTTPMessage
from pathlib import Path
from typing import Any

import grpc
from google.protobuf import json_format, message_factory

from tests.process import SECONDS
from triglot.pb import POOL, service

Line = dict[str, Any]
FOLDER = Path(__file__).parent / "tfserving"
PACKAGE = "tensorflow.serving."
NO_JSON = object()


@dataclass(frozen=True)
class Answer:
    """`text` is the body, or the text of gRPC's status; `reply` the message of gRPC, as protobuf's JSON."""

    status: int | str
    text: str
    headers: HTTPMessage = field(default_factory=HTTPMessage)
    reply: Any = None


def load(file: str) -> list[Line]:
    """The lines of a file. Raise `AssertionError` for unknown keys, and a duplicate name."""
    return read_lines(FOLDER / file, KEYS, CHECKS)


def read_lines(
    file: Path, keys: Mapping[str, Collection[str]], checks: Mapping[str, Collection[str]]
) -> list[Line]:
    """The same for lines with other keys: those of the calls and those of what is expected, by kind of line."""
    lines: list[Line] = [json.loads(text) for text in file.read_text(encoding="utf-8").splitlines()]
    for line in lines:
        for part in (line, line["then"]) if "then" in line else (line,):
            known, expected = set(keys[_kind(part)]), set(checks[_kind(part)])
            unknown = part.keys() - known - expected
            assert not unknown, f"{line['name']}: unknown keys {unknown}"
            assert part.keys() & expected, f"{line['name']}: expects nothing"
    assert len({line["name"] for line in lines}) == len(lines), "a name comes twice"
    return lines


def _kind(line: Line) -> str:
    return "send" if "send" in line else "call"


def check(line: Line, answer: Answer) -> None:
    """Raise `AssertionError` unless the answer is what the line expects."""
    for key, holds in CHECKS[_kind(line)].items():
        if key in line:
            assert holds(answer, line[key]), f"{key}: expected {line[key]!r}, got {answer}"


# --- the calls ---


def send(line: Line, port: int) -> Answer:
    """The answer to a line of REST, on a connection of its own."""
    verb, path = line["send"].split(" ", 1)
    body = line.get("body", "")
    data = (
        body if isinstance(body, str) else json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    ).encode()
    headers = dict(line.get("headers", {}))
    if line.get("gzip"):
        data = gzip.compress(data)
        headers["Content-Encoding"] = "gzip"
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request(verb, path, data or None, headers)
        response = connection.getresponse()
        return Answer(response.status, response.read().decode(), response.headers)
    finally:
        connection.close()


def call(line: Line, channel: grpc.Channel) -> Answer:
    """The answer to a line of gRPC."""
    service_name, method_name = line["call"].split("/")
    run = channel.unary_unary(f"/{PACKAGE}{line['call']}")
    request = b""
    if "request" in line:
        message = _message(service_name, method_name, "input_type")
        json_format.ParseDict(line["request"], message, descriptor_pool=POOL)
        request = message.SerializeToString()
    try:
        data = run(request, timeout=SECONDS)
    except grpc.RpcError as error:
        return Answer(error.code().name, error.details())
    reply = _message(service_name, method_name, "output_type")
    reply.ParseFromString(data)
    shown = json_format.MessageToDict(reply, preserving_proto_field_name=True, descriptor_pool=POOL)
    return Answer("OK", "", reply=shown)


def _message(service_name: str, method_name: str, which: str) -> Any:
    method = service(PACKAGE + service_name).methods_by_name[method_name]
    return message_factory.GetMessageClass(getattr(method, which))()


# --- what is expected ---


def error_body(message: str) -> str:
    """An error as TensorFlow Serving's REST interface has it (tfs 4.1)."""
    return f'{{\n    "error": {json.dumps(message, ensure_ascii=False)}\n}}'


def canonical(value: Any) -> str:
    """Equal for values that are equal in every number's kind, NaN included, and in any order of keys."""
    return json.dumps(value, sort_keys=True)


def _value(answer: Answer) -> Any:
    try:
        return json.loads(answer.text)
    except ValueError:
        return NO_JSON


def _json_is(answer: Answer, expected: Any) -> bool:
    value = _value(answer)
    return value is not NO_JSON and canonical(value) == canonical(expected)


def _is_part(part: Any, answer: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(answer, dict) and all(key in answer and _is_part(part[key], answer[key]) for key in part)
    if isinstance(part, list):
        return isinstance(answer, list) and len(part) == len(answer) and all(map(_is_part, part, answer))
    return canonical(part) == canonical(answer)


def _kinds_are(answer: Answer, expected: Mapping[str, str]) -> bool:
    value = _value(answer)
    return (
        isinstance(value, dict) and {key: _kinds(value[key], expected.get(key, "")) for key in value} == expected
    )


def _kinds(value: Any, expected: str) -> str:
    """What the value is, as exactly as it is expected."""
    if isinstance(value, list):
        return f"list of {len(value)}" if " of " in expected else "list"
    return "string" if isinstance(value, str) else type(value).__name__


Check = Callable[[Answer, Any], bool]
CHECKS: dict[str, dict[str, Check]] = {
    "send": {
        "status": lambda answer, expected: answer.status == expected,
        "error": lambda answer, expected: answer.text == error_body(expected),
        "text": lambda answer, expected: answer.text == expected,
        "json": _json_is,
        "contains": lambda answer, expected: expected in answer.text,
        "matches": lambda answer, expected: re.search(expected, answer.text) is not None,
        "kinds": _kinds_are,
        "answer_headers": lambda answer, expected: all(
            answer.headers.get(name) == expected[name] for name in expected
        ),
    },
    "call": {
        "status": lambda answer, expected: answer.status == expected,
        "error": lambda answer, expected: answer.text == expected,
        "error_contains": lambda answer, expected: expected in answer.text,
        "reply": lambda answer, expected: canonical(answer.reply) == canonical(expected),
        "reply_part": lambda answer, expected: _is_part(expected, answer.reply),
    },
}
KEYS = {
    "send": {"name", "server", "send", "headers", "body", "gzip"},
    "call": {"name", "server", "call", "request", "then"},
}
