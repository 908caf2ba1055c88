"""ModelStreamInfer rule by rule (spec 2.8)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import grpc
import grpc.aio
import numpy as np
import pytest

from tests.protocols.stream_requests import FINAL, WANTED, Inputs, answers, asking, parameters, sending, value, y
from tests.scheduling.scripted_models import Plain, Scripted
from tests.transports.live import live
from tests.waiting import until
from triglot import FailedPrecondition, Model, TensorSpec, Unavailable
from triglot.core.response_buffer import STREAM_BUFFER
from triglot.core.types import Answer
from triglot.model.scheduling import SequenceBatching
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.stream import MAX_UNSENT

pytestmark = pytest.mark.both_transports


class Repeat(Model):
    """As many answers as are asked for; the last one says that it is the last where `says_final`."""

    inputs, outputs = Plain.inputs, Plain.outputs

    def __init__(self, *, says_final: bool = False, then: Callable[[], Any] = lambda: None) -> None:
        self.says_final = says_final
        self.then = then

    def infer(self, inputs: Inputs) -> Iterator[Answer]:
        count = int(inputs["x"][0])
        for at in range(count):
            yield Answer(y(at), {"at": at, "of": "all"}, final=self.says_final and at == count - 1)
        if self.then() is not None:
            yield Answer(y(-1))


# --- triton_final_response ---


@pytest.mark.parametrize("wants_empty", [False, True])
@pytest.mark.parametrize("says_final", [False, True])
@pytest.mark.parametrize("count", [0, 1, 3])
async def test_who_says_final_needs_no_empty_answer(count: int, says_final: bool, wants_empty: bool) -> None:
    async with live({"repeat": Repeat(says_final=says_final)}) as server:
        asked = asking("repeat", count, "7", **(WANTED if wants_empty else {}))
        found = await answers(server, asked)
    content = [response for response in found if response.infer_response.outputs]
    assert [value(response) for response in content] == list(range(count))
    assert [parameters(response) for response in content] == [
        {"at": at, "of": "all", FINAL: says_final and at == count - 1} for at in range(count)
    ]
    empty = found[count:]
    if says_final and count:
        assert empty == []
    elif wants_empty:
        (end,) = empty
        assert (end.infer_response.id, end.infer_response.model_name) == ("7", "repeat")
        assert (list(end.infer_response.raw_output_contents), parameters(end)) == ([], {FINAL: True})
        assert not end.error_message
    else:
        assert empty == []


async def test_an_answer_after_the_final_one_is_an_error_in_band() -> None:
    async with live({"repeat": Repeat(says_final=True, then=lambda: 1)}) as server:
        found = await answers(server, asking("repeat", 2, "7"), asking("repeat", 1, "8", **WANTED))
        assert server.leases() == 0
    for request_id, count in (("7", 2), ("8", 1)):
        own = [response for response in found if response.infer_response.id == request_id]
        assert [value(response) for response in own[:-1]] == list(range(count))
        assert own[-1].error_message == "model 'repeat' sent a response after its final response"


async def test_ordinary_models_answer_with_final_even_if_they_say_something_else() -> None:
    async with live({"plain": Plain(lambda inputs: Answer(y(5), {FINAL: False, "mine": 1.5}))}) as server:
        (found,) = await answers(server, asking("plain", **WANTED))
    assert parameters(found) == {FINAL: True, "mine": 1.5}


async def test_an_empty_final_answer_names_the_version_that_was_asked_for() -> None:
    async with live({"repeat": Repeat()}) as server:
        message = pb.ModelInferRequest.FromString(asking("repeat", 0, **WANTED))
        message.model_version = "1"
        (end,) = await answers(server, message.SerializeToString())
    assert end.infer_response.model_version == "1"


# --- errors ---


async def test_an_error_has_the_id_the_name_and_the_version_of_its_request_and_nothing_else() -> None:
    async with live({"good": Scripted()}) as server:
        message = pb.ModelInferRequest.FromString(asking("good", 1, "7"))
        message.model_version = "9"
        (found,) = await answers(server, message.SerializeToString())
    assert "version 9" in found.error_message
    expected = pb.ModelInferResponse(id="7", model_name="good", model_version="9")
    assert found.infer_response == expected


async def test_responses_before_a_decoupled_failure_are_sent() -> None:
    def fail() -> None:
        raise FailedPrecondition("no more")

    async with live({"repeat": Repeat(then=fail), "good": Scripted()}) as server:
        found = await answers(server, asking("repeat", 2, "7", **WANTED), asking("good", 1, "8"))
    own = [response for response in found if response.infer_response.id == "7"]
    assert [value(response) for response in own[:2]] == [0, 1]
    assert [response.error_message for response in own[2:]] == ["no more"]  # And no empty final answer.
    assert [value(response) for response in found if response.infer_response.id == "8"] == [2]


@pytest.mark.parametrize("fails", [False, True])
async def test_several_long_answers_of_a_thread_end_once(fails: bool) -> None:
    """Each of them is encoded on a thread, and the next one is ready by then."""

    class Long(Model):
        inputs = Plain.inputs
        outputs = [TensorSpec("y", "BYTES", [-1])]

        def infer(self, inputs: Inputs) -> Iterator[dict[str, Any]]:
            for at in range(5):
                yield {"y": np.full(1 << 15, b"%d" % at, object)}
            if fails:
                raise FailedPrecondition("no more")

    async with live({"long": Long()}) as server:
        found = await answers(server, asking("long", 0, **WANTED))
        in_flight = server.server.telemetry.in_flight
    contents = [
        response.infer_response.raw_output_contents[0] for response in found if response.infer_response.outputs
    ]
    assert [content[4:5] for content in contents] == [b"%d" % at for at in range(5)]
    (last,) = found[5:]
    assert last.error_message == ("no more" if fails else "")
    assert in_flight == 0


@pytest.mark.parametrize("flag", ["true", "false", "TRUE"])
async def test_only_true_ends_the_call_with_a_status(flag: str) -> None:
    status_sent = asyncio.Event()

    def infer(inputs: Inputs) -> Any:
        raise Unavailable("not now")

    async def requests() -> AsyncIterator[Any]:
        yield asking("good", 1, "a")
        yield asking("bad", 1, "b")
        if flag == "true":
            await status_sent.wait()  # grpc's client tells of a status as INTERNAL when it comes while it writes.
        yield asking("good", 2, "c")

    async with live({"bad": Plain(infer), "good": Scripted()}) as server:
        call = server.stream_infer(requests(), metadata=(("triton_grpc_error", flag),), timeout=30)
        assert value(await call.read()) == 2
        if flag == "true":
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert (caught.value.code(), caught.value.details()) == (grpc.StatusCode.UNAVAILABLE, "not now")
            status_sent.set()
        else:
            assert (await call.read()).error_message == "not now"
            assert value(await call.read()) == 4
            assert await call.read() is grpc.aio.EOF
        await until(lambda: server.leases() == 0)


async def test_what_no_queue_has_taken_ends_no_call() -> None:
    model = Scripted(open_gate=False)
    async with live({"busy": model}, max_queue_size=1) as server:
        runs = asyncio.ensure_future(answers(server, asking("busy", 1)))
        await model.until_at("infer")
        waits = asyncio.ensure_future(answers(server, asking("busy", 2)))
        await until(lambda: server.server.manager.registry.servable("busy").queue_depth == 1)
        call = server.stream_infer(
            sending(asking("busy", 3)), metadata=(("triton_grpc_error", "true"),), timeout=30
        )
        text = "Exceeds maximum queue size: 1 requests are queued, the most that max_queue_size allows"
        assert (await call.read()).error_message == f"[request id: <id_unknown>] {text}"
        assert await call.read() is grpc.aio.EOF
        model.open_point("infer")
        assert [value(run) for run in (*await runs, *await waits)] == [2, 4]


async def test_a_status_cancels_what_still_runs() -> None:
    cancelled = asyncio.Event()

    async def forever(inputs: Inputs) -> Any:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    async def endless(inputs: Inputs) -> AsyncIterator[Any]:
        if inputs:
            raise Unavailable("not now")
        yield y(0)

    async with live({"forever": Plain(forever), "bad": Plain(endless)}) as server:
        call = server.stream_infer(
            sending(asking("forever"), asking("bad")), metadata=(("triton_grpc_error", "true"),), timeout=30
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.details() == "not now"
        await asyncio.wait_for(cancelled.wait(), 20)
        await until(lambda: server.leases() == 0)


async def test_decoupled_error_is_sent_at_once() -> None:
    gate = asyncio.Event()

    async def slow(inputs: Inputs) -> Any:
        await gate.wait()
        return y(inputs["x"][0])

    async def fail(inputs: Inputs) -> AsyncIterator[Any]:
        if inputs:
            raise Unavailable("not now")
        yield y(0)

    async with live({"slow": Plain(slow), "bad": Plain(fail), "good": Scripted()}) as server:
        call = server.stream_infer(
            sending(asking("slow", 1, "a"), asking("bad", 1, "b"), asking("good", 2, "c")), timeout=30
        )
        assert (await call.read()).error_message == "not now"
        gate.set()
        assert [value(await call.read()), value(await call.read())] == [1, 4]
        assert await call.read() is grpc.aio.EOF


# --- how requests run side by side ---


async def test_requests_run_at_the_same_time_and_their_answers_keep_the_order() -> None:
    gates = [asyncio.Event() for _ in range(8)]
    running: set[int] = set()

    async def infer(inputs: Inputs) -> Any:
        at = int(inputs["x"][0])
        running.add(at)
        await gates[at].wait()
        return y(at)

    async with live({"gated": Plain(infer)}) as server:
        call = server.stream_infer(sending(*(asking("gated", at) for at in range(8))), timeout=30)
        await until(lambda: len(running) == 8)
        for gate in reversed(gates):
            gate.set()
        assert [value(response) async for response in call] == list(range(8))


async def test_a_half_closed_call_gets_all_its_answers() -> None:
    gate = asyncio.Event()

    async def infer(inputs: Inputs) -> AsyncIterator[Any]:
        yield y(1)
        await gate.wait()
        yield y(2)

    async with live({"gated": Plain(infer)}) as server:
        call = server.stream_infer(timeout=30)
        await call.write(asking("gated"))
        await call.done_writing()
        assert value(await call.read()) == 1
        gate.set()
        assert value(await call.read()) == 2
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is grpc.StatusCode.OK


async def test_a_client_that_cancels_cancels_every_request() -> None:
    started, cancelled = 0, 0

    async def infer(inputs: Inputs) -> Any:
        nonlocal started, cancelled
        started += 1
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            cancelled += 1
            raise

    async with live({"forever": Plain(infer)}) as server:
        call = server.stream_infer(sending(*(asking("forever") for _ in range(5))))
        await until(lambda: started == 5)
        call.cancel()
        await until(lambda: cancelled == 5)
        await until(lambda: server.leases() == 0)


async def test_a_slow_reader_bounds_what_all_models_make_together() -> None:
    made = 0

    async def infer(inputs: Inputs) -> AsyncIterator[Any]:
        nonlocal made
        while True:
            made += 1
            yield {"y": np.zeros(1 << 18, np.float32)}

    models = 3
    async with live({"endless": Plain(infer)}) as server, server.narrow() as stream_infer:
        call = stream_infer(sending(*(asking("endless", request_id=str(at)) for at in range(models))))
        for taken in range(1, 40):
            assert not (await call.read()).error_message
            # Each answer is a megabyte, of which gRPC itself holds some.
            assert made <= taken + MAX_UNSENT + models * (STREAM_BUFFER + 1) + 16
        call.cancel()
        await until(lambda: server.leases() == 0)


# --- a server that ends ---


class Steps(Scripted):
    sequence_batching = SequenceBatching(max_idle=3600)
    inputs = [TensorSpec("x", "FP32", [-1])]


async def test_draining_server_continues_sequences_and_refuses_others_in_band() -> None:
    async with live({"steps": Steps(), "good": Scripted()}) as server:
        call = server.stream_infer(timeout=30)
        await call.write(asking("steps", 1, "a", sequence_id=7, sequence_start=True))
        assert value(await call.read()) == 2
        await server.server.drain(0)
        await call.write(asking("steps", 2, "b", sequence_id=8, sequence_start=True))
        refused = await call.read()
        assert refused.infer_response.id == "b"
        assert "shutting down" in refused.error_message
        await call.write(asking("steps", 3, "c", sequence_id=7, sequence_end=True))
        assert value(await call.read()) == 6
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_a_server_that_has_stopped_ends_an_idle_stream_with_unavailable() -> None:
    async with live({"good": Scripted()}) as server:
        call = server.stream_infer(timeout=30)
        await call.write(asking("good", 1))
        assert value(await call.read()) == 2
        stopping = asyncio.ensure_future(server.server.stop())
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        await stopping
