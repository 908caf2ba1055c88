"""The table of cases: calls for a client to make, and what has to become of them, both as JSON."""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from triglot.pb.grpc.health.v1 import health_pb2
from triglot.pb.grpc.reflection.v1 import reflection_pb2
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb

INFER = "/inference.GRPCInferenceService/ModelInfer"
STREAM_INFER = "/inference.GRPCInferenceService/ModelStreamInfer"
PREDICT_STREAMING = "/grps.protos.v1.GrpsService/PredictStreaming"
WATCH = "/grpc.health.v1.Health/Watch"
REFLECT = "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"
RESPONSES: dict[str, type[Message]] = {
    INFER: pb.ModelInferResponse,
    STREAM_INFER: pb.ModelStreamInferResponse,
    PREDICT_STREAMING: grps_pb2.GrpsMessage,
    WATCH: health_pb2.HealthCheckResponse,
    REFLECT: reflection_pb2.ServerReflectionResponse,
}
SERVICES = (
    "google.cloud.aiplatform.v1.PredictionService",
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "grps.protos.v1.GrpsService",
    "inference.GRPCInferenceService",
    "tensorflow.serving.ModelService",
    "tensorflow.serving.PredictionService",
    "triglot.TrafficService",
)
BLOCK = 65_521
MIB = 1 << 20
LONG_MS = 2**31 + 1000
"""A little more than 24 days, and more than 32 bits of milliseconds with a sign."""
Json = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """Calls that a client makes one after the other on one connection, and what each result has to contain.

    `over` names the connections that it is for, of `clients.CONNECTIONS`.
    """

    name: str
    calls: tuple[Json, ...]
    expected: tuple[Json, ...]
    over: tuple[str, ...] = ("plain",)

    def check(self, results: list[Json]) -> None:
        """Raise `AssertionError` for the first result that lacks something."""
        for call, expected, result in zip(self.calls, self.expected, results, strict=True):
            decoded = {**result, "responses": [_decoded(call, response) for response in result["responses"]]}
            assert contains(decoded, expected), f"expected {expected}, but got {_short(decoded)}"


def contains(value: Any, expected: Any) -> bool:
    """Return whether each key of `expected` is in `value`, and so on down; lists have equal lengths."""
    match expected:
        case dict():
            return isinstance(value, dict) and all(contains(value.get(key), expected[key]) for key in expected)
        case list():
            return len(value) == len(expected) and all(map(contains, value, expected))
    return bool(value == expected)


@cache
def pattern(size: int) -> bytes:
    """Return the bytes that `fill` of a request stands for."""
    block, x = bytearray(), 1
    for _ in range(BLOCK):
        x = (x * 1664525 + 1013904223) & 0xFFFFFFFF
        block.append(x >> 24)
    return (bytes(block) * math.ceil(size / BLOCK))[:size]


def cases(unique: str) -> Iterator[Case]:
    """Yield the table for one run of a client on one server; `unique` is part of ids that the server remembers."""
    for over in ("plain", "tls", "mtls", "unix"):
        suffix = "" if over == "plain" else f" over {over}"
        yield Case(f"unary{suffix}", (echo(1000),), (_echoed(1000),), (over,))
        yield Case(f"bidirectional{suffix}", (steps([1, 1, 1]),), (_stepped(0, 0, 0),), (over,))
    yield Case("server stream", (_grps(),), (_ok(*({"str_data": word} for word in ("a", "b", "c"))),))
    yield Case("turns", (steps([1, 1, 1]) | {"turns": True},), (_stepped(0, 0, 0),))
    yield Case("half-close without a request", (steps([]),), (_ok(),))
    yield Case("100 responses", (steps([100]),), (_stepped(*range(100)),))
    yield Case("5 MiB", (echo(5 * MIB),), (_echoed(5 * MIB),))
    yield Case("64 MiB", (echo(64 * MIB),), (_echoed(64 * MIB),))
    yield Case("5 MiB over tls", (echo(5 * MIB),), (_echoed(5 * MIB),), ("tls",))
    for algorithm in ("gzip", "deflate"):
        yield Case(algorithm, (echo(5 * MIB) | {"compression": algorithm},), (_echoed(5 * MIB),))
    late = {"code": "DEADLINE_EXCEEDED", "responses": []}
    yield Case("short deadline", (_seen(ms=10_000) | {"timeout_ms": 300},), (late,))
    yield Case(
        "short deadline of a stream", (steps([100], ms=50) | {"timeout_ms": 300},), ({"code": late["code"]},)
    )
    yield Case("long deadline", (_seen() | {"timeout_ms": LONG_MS},), (_saw(days=24),))
    yield Case("no deadline", (_seen(),), (_saw(days=-1),))
    sent = _seen("x-text") | {"metadata": [["x-text", "a, b;c=d"]]}
    yield Case("metadata", (sent,), (_saw(b"a, b;c=d"),))
    texts = [" ".join([str(number)] * 100) for number in range(30)]  # More than an HPACK table holds.
    calls = tuple(_seen("x-text") | {"metadata": [["x-text", text]]} for text in texts)
    yield Case("metadata of many calls", calls, tuple(_saw(text.encode()) for text in texts))
    for size in (1, 2, 3, 10_000):
        value = pattern(size)
        sent = _seen("x-value-bin") | {"metadata": [["x-value-bin", _base64(value)]]}
        yield Case(f"-bin metadata of {size} bytes", (sent,), (_saw(value),))
    unknown = {**echo(8, model="unknown")}
    yield Case("unknown model", (unknown,), ({"code": "NOT_FOUND", "responses": []},))
    message = "größer als 100 %: 2³¹ ≠ 2^31"
    error = {"code": "INVALID_ARGUMENT", "message": message, "responses": []}
    yield Case("error with a text", (_unary("failing", [_int32("x", 1)]),), (error,))
    yield Case("error with a long text", (_unary("failing", [_int32("x", 0)]),), ({"code": error["code"]},))
    busy = {"code": "RESOURCE_EXHAUSTED", "trailers": {"grpc-retry-pushback-ms": "2000"}}
    yield Case("error with trailing metadata", (_unary("failing", [_int32("x", 2)]),), (busy,))
    no_method = echo(8) | {"method": INFER + "Later"}
    yield Case("unknown method", (no_method,), ({"code": "UNIMPLEMENTED", "responses": []},))
    cancelled = {"code": "CANCELLED"}
    stream = steps([1000], ms=20, request_id=f"cancel {unique}") | {"cancel_after": 3}
    closed = steps([-1], ms=10_000, request_id=f"cancel {unique}")
    yield Case("cancel in mid-stream", (stream, closed), (cancelled, _stepped(1)))
    stream = steps([200], ms=20, request_id=f"leave {unique}") | {"leave_after": 3}
    closed = steps([-1], ms=2_000, request_id=f"leave {unique}")
    yield Case("leave in mid-stream", (stream, closed), ({"code": "LEFT"}, _stepped(1)))
    watch = {
        "method": WATCH,
        "kind": "server_stream",
        "requests": [_request(health_pb2.HealthCheckRequest(service="steps"))],
        "cancel_after": 1,
    }
    yield Case("health Watch", (watch,), (cancelled | {"responses": [{"status": "SERVING"}]},))
    services = [{"name": name} for name in SERVICES]
    listed = {"method": REFLECT, "kind": "bidi", "requests": [_reflection_request()], "turns": True}
    yield Case("reflection", (listed,), (_ok({"list_services_response": {"service": services}}),))
    # Time for one ping, 10 s after the call's beginning: grpc.aio closes connections that ping more often.
    yield Case("idle under keep-alive", (_seen(ms=11_000), echo(8)), (_saw(), _echoed(8)), ("keepalive",))
    again = echo(1000) | {"repeat_seconds": 2, "timeout_ms": 20_000}
    yield Case("connection age", (echo(1), again), (_echoed(1), {"code": "OK"}), ("aging",))


def _decoded(call: Json, response: Json) -> Json:
    """Return a response as JSON with its proto's names; the tail is taken from the pattern if its CRC is right."""
    tail = pattern(call.get("tail", 0))
    assert response["crc32"] == zlib.crc32(tail), "other bytes came back than were sent"
    return _json(RESPONSES[call["method"]].FromString(base64.b64decode(response["head"]) + tail), tail)


def _json(message: Message, tail: bytes) -> Json:
    if isinstance(message, pb.ModelInferResponse) and tail:
        assert message.raw_output_contents.pop() == tail
    return MessageToDict(message, preserving_proto_field_name=True)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) < 2000 else f"{text[:1000]} … {text[-1000:]}"


# --- calls ---


def _base64(value: bytes) -> str:
    return base64.b64encode(value).decode()


def _request(message: Message, fill: int = 0) -> Json:
    return {"head": _base64(message.SerializeToString()), "fill": fill}


def _int32(name: str, value: int) -> pb.ModelInferRequest.InferInputTensor:
    contents = pb.InferTensorContents(int_contents=[value])
    return pb.ModelInferRequest.InferInputTensor(name=name, datatype="INT32", shape=[1], contents=contents)


def _infer(model: str, inputs: list[pb.ModelInferRequest.InferInputTensor], request_id: str = "") -> Json:
    """A request that asks for typed contents."""
    request = pb.ModelInferRequest(model_name=model, id=request_id, inputs=inputs)
    request.parameters["typed_contents"].bool_param = True
    return _request(request)


def _unary(model: str, inputs: list[pb.ModelInferRequest.InferInputTensor]) -> Json:
    return {"method": INFER, "kind": "unary", "requests": [_infer(model, inputs)]}


def echo(size: int, model: str = "identity_uint8") -> Json:
    """A call with raw contents that come back."""
    tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="UINT8", shape=[1, size])
    request = pb.ModelInferRequest(model_name=model, inputs=[tensor])
    head = request.SerializeToString() + b"\x3a" + _varint(size)  # raw_input_contents is the last field.
    requests = [{"head": _base64(head), "fill": size}]
    return {"method": INFER, "kind": "unary", "requests": requests, "tail": size}


def _varint(value: int) -> bytes:
    more = value >> 7
    return bytes([value & 0x7F | 0x80]) + _varint(more) if more else bytes([value])


def steps(counts: list[int], ms: int = 0, request_id: str = "") -> Json:
    requests = [_infer("steps", [_int32("n", n), _int32("ms", ms)], request_id) for n in counts]
    return {"method": STREAM_INFER, "kind": "bidi", "requests": requests}


def _seen(name: str = "", ms: int = 0) -> Json:
    contents = pb.InferTensorContents(bytes_contents=[name.encode()])
    named = pb.ModelInferRequest.InferInputTensor(name="name", datatype="BYTES", shape=[1], contents=contents)
    return _unary("seen", [_int32("ms", ms), named])


def _grps() -> Json:
    request = grps_pb2.GrpsMessage(model="token_stream", str_data="a b c")
    return {"method": PREDICT_STREAMING, "kind": "server_stream", "requests": [_request(request)]}


def _reflection_request() -> Json:
    return _request(reflection_pb2.ServerReflectionRequest(list_services="*"))


# --- expectations ---


def _ok(*responses: Json) -> Json:
    return {"code": "OK", "responses": list(responses)}


def _echoed(size: int) -> Json:
    return _ok({"outputs": [{"name": "y", "datatype": "UINT8", "shape": ["1", str(size)]}]})


def _stepped(*steps: int) -> Json:
    return _ok(*({"infer_response": {"outputs": [{"contents": {"int_contents": [step]}}]}} for step in steps))


def _saw(value: bytes = b"", days: int = -1) -> Json:
    contents = [{"contents": {"bytes_contents": [_base64(value)]}}, {"contents": {"int_contents": [days]}}]
    return _ok({"outputs": contents})
