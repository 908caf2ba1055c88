"""Varied traffic differs from call to call, arrives as it was made, and its answers are checked."""

import json
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import grpc
import pytest
from aiohttp import web

from bench import h2client, httpclient, payloads, streamclient
from bench.payloads import REST, framed
from bench.tally import BenchError, close, drive
from bench.test_clients import Context, grpc_server, serving
from bench.traffic import COUNT, IDENTICAL, INDEXED, ONE_ROW, VARIED, Making, Traffic, exchanges, requests
from triglot.pb.kserve import inference_pb2 as pb

GRPC_MAKINGS = [
    payloads.grpc_exchange,
    payloads.contents_exchange,
    payloads.two_exchange,
    payloads.bytes_exchange,
    payloads.predict_content_exchange,
    payloads.predict_values_exchange,
    payloads.grps_exchange,
    payloads.grps_stream_exchange,
    payloads.stream_exchange,
]
REST_MAKINGS = [payloads.json_exchange, payloads.predict_json_exchange]
FEWER = replace(VARIED, count=1024)
"""As varied as the traffic of a bench, in a quarter of the time that it takes to make that."""


def name_of(making: Making) -> str:
    return getattr(making, "__name__", "?")


@pytest.mark.parametrize("making", [*GRPC_MAKINGS, *REST_MAKINGS], ids=name_of)
def test_no_call_is_like_another(making: Making) -> None:
    traffic = VARIED if making is payloads.grpc_exchange else FEWER
    made = exchanges(making, ("m",), 16, traffic)
    sent = requests(made, traffic, 1)
    assert len(made) == len(sent) == traffic.count
    assert len({request.body for request in sent}) == traffic.count
    assert len({exchange.body for exchange in made}) == traffic.count
    assert len({request.holds for request in sent}) == traffic.count
    assert len({len(exchange.body) for exchange in made}) > 4  # Rows.
    if made[0].kind == REST:
        traces = {request.body.partition(b"traceparent: ")[2][:55] for request in sent}
    else:
        traces = {dict(request.metadata.fields)[b"traceparent"] for request in sent}
        timeouts = Counter(request.timeout for request in sent)
        assert len(timeouts) > 150
        assert {900, 1100} >= {min(filter(None, timeouts)), max(filter(None, timeouts))}
    assert len(traces) == traffic.count
    assert all(len(trace) == 55 for trace in traces)


@pytest.mark.parametrize("making", [*GRPC_MAKINGS, *REST_MAKINGS], ids=name_of)
def test_a_reply_holds_what_its_request_wants_and_no_others_does(making: Making) -> None:
    made = exchanges(making, ("m",), 16, FEWER)
    random = Random(3)
    for exchange, sent in zip(made[:50], requests(made, FEWER, 1)[:50], strict=True):
        reply = framed([exchange.reply])
        assert not sent.missing(reply)
        other = random.choice(made[100:])
        assert sent.missing(framed([other.reply]))
        exchange.check(
            {}, framed([exchange.reply] * exchange.messages) if exchange.messages > 1 else exchange.reply
        )
        with pytest.raises(BenchError):
            exchange.check({}, framed([other.reply] * exchange.messages) if exchange.messages > 1 else other.reply)


def test_identical_calls_are_one_call() -> None:
    (request,) = requests(exchanges(payloads.grpc_exchange, ("m",), 16, IDENTICAL), IDENTICAL, 1)
    assert request.timeout is None
    assert not request.metadata.fields
    assert pb.ModelInferRequest.FromString(request.body).id == ""
    assert list(pb.ModelInferRequest.FromString(request.body).inputs[0].shape) == [1, 16]
    assert len(request.holds) == 1


def test_models_in_turn_and_one_row() -> None:
    made = exchanges(payloads.grpc_exchange, ("a", "b"), 16, replace(ONE_ROW, count=64))
    given = [pb.ModelInferRequest.FromString(exchange.body) for exchange in made]
    assert [request.model_name for request in given[:4]] == ["a", "b", "a", "b"]
    assert {request.inputs[0].shape[0] for request in given} == {1}


@pytest.mark.parametrize("traffic", [VARIED, INDEXED, IDENTICAL], ids=["C-core", "indexed", "identical"])
@pytest.mark.parametrize("connections", [1, 4])
async def test_calls_arrive_as_they_were_made(traffic: Traffic, connections: int) -> None:
    made = exchanges(payloads.grpc_exchange, ("m",), 16, traffic)
    by_body = {
        request.body: (request, exchange.reply)
        for request, exchange in zip(requests(made, traffic, 1), made, strict=True)
    }
    seen: Counter[bytes] = Counter()

    async def handler(request: bytes, context: Context) -> bytes:
        made, reply = by_body[request]
        seen[request] += 1
        fields = dict(context.invocation_metadata())
        for name, value in made.metadata.fields:
            assert fields[name.decode()] == value.decode()
        if made.timeout is not None:
            assert 0 < context.time_remaining() <= made.timeout * 1.04 / 1000 + 0.01
        return reply

    async with grpc_server(handler) as port:
        sent = [request for request, _ in by_body.values()]
        opened = await h2client.connect(port, payloads.GRPC_PATH, sent, 8, connections, indexed=traffic.indexed)
        outcome = await drive(opened, 0.3, b"", patience=20)
        await close(*opened)
    assert outcome.calls == seen.total()
    assert len(seen) == (min(COUNT, outcome.calls) if traffic.varied and connections == 1 else len(seen))


@pytest.mark.parametrize("kind", ["another's", "shorter"])
async def test_wrong_answers_are_errors(kind: str) -> None:
    made = exchanges(payloads.grpc_exchange, ("m",), 16, FEWER)
    replies = {exchange.body: exchange.reply for exchange in made}

    async def handler(request: bytes, context: Context) -> bytes:
        return made[7].reply if kind == "another's" else replies[request][:-1]

    async with grpc_server(handler) as port:
        opened = await h2client.connect(port, payloads.GRPC_PATH, requests(made, FEWER, 1), 4)
        with pytest.raises(BenchError, match="does not hold its request's"):
            await drive(opened, 0.2, b"", patience=20)
        await close(*opened)


@pytest.mark.parametrize("wrong", [False, True])
async def test_streams_are_checked_message_by_message(wrong: bool) -> None:
    made = exchanges(payloads.stream_exchange, ("m",), 16, FEWER)
    replies = {exchange.body: exchange.reply for exchange in made}

    async def handler(given: Any, context: Context) -> Any:
        number = 0
        async for request in given:
            number += 1
            yield made[5].reply if wrong and number == 20 else replies[request]

    methods = {"ModelStreamInfer": grpc.stream_stream_rpc_method_handler(handler)}
    async with serving(methods) as port:
        opened = await streamclient.connect(port, payloads.STREAM_PATH, requests(made, FEWER, 1), 8)
        if wrong:
            with pytest.raises(BenchError, match="does not hold its request's"):
                await drive([opened], 0.5, b"", patience=20)
        else:
            assert (await drive([opened], 0.2, b"", patience=20)).calls > 8
        await close(opened)


@pytest.mark.parametrize("wrong", [False, True])
async def test_rest_is_checked(wrong: bool) -> None:
    made = exchanges(payloads.json_exchange, ("m",), 16, FEWER)
    replies = {exchange.body: exchange.reply for exchange in made}
    seen: Counter[str] = Counter()  # Each connection begins anywhere: two may send the same ones.

    async def handler(request: web.Request) -> web.Response:
        body = await request.read()
        seen[request.headers["traceparent"]] += 1
        reply = json.loads(made[5].reply if wrong and seen.total() == 20 else replies[body])
        return web.Response(body=json.dumps(reply, indent=1).encode())  # With blanks, which do not count.

    app = web.Application()
    app.router.add_post("/v2/models/m/infer", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    port = runner.addresses[0][1]
    opened = await httpclient.connect(port, requests(made, FEWER, port), 4)
    if wrong:
        with pytest.raises(BenchError, match="does not hold its request's"):
            await drive(opened, 0.5, b"", patience=20)
    else:
        assert (await drive(opened, 0.2, b"", patience=20)).calls == seen.total()
        assert len(seen) > 4
    await close(*opened)
    await runner.cleanup()
