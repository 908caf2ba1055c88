"""ModelStreamInfer through a real port (spec 0.12, 0.13, 2.8)."""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from tests.scheduling.scripted_models import Counting, Inputs, Plain, Scripted, number
from tests.transports.h2_peers import Client, data, message, request_fields
from tests.transports.live import METHOD, live, request
from tests.waiting import ever_later, until
from triglot import InvalidArgument
from triglot.core.response_buffer import STREAM_BUFFER
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.stream import MAX_UNSENT
from triglot.transports.http2.core import frames

pytestmark = pytest.mark.both_transports

VALUE = struct.Struct("<f")
FINAL = "triton_final_response"


def asking(model: str, value: float, request_id: str, **parameters: bool) -> bytes:
    message = pb.ModelInferRequest.FromString(request(model, VALUE.pack(value), request_id=request_id))
    for key, flag in parameters.items():
        message.parameters[key].bool_param = flag
    return message.SerializeToString()


async def sending(*messages: bytes) -> AsyncIterator[bytes]:
    for sent in messages:
        yield sent


def final(answer: pb.ModelStreamInferResponse) -> bool:
    return answer.infer_response.parameters[FINAL].bool_param


def values(answers: list[pb.ModelStreamInferResponse]) -> list[tuple[str, float]]:
    return [
        (answer.infer_response.id, VALUE.unpack(answer.infer_response.raw_output_contents[0])[0])
        for answer in answers
    ]


async def test_ordinary_models_answer_in_the_order_of_the_requests() -> None:
    first = Scripted(open_gate=False)
    async with live({"slow": first, "quick": Scripted()}) as server:
        call = server.stream_infer(
            sending(asking("slow", 1, "a"), asking("quick", 2, "b"), asking("quick", 3, "c"))
        )
        await first.until_at("infer")
        first.open_point("infer")
        answers = [answer async for answer in call]
    assert values(answers) == [("a", 2), ("b", 4), ("c", 6)]
    assert all(final(answer) for answer in answers)


async def test_a_decoupled_request_between_them_does_not_change_their_order() -> None:
    first = Scripted(open_gate=False)

    def infer(inputs: Inputs) -> Any:
        yield {"y": inputs["x"]}

    async with live({"slow": first, "quick": Scripted(), "decoupled": Plain(infer)}) as server:
        call = server.stream_infer(
            sending(asking("slow", 1, "a"), asking("decoupled", 9, "d"), asking("quick", 2, "b"))
        )
        await first.until_at("infer")
        assert values([await call.read()]) == [("d", 9)]
        first.open_point("infer")
        assert values([await call.read(), await call.read()]) == [("a", 2), ("b", 4)]


async def test_a_models_call_knows_the_streams_metadata() -> None:
    model = Scripted()
    async with live({"good": model}) as server:
        call = server.stream_infer(sending(asking("good", 1, "a")), metadata=(("x-tenant", "blue"),))
        assert values([answer async for answer in call]) == [("a", 2)]
    assert model.calls[0].metadata["x-tenant"] == "blue"
    assert model.calls[0].request_id == "a"


async def test_failed_request_is_answered_in_band_and_the_stream_continues() -> None:
    def infer(inputs: Inputs) -> Any:
        raise InvalidArgument("not today")

    async with live({"good": Scripted(), "bad": Plain(infer)}) as server:
        call = server.stream_infer(
            sending(
                asking("absent", 1, "a"),
                asking("bad", 1, "b"),
                asking("good", 1, "c", triton_of_my_own=True),
                b"\xff\xff",
                asking("good", 4, "d"),
            )
        )
        answers = [answer async for answer in call]
        assert await call.code() is grpc.StatusCode.OK
    assert [answer.infer_response.id for answer in answers] == ["a", "b", "c", "", "d"]
    texts = [answer.error_message for answer in answers]
    assert texts[0] == "Request for unknown model: 'absent' is not found"
    assert answers[0].infer_response.model_name == "absent"
    assert texts[1] == "not today"
    assert "triton_of_my_own" in texts[2]
    assert "not a valid" in texts[3]
    assert texts[4] == ""
    assert values(answers[4:]) == [("d", 8)]


async def test_an_execution_error_ends_the_call_when_the_client_asks_for_that() -> None:
    def infer(inputs: Inputs) -> Any:
        raise RuntimeError("a secret")

    async with live({"bad": Plain(infer)}) as server:
        call = server.stream_infer(
            sending(asking("absent", 1, "a"), asking("bad", 1, "b")), metadata=(("triton_grpc_error", "true"),)
        )
        assert (await call.read()).error_message.startswith("Request for unknown model")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "secret" not in str(caught.value.details())


@pytest.mark.parametrize("wanted", [False, True])
async def test_a_decoupled_model_gives_many_answers_and_a_final_flag_if_asked(wanted: bool) -> None:
    def infer(inputs: Inputs) -> Any:
        for value in range(int(inputs["x"][0])):
            yield {"y": np.array([value], np.float32)}

    async with live({"count": Plain(infer)}) as server:
        parameters = {"triton_enable_empty_final_response": True} if wanted else {}
        call = server.stream_infer(sending(asking("count", 40, "a", **parameters)))
        answers = [answer async for answer in call]
    if wanted:
        last = answers.pop()
        assert final(last)
        assert not last.infer_response.outputs
        assert (last.infer_response.id, last.infer_response.model_name) == ("a", "count")
    assert values(answers) == [("a", value) for value in range(40)]
    assert not any(final(answer) for answer in answers)


@pytest.mark.parametrize("decoupled", [False, True])
async def test_a_deadline_is_the_status_of_the_call(decoupled: bool) -> None:
    """For a client that waits until the server says so; also after responses."""
    over = threading.Event()

    def infer(inputs: Inputs) -> dict[str, Any]:
        over.wait(20)
        return {"y": inputs["x"]}

    def infer_many(inputs: Inputs) -> Any:
        yield {"y": inputs["x"]}
        yield infer(inputs)

    async with live({"late": Plain(infer_many if decoupled else infer)}) as server:
        client = Client(*await asyncio.open_connection("127.0.0.1", server.server.grpc_port))
        await client.greet()
        fields = [(":authority", "a"), *request_fields(f"{METHOD}ModelStreamInfer"), ("grpc-timeout", "300m")]
        await client.send(client.raw_headers(1, fields), data(1, message(asking("late", 1, "a"))))
        received = await client.next(frames.DATA) if decoupled else None
        assert (await client.status(1))["grpc-status"] == "4"
        assert (received is not None) == decoupled
        over.set()
        await client.close()


async def test_a_client_that_leaves_stops_the_model() -> None:
    model = Counting()
    async with live({"endless": model}) as server:
        call = server.stream_infer(sending(asking("endless", 0, "a")))
        assert values([await call.read()]) == [("a", 1)]
        call.cancel()
        assert await asyncio.to_thread(model.closed.wait, 20)
        await until(lambda: server.leases() == 0)


async def test_a_slow_client_holds_the_model_up() -> None:
    """What gRPC itself buffers is bounded by its windows, so the answers are large."""
    made = 0

    def infer(inputs: Inputs) -> Any:
        nonlocal made
        while True:
            made += 1
            yield {"y": np.zeros(1 << 20, np.float32)}

    async with live({"endless": Plain(infer)}) as server, server.narrow() as stream_infer:
        call = stream_infer(sending(asking("endless", 0, "a")))
        for expected in range(1, 20):
            assert not (await call.read()).error_message
            assert made <= expected + STREAM_BUFFER + MAX_UNSENT + 32
        call.cancel()
        await until(lambda: server.leases() == 0)


async def test_a_deadline_ends_the_stream_and_the_model() -> None:
    model = Counting()
    async with live({"endless": model}) as server:

        async def read_all(seconds: float) -> None:
            call = server.stream_infer(timeout=seconds)
            # Without an end of the requests: the deadline of one of them may come first, and is told in band.
            await call.write(asking("endless", 0, "a"))
            async for _ in call:
                pass

        for later in ever_later(0.2):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await read_all(later)
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            if model.made:
                break
        assert await asyncio.to_thread(model.closed.wait, 20)
        await until(lambda: server.leases() == 0)


async def test_decoupled_models_are_refused_on_unary_calls() -> None:
    async with live({"endless": Counting()}) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.infer(request("endless", VALUE.pack(0)))
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
        assert caught.value.details() == "ModelInfer RPC doesn't support models with decoupled transaction policy"
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [0]}]}
        async with server.session.post(f"{server.url}/models/endless/infer", json=body) as response:
            assert response.status == 501
            text = (await response.json())["error"]
        assert text == "HTTP end point doesn't support models with decoupled transaction policy"


async def test_a_stopping_server_ends_streams_with_unavailable() -> None:
    gate = asyncio.Event()

    async def infer(inputs: Inputs) -> Any:
        yield {"y": number(1)["x"]}
        await gate.wait()

    async def open_ended() -> AsyncIterator[bytes]:
        yield asking("waiting", 0, "a")
        await gate.wait()

    async with live({"waiting": Plain(infer)}, grace=10) as server:
        call = server.stream_infer(open_ended())
        await call.read()
        stopping = asyncio.ensure_future(server.server.stop())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        assert caught.value.details() == "the server is shutting down"
        # Long before the grace period is over.
        await asyncio.wait_for(stopping, 5)
        gate.set()
