"""Differential fuzzing: the plain and the compiled build of the package must answer the same inputs alike.

    python3 tests/differential.py FOLDER [--seconds 60] [--seed N] [--only TARGET] [--plain FOLDER]

FOLDER has the compiled build (`codegen/compiled.py` prints it), and with `--plain` another one the plain build.
Each build runs in a process of its own, which makes the inputs of a block from its number and prints a digest of
its answers. Blocks whose digests differ are run again, and the first input with another answer is printed, or the
one that ended a process.

Strategy: inputs are valid ones of every kind with random values, most of them damaged in a few places: those get
furthest. What a target returns, or raises, is compared attribute by attribute, including the texts of errors.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import cache, partial
from pathlib import Path
from random import Random
from types import GetSetDescriptorType, MemberDescriptorType
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tests.damaged_inputs import (
    SIGNATURES,
    TEXTS,
    any_outputs,
    any_parameter,
    damaged,
    grps_message,
    infer_message,
    predict_body,
    predict_message,
    v2_body,
)
from triglot.core import errors
from triglot.core.http import HttpRequest
from triglot.core.tensor import Array, Scattered
from triglot.core.types import InferenceRequest, InferenceResponse, OutputTensor
from triglot.model.signature import Signature
from triglot.model.validation import bind_inputs, bind_outputs, check_parameters
from triglot.pb.kserve import inference_pb2
from triglot.protocols.grps import codec as grps_codec
from triglot.protocols.grps.message import GrpsMap, Message
from triglot.protocols.grps.request import Request, RequestDecoder
from triglot.protocols.grps.tensors import input_tensor, tensor_of
from triglot.protocols.kserve import codec as kserve_codec
from triglot.protocols.kserve import rest as kserve_rest
from triglot.protocols.tfserving import codec as tfserving_codec
from triglot.protocols.tfserving import rest_predict
from triglot.transports.http1.requests import HeadLayouts, Malformed, RequestReader, encode_chunk, response_head
from triglot.transports.http2.core import frames, sending
from triglot.transports.http2.core.connection import Connection, read_buffer
from triglot.transports.http2.core.events import DataReceived
from triglot.transports.http2.core.limits import Limits
from triglot.transports.http2.core.receiving import CompleteRequest, RequestReceived

BLOCK = 500
"""Inputs of one block."""


class Case:
    """An input, as `text` for a report, and the function that answers it."""

    def __init__(self, text: str, answer: Callable[..., Any], *arguments: Any) -> None:
        self.text = text
        self._answer = answer
        self._arguments = arguments

    def outcome(self) -> str:
        """Return the answer, or its error, as JSON."""
        try:
            found = plain(self._answer(*self._arguments))
        except Exception as error:
            found = ["raised", plain(error)]
        return json.dumps(found)


Target = Callable[[Random], Iterator[Case]]
"""Yields cases without end; those of one block share what a target keeps from input to input, such as layouts."""


# --- answers as plain values, which are the same in both builds ---


def plain(value: Any) -> Any:
    """Return a value of lists, texts and numbers."""
    if value is None or type(value) in (bool, int, str):
        return value
    for kind, form in FORMS:
        if isinstance(value, kind):
            return form(value)
    is_ours = type(value).__module__.partition(".")[0] == "triglot"
    return [type(value).__name__, *([name, plain(item)] for name, item in attributes(value) if is_ours)]


def array_form(array: Array) -> Any:
    elements = array.tolist() if array.dtype.kind in "OSUT" else array.tobytes()
    return [array.dtype.str, list(array.shape), plain(elements)]


FORMS: list[tuple[Any, Callable[[Any], Any]]] = [
    (int, int),
    (float, repr),
    (np.ndarray, array_form),
    (bytes | bytearray | memoryview, lambda data: f"bytes {bytes(data).hex()}"),
    (Scattered, lambda pieces: plain(bytes(pieces))),
    (Mapping, lambda members: sorted(([plain(key), plain(item)] for key, item in members.items()), key=repr)),
    (list | tuple, lambda items: list(map(plain, items))),
    (set | frozenset, lambda items: sorted(map(plain, items), key=repr)),
    (errors.ServingError, lambda error: [type(error).__name__, error.message, error.code, error.retry_after]),
    (Exception, lambda error: [type(error).__name__, str(error)]),
]


def attributes(value: object) -> list[tuple[str, Any]]:
    """Return the public attributes of an object."""
    kind: Any = type(value)
    names = {*attribute_names(kind), *getattr(value, "__dict__", ())}
    return [(name, getattr(value, name, None)) for name in sorted(names) if not name.startswith("_")]


@cache
def attribute_names(kind: type) -> set[str]:
    """Return the attributes that all objects of a type have: compiled ones have descriptors of another type."""
    attribute = MemberDescriptorType | GetSetDescriptorType | property
    return {name for base in kind.__mro__ for name, item in vars(base).items() if isinstance(item, attribute)}


# --- targets ---


def report(data: bytes | list[bytes], more: str = "") -> str:
    parts = [data] if isinstance(data, bytes) else data
    return json.dumps([base64.b64encode(part).decode() for part in parts]) + (f" {more}" if more else "")


def layouts(random: Random, make: Callable[[Random], bytes]) -> Iterator[bytes]:
    """Messages; some have the layout of the one before and other values, since values are at the end."""
    while True:
        message = make(random)
        for _ in range(random.choice((1, 1, 3))):
            yield message
            if len(message) > 12:
                at = len(message) - random.randint(1, 12)
                message = message[:at] + random.randbytes(1) + message[at + 1 :]
        yield damaged(random, message)
        # On the path of large messages: an unknown field makes it one.
        if random.random() < 0.05:
            yield damaged(random, message, 2) + b"\xf2\x3f\x80\x80\x02" + bytes(32 * 1024)


def kserve(random: Random) -> Iterator[Case]:
    decode = kserve_codec.InferDecoder()

    def answer(data: bytes, signature: Signature) -> Any:
        request = decode(data)
        return request, checked(signature, request), kserve_codec.identify(data).model_name

    for data in layouts(random, infer_message):
        if has_order(data):
            continue
        yield Case(report(data), answer, data, random.choice(SIGNATURES))


def has_order(data: bytes) -> bool:
    """Whether which error comes first depends on the order of a map, which protobuf does not keep."""
    try:
        request = inference_pb2.ModelInferRequest.FromString(data)
    except DecodeError:
        return False
    tensors: list[Any] = [request, *request.inputs, *request.outputs]
    return any(len(tensor.parameters) > 1 for tensor in tensors)


def checked(signature: Signature, request: InferenceRequest) -> Any:
    """The inputs as the model gets them, or the error."""
    try:
        return bind_inputs(signature, request), check_parameters(request.parameters, "m")
    except errors.ServingError as error:
        return error


def tfserving(random: Random) -> Iterator[Case]:
    decode = tfserving_codec.PredictDecoder()

    def answer(data: bytes, signature: Signature) -> Any:
        request = decode(data)
        # A map has no order.
        inputs = sorted(request.inputs, key=lambda tensor: tensor.name)
        bound = checked(signature, InferenceRequest("m", inputs=inputs, lenient_shapes=True))
        return request.spec, inputs, list(request.output_filter), sorted(map(plain, request.unreadable)), bound

    for data in layouts(random, predict_message):
        yield Case(report(data), answer, data, random.choice(SIGNATURES))


def grps(random: Random) -> Iterator[Case]:
    def decode_message(data: Any) -> Request:
        message = grps_codec.decode_message(data)
        return Request(message.model, message)

    decode = RequestDecoder(decode_message)

    def answer(data: bytes) -> Any:
        request = decode(data)
        message = request.message if request.layout is None else request.layout.message(request.values)
        assert message is not None
        tensors = message.data if isinstance(message.data, list) else []
        inputs = [input_tensor(tensor, tensor.name) for tensor in tensors]
        # Maps have no order.
        encoded = None if isinstance(message.data, GrpsMap) else grps_codec.encode_message(message)
        return message, inputs, encoded, grps_codec.model_of(data)

    for data in layouts(random, grps_message):
        yield Case(report(data), answer, data)


def responses(random: Random) -> Iterator[Case]:
    """Responses of every protocol."""
    while True:
        outputs = any_outputs(random)
        parameters = {random.choice(TEXTS): any_parameter(random) for _ in range(random.choice((0, 0, 1)))}
        response = InferenceResponse(random.choice(("m", "é")), "3", random.choice(TEXTS), outputs, parameters)
        response.typed = random.random() < 0.2
        placed = outputs[:1] if random.random() < 0.1 else []
        response.placed = frozenset(output.name for output in placed)
        wanted = kserve_rest.RestInfer(InferenceRequest("m"), frozenset(), random.random() < 0.3)
        form = random.random() < 0.5
        signature = random.choice(SIGNATURES)
        cases: list[tuple[Any, ...]] = [
            (kserve_codec.encode_infer, response),
            (kserve_codec.encode_stream_infer, response),
            (kserve_codec.small_answer, response),
            (kserve_rest.encode_infer, response, wanted),
            (partial(tfserving_codec.encode_predict, as_content=form), response, "s"),
            (partial(rest_predict.encode_predict, named=random.random() < 0.3), outputs, form),
            (grps_answer, outputs),
            (bind_outputs, signature, {output.name: output.array for output in outputs}, (), "m"),
        ]
        which = random.randrange(len(cases))
        yield Case(json.dumps([which, plain(response)]), *cases[which])


def grps_answer(outputs: list[OutputTensor]) -> bytes:
    tensors = [tensor_of(output.name, output.datatype, output.array) for output in outputs]
    return grps_codec.encode_message(Message("m", tensors))


def v2_json(random: Random) -> Iterator[Case]:
    def answer(http: HttpRequest, signature: Signature) -> Any:
        read = kserve_rest.decode_infer(http)
        return read, checked(signature, read.request)

    while True:
        body = damaged(random, v2_body(random), 2)
        if random.random() < 0.1:
            body += b" " * 2048  # As a large one.
        headers = {}
        if random.random() < 0.2:
            headers = {kserve_rest.HEADER_LENGTH: str(len(body) - random.choice((0, 0, 1, -1)))}
            body += random.choice((b"", b"1234"))
        http = HttpRequest({"model": "m"}, headers, body)
        yield Case(report(body, json.dumps(headers)), answer, http, random.choice(SIGNATURES))


def predict_json(random: Random) -> Iterator[Case]:
    def answer(body: bytes, signature: Signature) -> Any:
        return rest_predict.decode_predict(body, lambda _: signature)

    while True:
        body = damaged(random, predict_body(random), 2)
        if random.random() < 0.1:
            body += b" " * 2048
        yield Case(report(body), answer, body, random.choice(SIGNATURES))


REQUEST_LINES = (
    b"GET /x HTTP/1.1\r\n",
    b"POST /v2/models/m/infer HTTP/1.1\r\n",
    b"POST /x HTTP/1.0\r\n",
    b"GET / HTTP/2.0\r\n",
)
FIELD_LINES = (
    b"Host: a\r\n",
    b"Content-Length: %d\r\n",
    b"Content-Length: 5\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive\r\n",
    b"Upgrade: h2c\r\n",
    b"x-id: %d\r\n",
    b"x-id:  a\t\r\n",
    b"A: \xc3\xa9\r\n",
    b"Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01\r\n",
    b"Expect: 100-continue\r\n",
)


def http1_request(random: Random) -> bytes:
    body = random.randbytes(random.choice((0, 3, 5, 40)))
    lines = [random.choice(REQUEST_LINES), b"Host: a\r\n"]
    more = random.choices(FIELD_LINES, k=random.choice((0, 1, 2, 4)))
    lines += [line % random.choice((0, 3, 5, len(body), 10**20)) if b"%d" in line else line for line in more]
    if body and random.random() < 0.5:
        return b"".join(lines) + b"Content-Length: %d\r\n\r\n" % len(body) + body
    if random.random() < 0.4:
        trailer = random.choice((b"", b"", b"A: b\r\n"))
        chunks = (encode_chunk(body) if body else b"") + b"0\r\n" + trailer + b"\r\n"
        return b"".join(lines) + b"Transfer-Encoding: chunked\r\n\r\n" + chunks
    return b"".join(lines) + b"\r\n"


def cut(random: Random, data: bytes) -> list[bytes]:
    """The bytes as they may arrive."""
    if random.random() < 0.5:
        return [data]
    parts = []
    while data:
        size = random.choice((1, 2, 9, 17, 60, 1000))
        parts.append(data[:size])
        data = data[size:]
    return parts


def http1(random: Random) -> Iterator[Case]:
    known = HeadLayouts()

    def answer(parts: list[bytes], status: int, fields: list[tuple[str, str]]) -> Any:
        reader = RequestReader(known)
        events: list[Any] = []
        for part in parts:
            events += reader.receive(part)
            while reader.kept and reader.waits and not (events and isinstance(events[-1], Malformed)):
                events += reader.next_request()
        head = response_head(status, fields, "now", length=5, is_http10=False, keep_alive=status == 200)
        return events, reader.kept, reader.waits, head

    while True:
        data = b"".join(http1_request(random) for _ in range(random.choice((1, 1, 2, 3))))
        parts = cut(random, damaged(random, data, 2))
        status = random.choice((200, 204, 404, 799))
        fields = [
            (random.choice(("A", "content-length", "Connection", "é")), random.choice(TEXTS)) for _ in range(2)
        ]
        yield Case(report(parts), answer, parts, status, fields)


BLOCKS = (
    b"\x83\x86\x04\x04/a/b\x00\x0ccontent-type\x10application/grpc",
    b"\x83\x86\x04\x04/a/b\x00\x0ccontent-type\x10application/grpc",
    b"\x83\x86\x04\x04/a/b\x40\x0ccontent-type\x10application/grpc\x40\x04x-id\x03%03d",
    b"\x83\x86\x04\x04/a/b\xbe\xbf",
    b"\x83\x86\x44\x03/%02d\x00\x0ccontent-type\x10application/grpc\x00\x0cgrpc-timeout\x02%dS",
    b"\x83\x87\x04\x89\x61\x05\x74\xd4\x9f\x1d\x3a\x42\xe0\x00\x05x-bin\x04AAEC",
    b"\x83\x86\x04\x04/a/b\x00\x0bgrpc-encoding\x04gzip\x00\x0ccontent-type\x16application/grpc+proto",
    b"\x82\x86\x84\x41\x01a",
)
EARLY = frames.PREFACE + frames.head(0, frames.SETTINGS, 0, 0)


def framed(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return frames.head(len(payload), kind, flags, stream) + payload


def http2_frames(random: Random, at: int) -> bytes:
    """A frame, or those of one request; `at`: how many there were before."""
    stream = 2 * (at if random.random() < 0.9 else random.randint(0, 7)) + 1
    kind = random.randrange(10)
    if kind < 5:
        block = random.choice(BLOCKS)
        block = block.replace(b"%03d", b"%03d" % random.randint(0, 999)).replace(
            b"%02d", b"%02d" % random.randint(0, 99)
        )
        block = block.replace(b"%d", b"%d" % random.randint(0, 9))
        if random.random() < 0.2:
            block = damaged(random, block, 1)
        body = random.randbytes(random.choice((0, 1, 5, 30, 300)))
        message = b"\0" + len(body).to_bytes(4) + body
        if random.random() < 0.1:
            half = len(block) // 2
            heads = framed(frames.HEADERS, 0, stream, block[:half]) + framed(
                frames.CONTINUATION, 4, stream, block[half:]
            )
        else:
            heads = framed(frames.HEADERS, frames.END_HEADERS | random.choice((0, 0, 0, 1)), stream, block)
        if random.random() < 0.2:
            padding = random.randint(0, 9)
            return heads + framed(frames.DATA, 9, stream, bytes([padding]) + message + bytes(padding))
        return heads + framed(frames.DATA, random.choice((1, 1, 1, 0)), stream, message)
    payload = {
        5: b"\0\0" + random.randbytes(2),
        6: random.randbytes(8),
        7: b"\0" + random.choice((b"\4", b"\1", b"\5", b"\3")) + random.randbytes(4),
    }.get(kind, random.randbytes(random.choice((0, 4, 5, 8, 20))))
    known = {5: frames.WINDOW_UPDATE, 6: frames.PING, 7: frames.SETTINGS}
    number = random.choice((0, stream)) if kind == 5 else 0 if kind in known else stream
    flags = random.choice((0, 0, 1, 4, 8, 255)) if kind not in known or random.random() < 0.1 else 0
    return framed(known.get(kind, random.randrange(11)), flags, number, payload)


def http2(random: Random) -> Iterator[Case]:
    buffer = read_buffer()

    def answer(parts: list[bytes], used: Limits, actions: bytes) -> Any:
        connection = Connection(used, lambda: 0.0, buffer)
        seen: list[Any] = []
        for part in parts:
            for event in connection.feed(part):
                seen.append(described(event))
                act(connection, event, actions[len(seen) % len(actions)])
        open_streams = {number: stream.end_stream for number, stream in connection.streams.items()}
        return seen, b"".join(map(bytes, connection.out.take())), open_streams, connection.over

    limits = (
        Limits(),
        Limits(max_streams=2, stream_window=100, first_window=50, max_header_block=200, abuse_budget=9),
    )
    while True:
        data = b"".join(http2_frames(random, at) for at in range(random.choice((1, 2, 4, 8))))
        if random.random() < 0.3:
            data = damaged(random, data)
        parts = cut(random, (EARLY if random.random() < 0.97 else b"") + data)
        used = random.choice(limits)
        # What the server does with each event.
        actions = bytes(random.choices(range(8), k=16))
        yield Case(report(parts, actions.hex()), answer, parts, used, actions)


def described(event: Any) -> Any:
    """An event as plain values, since its data is valid until the next one."""
    if isinstance(event, RequestReceived | CompleteRequest):
        return plain((event, event.headers.read_metadata()))
    return plain(event)


def act(connection: Connection, event: Any, action: int) -> None:
    """Do something that a server may do after this event."""
    number = getattr(event, "stream", 0)
    if isinstance(event, DataReceived) and action:
        connection.consumed(number, sum(map(len, event.parts)))
    out = connection.out
    if action == 1:
        out.respond(number, sending.response_head(), [bytes(40)], 40, sending.OK_TRAILERS)
    elif action == 2:
        out.headers(number, sending.response_head())
        out.data(number, [bytes(300), memoryview(bytes(20))])
        out.trailers(number, sending.trailers(3, "é %", [("k-bin", b"\0\1"), ("k", "v")]))
    elif action == 3:
        connection.reset(number, frames.ErrorCode.CANCEL)
    elif action == 4:
        out.pause()
    elif action == 5:
        out.resume()
    elif action == 6:
        connection.drain()


TARGETS: dict[str, Target] = {
    "http2": http2,
    "http1": http1,
    "kserve": kserve,
    "tfserving": tfserving,
    "grps": grps,
    "responses": responses,
    "v2_json": v2_json,
    "predict_json": predict_json,
}


# --- one build ---


def cases(seed: int, block: int, names: list[str]) -> Iterator[Case]:
    """The cases of a block."""
    random = Random(f"{seed} {block}")
    made = TARGETS[names[block % len(names)]](random)
    for _ in range(BLOCK):
        yield next(made)


def answer_all(seed: int, names: list[str], first: int) -> None:
    """Print a line for each block, without end."""
    block = first
    while True:
        digest = hashlib.sha256()
        for case in cases(seed, block, names):
            digest.update(case.outcome().encode())
        print(digest.hexdigest(), flush=True)
        block += 1


def answer_one(seed: int, names: list[str], block: int) -> None:
    """Print each input of a block, and then its answer."""
    for case in cases(seed, block, names):
        print(case.text, flush=True)
        print(case.outcome(), flush=True)


# --- both ---


class Build:
    """A process that answers with one build."""

    def __init__(self, folder: str, arguments: list[str]) -> None:
        environment = os.environ | {"PYTHONPATH": folder, "PYTHONHASHSEED": "0"}
        command = [sys.executable, "-m", "tests.differential", *arguments]
        self.process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        """Return the next line; "" if the process has ended."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().rstrip("\n")

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


def first_difference(folders: tuple[str, str], arguments: list[str]) -> str:
    """Return a text on the first input of a block with different answers; "" if there is none."""
    builds = [Build(folder, arguments) for folder in folders]
    try:
        for at in range(BLOCK):
            text, other_text = (build.line() for build in builds)
            if text != other_text:
                return f"input {at} itself differs:\n{text}\n{other_text}"
            answers = [build.line() for build in builds]
            if answers[0] != answers[1]:
                ends = [
                    None if answer else build.process.wait() for build, answer in zip(builds, answers, strict=True)
                ]
                pairs = enumerate(zip(*answers, strict=False))
                start = max(0, next((place for place, pair in pairs if len(set(pair)) > 1), 0) - 200)
                excerpts = [answer[start : start + 600] for answer in answers]
                return f"input {at}: {text}\nplain:    {excerpts[0]}\ncompiled: {excerpts[1]}\nexit codes: {ends}"
        return ""
    finally:
        for build in builds:
            build.close()


def compare(
    folders: tuple[str, str], seconds: float, seed: int, names: list[str]
) -> tuple[Counter[str], list[str]]:
    """Return how many inputs of each target were compared, and a text for each block that differs."""
    arguments = ["--seed", str(seed), "--only", *names]
    compared: Counter[str] = Counter()
    differences: list[str] = []
    until = time.monotonic() + seconds
    block = 0
    while time.monotonic() < until and len(differences) < 10:
        builds = [Build(folder, [*arguments, "--blocks-from", str(block)]) for folder in folders]
        try:
            while time.monotonic() < until:
                digests = [build.line() for build in builds]
                if digests[0] != digests[1] or not digests[0]:
                    break
                compared[names[block % len(names)]] += BLOCK
                block += 1
            else:
                break
        finally:
            for build in builds:
                build.close()
        found = first_difference(folders, [*arguments, "--block", str(block)])
        differences.append(
            f"{names[block % len(names)]}, seed {seed}, block {block}: {found or 'none the second time'}"
        )
        print(differences[-1], flush=True)
        block += 1
    return compared, differences


def main() -> None:
    """Compare two builds, or answer for one."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--plain", default=str(Path(__file__).parents[1] / "server"))
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=TARGETS, default=list(TARGETS))
    parser.add_argument("--block", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--blocks-from", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.block is not None:
        answer_one(arguments.seed, arguments.only, arguments.block)
    elif arguments.blocks_from is not None:
        answer_all(arguments.seed, arguments.only, arguments.blocks_from)
    else:
        for folder in (arguments.plain, arguments.folder):
            # Else the installed package would answer, which equals itself.
            if not folder or not Path(folder, "triglot").is_dir():
                parser.error(f"expected a folder with the package triglot, got {folder!r}")
        compared, differences = compare(
            (arguments.plain, arguments.folder), arguments.seconds, arguments.seed, arguments.only
        )
        print(f"{compared.total():,} inputs, {len(differences)} differences; {dict(compared)}")
        sys.exit(bool(differences))


if __name__ == "__main__":
    main()
