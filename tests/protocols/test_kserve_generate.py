"""generate, generate_stream and infer_stream through a real port (spec 3.8)."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.scheduling.scripted_models import Counting, Plain
from tests.transports.live import Live, live
from tests.waiting import until
from triglot import InvalidArgument, Model, TensorSpec
from triglot.core.types import Answer

SOCKETS_HOLD = 20
"""Most megabytes in flight."""
EVENTS = "text/event-stream; charset=utf-8"
X = {"name": "x", "datatype": "FP32", "shape": [1], "data": [3]}


class Texts(Model):
    """Answers each of `counts` with so many texts, and fails after them if that is asked for."""

    inputs = [TensorSpec("prompt", "BYTES", [-1]), TensorSpec("count", "INT32", [1], optional=True)]
    outputs = [TensorSpec("text_output", "BYTES", [1])]

    def infer(self, inputs: Mapping[str, Any], call: Any) -> Iterator[Answer]:
        for at in range(int(inputs.get("count", [3])[0])):
            yield Answer({"text_output": np.array([inputs["prompt"][0] + b"%d" % at], object)}, {"at": at})
        if call.parameters.get("fail"):
            raise InvalidArgument("not today")


class Half(Model):
    """Its answers have no JSON form."""

    inputs, outputs = [TensorSpec("x", "FP32", [-1])], [TensorSpec("y", "FP16", [-1])]

    def infer(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield {"y": inputs["x"].astype("f2")}


def twice(inputs: Mapping[str, Any]) -> dict[str, Any]:
    return {"y": inputs["x"] * 2}


def third_is_no_text(inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for text in (b"a", b"b", b"\xff", b"d"):
        yield {"z": np.array([text], object)}


class Broken(Model):
    """Its third answer cannot be printed."""

    inputs, outputs = [TensorSpec("x", "FP32", [-1])], [TensorSpec("z", "BYTES", [1])]

    def infer(self, inputs: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        yield from third_is_no_text(inputs)


async def post(
    server: Live, path: str, body: object, headers: Mapping[str, str] | None = None
) -> tuple[int, str, bytes]:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with server.session.post(f"{server.url}/models/{path}", data=data, headers=headers) as response:
        return response.status, response.headers["Content-Type"], await response.read()


def events(body: bytes) -> list[Any]:
    """The data of each event, which is all that there is in the body."""
    parts = body.split(b"\n\n")
    assert parts.pop() == b""
    assert all(part.startswith(b"data: ") and b"\n" not in part for part in parts)
    return [json.loads(part.removeprefix(b"data: ")) for part in parts]


@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_ordinary_models_answer_both_calls(version: str) -> None:
    async with live({"twice": Plain(twice)}) as server:
        body = {"x": [1, 2.5], "id": "7", "temperature": 1}
        expected = {"model_name": "twice", "model_version": "1", "id": "7", "y": [2, 5]}
        status, kind, reply = await post(server, f"twice{version}/generate", body)
        assert (status, kind, json.loads(reply)) == (200, "application/json", expected)
        status, kind, reply = await post(server, f"twice{version}/generate_stream", body)
        assert (status, kind, events(reply)) == (200, EVENTS, [expected])


@pytest.mark.parametrize("version", ["", "/versions/1"])
async def test_a_decoupled_model_gives_an_event_for_each_answer(version: str) -> None:
    async with live({"texts": Texts()}) as server:
        status, kind, reply = await post(
            server, f"texts{version}/generate_stream", {"prompt": "p", "stream": True}
        )
        assert (status, kind) == (200, EVENTS)
        head = {"model_name": "texts", "model_version": "1"}
        assert events(reply) == [{**head, "at": at, "text_output": f"p{at}"} for at in range(3)]
        status, _, reply = await post(server, f"texts{version}/generate_stream", {"prompt": "p", "count": 0})
        assert (status, events(reply)) == (200, [])
        status, _, reply = await post(
            server, f"texts{version}/generate", {"prompt": "p", "parameters": {"count": 1}}
        )
        assert (status, json.loads(reply)) == (200, {**head, "at": 0, "text_output": "p0"})


@pytest.mark.parametrize("count", [0, 2, 3])
async def test_generate_takes_exactly_one_response(count: int) -> None:
    async with live({"texts": Texts()}) as server:
        status, kind, reply = await post(server, "texts/generate", {"prompt": "p", "count": count})
        assert (status, kind) == (501, "application/json")
        assert json.loads(reply)["error"].startswith("generate expects model to produce exactly 1 response, ")
        assert server.leases() == 0


@pytest.mark.parametrize("call", ["generate", "generate_stream"])
@pytest.mark.parametrize(
    ("path", "body", "headers", "status", "text"),
    [
        ("nobody", {"x": 1}, {}, 404, "Request for unknown model: 'nobody' is not found"),
        ("twice/versions/9", {"x": 1}, {}, 404, "version 9"),
        ("twice", b"{", {}, 400, "failed to parse the request JSON"),
        ("twice", b"", {}, 400, "failed to parse the request JSON"),
        ("twice", {"x": {}}, {}, 400, "input 'x' must be a value or an array of values"),
        ("twice", {}, {}, 400, "[request id: <id_unknown>] expected 1 inputs but got 0 inputs"),
        ("twice", {"x": 1, "id": "7", "parameters": {"x": 2}}, {}, 400, "[request id: 7] "),
        ("twice", {"x": 1, "signature_name": "other"}, {}, 400, "has no signature 'other'"),
        ("half", {"x": 1}, {}, 400, "output 'y': FP16 has no JSON form"),
        (
            "twice",
            gzip.compress(b'{"x": 1}', mtime=0),
            {"Content-Encoding": "gzip"},
            400,
            "'gzip' is not supported",
        ),
        ("twice", b'{"x": 1}', {"Content-Encoding": "br"}, 400, "'br' is not supported"),
    ],
)
async def test_errors_before_the_first_answer_have_a_status(
    call: str, path: str, body: object, headers: Mapping[str, str], status: int, text: str
) -> None:
    async with live({"twice": Plain(twice), "texts": Texts(), "half": Half()}) as server:
        found, kind, reply = await post(server, f"{path}/{call}", body, headers)
        error = json.loads(reply)
        assert (found, kind, list(error)) == (status, "application/json", ["error"])
        assert text in error["error"]
        assert server.leases() == 0


async def test_what_fails_while_the_model_runs_is_an_event_with_its_status() -> None:
    def broken(inputs: Mapping[str, Any]) -> dict[str, Any]:
        raise KeyError("secret")

    async with live({"texts": Texts(), "broken": Plain(broken)}) as server:
        for path, body, status, text in (
            ("texts", {"prompt": "p", "fail": True, "count": 0}, 400, "not today"),
            ("broken", {"x": 1}, 500, "broken version 1 failed"),
        ):
            found, kind, reply = await post(server, f"{path}/generate_stream", body)
            assert (found, kind) == (status, EVENTS)
            (event,) = events(reply)
            assert list(event) == ["error"]
            assert text in event["error"]
            found, kind, reply = await post(server, f"{path}/generate", body)
            assert (found, kind) == (status, "application/json")
            assert text in json.loads(reply)["error"]
        assert server.leases() == 0


@pytest.mark.parametrize("call", ["generate", "generate_stream"])
async def test_a_key_stands_once(call: str) -> None:
    bodies = {
        '{"x": 1, "x": 2}': "input 'x' already exists in request",
        '{"x": 1, "\\u0078": 2}': "input 'x' already exists in request",
        '{"x": 1, "k": 1, "k" : 1}': "parameter 'k' already exists in request",
        '{"x": 1, "parameters": {"k": "a:b", "k": ""}}': "parameter 'k' already exists in request",
        f'{{"x": [1{", 1" * 5000}], "x": 2}}': "input 'x' already exists in request",
    }
    async with live({"twice": Plain(twice)}) as server:
        for body, text in bodies.items():
            status, kind, reply = await post(server, f"twice/{call}", body.encode())
            assert (status, kind, json.loads(reply)) == (400, "application/json", {"error": text})
        for body in ('{"x": 1, "k": "a: {\\"x\\": 1}"}', '{"x": [1], "k:": ":"}'):
            assert (await post(server, f"twice/{call}", body.encode()))[0] == 200


async def test_an_output_without_elements() -> None:
    async with live({"none": Plain(lambda inputs: {"y": inputs["x"][:0]})}) as server:
        _, _, reply = await post(server, "none/generate", {"x": [1, 2]})
        assert json.loads(reply)["y"] == []
        _, _, reply = await post(server, "none/generate_stream", {"x": [1, 2]})
        assert events(reply)[0]["y"] == []


async def test_later_errors_are_the_last_event() -> None:
    async with live({"texts": Texts()}) as server:
        status, _, reply = await post(server, "texts/generate_stream", {"prompt": "p", "count": 2, "fail": True})
        found = events(reply)
        assert (status, [event.get("text_output") for event in found]) == (200, ["p0", "p1", None])
        assert found[2] == {"error": "not today"}


async def test_an_answer_that_cannot_be_printed_is_an_event_of_its_own() -> None:
    async with live({"broken": Broken()}) as server:
        _, _, reply = await post(server, "broken/generate_stream", {"x": 1})
        found = events(reply)
        assert [event.get("z") for event in found] == ["a", "b", None, "d"]
        assert "not UTF-8" in found[2]["error"]


async def test_identity_encoding_is_accepted() -> None:
    async with live({"twice": Plain(twice)}) as server:
        status, _, _ = await post(server, "twice/generate", {"x": 1}, {"Content-Encoding": "identity"})
        assert status == 200


async def test_answers_are_never_compressed() -> None:
    async with (
        live({"twice": Plain(twice)}) as server,
        server.session.post(
            f"{server.url}/models/twice/generate", json={"x": [0] * 9000}, headers={"Accept-Encoding": "gzip"}
        ) as response,
    ):
        assert "Content-Encoding" not in response.headers
        assert len((await response.json())["y"]) == 9000


@asynccontextmanager
async def exchange(
    server: Live, path: str, body: bytes, version: str = "1.1"
) -> AsyncIterator[asyncio.StreamReader]:
    """The answer on a connection of its own, which is left at the end."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.server.rest_port)
    head = f"POST /v2/models/{path} HTTP/{version}\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    try:
        yield reader
    finally:
        writer.close()


async def test_on_the_wire_each_event_is_a_chunk_and_nothing_follows_the_last() -> None:
    body = b'{"prompt": "p", "count": 2}'
    async with live({"texts": Texts()}) as server, exchange(server, "texts/generate_stream", body) as reader:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        assert head.startswith("http/1.1 200 ok\r\n")
        assert f"content-type: {EVENTS}\r\n" in head
        assert "transfer-encoding: chunked\r\n" in head
        for at in range(2):
            event = b'data: {"model_name":"texts","model_version":"1","at":%d,"text_output":"p%d"}\n\n' % (at, at)
            assert await reader.readexactly(len(event) + 6) == b"%x\r\n%s\r\n" % (len(event), event)
        assert await reader.readexactly(5) == b"0\r\n\r\n"
        async with exchange(server, "texts/generate_stream", body, "1.0") as old:
            sent = (await asyncio.wait_for(old.read(), 20)).partition(b"\r\n\r\n")[2]
        assert [event["text_output"] for event in events(sent)] == ["p0", "p1"]


class Paced(Model):
    """Yield when the test lets it."""

    inputs, outputs = Plain.inputs, Plain.outputs

    def __init__(self) -> None:
        self.go = threading.Semaphore(0)

    def infer(self, inputs: Any) -> Iterator[dict[str, Any]]:
        while True:
            assert self.go.acquire(timeout=30)
            yield {"y": inputs["x"]}


async def test_each_event_is_sent_at_once() -> None:
    model = Paced()
    async with live({"paced": model}) as server:
        asked = asyncio.ensure_future(
            server.session.post(f"{server.url}/models/paced/generate_stream", json={"x": 1})
        )
        model.go.release()
        async with await asked as response:
            for _ in range(3):
                assert events(await response.content.readuntil(b"\n\n"))[0]["y"] == 1
                model.go.release()
            response.close()
        model.go.release(100_000)  # It goes on until it hears that nobody listens.
        await until(lambda: server.leases() == 0)


@pytest.mark.parametrize("call", ["generate_stream", "infer_stream"])
async def test_a_client_that_leaves_stops_the_model(call: str) -> None:
    model = Counting()
    async with live({"endless": model}) as server:
        body = {"x": 1} if call == "generate_stream" else {"inputs": [X]}
        async with server.session.post(f"{server.url}/models/endless/{call}", json=body) as response:
            await response.content.readuntil(b"\n\n")
            response.close()
        assert await asyncio.to_thread(model.closed.wait, 20)
        await until(lambda: server.leases() == 0)


async def test_a_client_that_leaves_before_the_first_answer_stops_the_model() -> None:
    class Silent(Model):
        inputs, outputs = Plain.inputs, Plain.outputs
        entered, closed = asyncio.Event(), asyncio.Event()

        async def infer(self, inputs: Any) -> AsyncIterator[dict[str, Any]]:
            self.entered.set()
            try:
                await asyncio.Event().wait()
                yield {"y": inputs["x"]}
            finally:
                self.closed.set()

    model = Silent()
    async with live({"silent": model}) as server:
        async with exchange(server, "silent/generate_stream", b'{"x": 1}'):
            await asyncio.wait_for(model.entered.wait(), 20)
        await asyncio.wait_for(model.closed.wait(), 20)
        await until(lambda: server.leases() == 0)


async def test_a_slow_client_holds_the_model_up() -> None:
    made = 0

    async def infer(inputs: Any) -> AsyncIterator[dict[str, Any]]:
        nonlocal made
        while True:
            made += 1
            yield {"y": np.zeros(1 << 18, np.float32)}

    async with live({"endless": Plain(infer)}) as server:
        timeout = aiohttp.ClientTimeout(total=60)
        async with server.session.post(
            f"{server.url}/models/endless/generate_stream", json={"x": 1}, timeout=timeout
        ) as response:
            for taken in range(1, 30):
                await response.content.readexactly(1 << 20)  # About an answer.
                assert made <= taken + SOCKETS_HOLD
            response.close()
        await until(lambda: server.leases() == 0)


async def test_a_stopping_server_answers_who_waits_for_the_first_answer() -> None:
    gate = asyncio.Event()

    async def infer(inputs: Any) -> AsyncIterator[dict[str, Any]]:
        gate.set()
        await asyncio.Event().wait()
        yield {"y": inputs["x"]}

    async with live({"silent": Plain(infer)}, grace=0.2) as server:
        asked = asyncio.ensure_future(post(server, "silent/generate_stream", {"x": 1}))
        await asyncio.wait_for(gate.wait(), 20)
        await server.server.stop()
        status, kind, reply = await asked
        assert (status, kind) == (503, "application/json")
        assert "shutting down" in json.loads(reply)["error"]


async def test_the_calls_are_counted_with_what_came_of_them() -> None:
    async with live({"texts": Texts(), "twice": Plain(twice)}) as server:
        await post(server, "twice/generate", {"x": 1})
        await post(server, "twice/generate", {"x": {}})
        await post(server, "texts/generate_stream", {"prompt": "p", "count": 1, "fail": True})
        async with server.session.get(f"http://127.0.0.1:{server.server.rest_port}/metrics") as response:
            text = await response.text()
    counts = {
        (sample.labels["method"], sample.labels["model"], sample.labels["code"]): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == "triglot_requests_total" and "generate" in sample.labels["method"]
    }
    assert counts == {
        ("generate", "twice", "OK"): 1,
        ("generate", "twice", "INVALID_ARGUMENT"): 1,
        ("generate_stream", "texts", "INVALID_ARGUMENT"): 1,
    }


async def test_infer_stream_takes_an_infer_body_and_gives_its_answers_as_events() -> None:
    async with live({"texts": Texts(), "twice": Plain(twice)}) as server:
        status, kind, reply = await post(server, "twice/infer_stream", {"id": "7", "inputs": [X]})
        assert (status, kind) == (200, EVENTS)
        output = {"name": "y", "datatype": "FP32", "shape": [1], "data": [6]}
        assert events(reply) == [{"model_name": "twice", "model_version": "1", "id": "7", "outputs": [output]}]
        prompt = {"name": "prompt", "datatype": "BYTES", "shape": [1], "data": ["p"]}
        _, _, reply = await post(server, "texts/versions/1/infer_stream", {"inputs": [prompt]})
        assert [event["outputs"][0]["data"] for event in events(reply)] == [["p0"], ["p1"], ["p2"]]
        assert [event["parameters"] for event in events(reply)] == [{"at": 0}, {"at": 1}, {"at": 2}]
        wanted = {"inputs": [X], "outputs": [{"name": "y", "parameters": {"binary_data": True}}]}
        status, _, reply = await post(server, "twice/infer_stream", wanted)
        assert (status, json.loads(reply)["error"][:15]) == (400, "events are JSON")
