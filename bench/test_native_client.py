"""The stock clients against real servers: gRPC's own in C++, where it can be built, and in Python."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from pathlib import Path
from typing import cast

import grpc
import pytest

from bench import native, stockclient
from bench.measure import Round, Subject
from bench.payloads import Exchange, framed, grpc_exchange, tensor
from bench.servers import Server
from bench.tally import BenchError, Request
from bench.test_clients import Context, grpc_server
from bench.traffic import VARIED, exchanges, requests
from triglot.pb.kserve import inference_pb2 as pb

needs_native = pytest.mark.skipif(bool(native.left_out()), reason=native.left_out())
Load = Callable[..., Awaitable[Round]]
CLIENTS = [pytest.param(native.load, marks=needs_native, id="C++"), pytest.param(stockclient.load, id="Python")]


class NoServer:
    """A server in this process, whose CPU is not measured."""

    def cpu_seconds(self) -> None:
        return None


def subject(port: int, exchange: Exchange, given: Sequence[Request]) -> Subject:
    made = Subject("test", cast("Server", NoServer()), port, exchange, framed([exchange.reply]))
    made.requests = given
    return made


def answered(request: bytes) -> pb.ModelInferResponse:
    given = pb.ModelInferRequest.FromString(request)
    response = pb.ModelInferResponse(model_name=given.model_name, model_version="1", id=given.id)
    response.outputs.add(name="y", datatype="FP32", shape=given.inputs[0].shape)
    response.raw_output_contents.append(given.raw_input_contents[0])
    return response


@pytest.mark.parametrize("load", CLIENTS)
@pytest.mark.parametrize(("in_flight", "connections"), [(1, 1), (8, 2)])
async def test_varied_calls_arrive_as_they_were_made(load: Load, in_flight: int, connections: int) -> None:
    made = exchanges(grpc_exchange, ("m",), 16, VARIED)
    given = requests(made, VARIED, 1)
    by_body = {request.body: request for request in given}
    peers, came = set(), count()

    async def handler(request: bytes, context: Context) -> bytes:
        made = by_body[request]
        peers.add(context.peer())
        fields = dict(context.invocation_metadata())
        assert fields["traceparent"].encode() == dict(made.metadata.fields)[b"traceparent"]
        assert made.timeout is not None
        assert 0 < context.time_remaining() <= made.timeout * 1.04 / 1000 + 0.01
        next(came)
        return answered(request).SerializeToString()

    async with grpc_server(handler) as port:
        taken = await load(subject(port, made[0], given), in_flight, 0.05, 0.2, connections)
    assert taken.rate > 0
    assert taken.p50 <= taken.p99
    assert next(came) >= 2 * in_flight
    # The C++ client runs twice, to settle and to measure.
    assert len(peers) in (connections, 2 * connections)


@pytest.mark.parametrize("load", CLIENTS)
async def test_another_calls_answer_is_an_error(load: Load) -> None:
    made = exchanges(grpc_exchange, ("m",), 16, VARIED)
    given = requests(made, VARIED, 1)

    async def handler(request: bytes, context: Context) -> bytes:
        return made[0].reply

    async with grpc_server(handler) as port:
        with pytest.raises(BenchError, match="does not hold its request's"):
            await load(subject(port, made[0], given), 4, 0.05, 0.2)


@pytest.mark.parametrize("load", CLIENTS)
async def test_errors(load: Load) -> None:
    numbers = count()

    async def handler(request: bytes, context: Context) -> bytes:
        if next(numbers) == 20:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "full")
        return answered(request).SerializeToString()

    made = exchanges(grpc_exchange, ("m",), 16, VARIED)
    async with grpc_server(handler) as port:
        with pytest.raises(BenchError, match="full"):
            await load(subject(port, made[0], requests(made, VARIED, 1)), 4, 0.05, 0.5)


@needs_native
async def test_silence_is_an_error() -> None:
    async def handler(request: bytes, context: Context) -> bytes:
        await asyncio.Event().wait()
        return request

    exchange = grpc_exchange("m", tensor(1, 16))
    async with grpc_server(handler) as port:
        with pytest.raises(BenchError, match="no answers"):
            await native.load(subject(port, exchange, [Request(exchange.body)]), 2, 0.05, 0.1, 1, 0.3)


@needs_native
async def test_refused_connection() -> None:
    exchange = grpc_exchange("m", tensor(1, 16))
    with pytest.raises(BenchError, match=r"nobody listens|no answers"):
        await native.load(subject(1, exchange, [Request(exchange.body)]), 2, 0.05, 0.1, 1, 1.0)


def test_it_is_left_out_without_a_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    native.left_out.cache_clear()
    try:
        assert "apt-get install" in native.left_out()
    finally:
        monkeypatch.undo()
        native.left_out.cache_clear()
