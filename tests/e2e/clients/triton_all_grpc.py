"""Checks of every function of tritonclient.grpc or tritonclient.grpc.aio.

python triton_all_grpc.py GRPC_ADDRESS REST_ADDRESS grpc|grpc.aio
"""

import asyncio
import queue
import sys
import threading

import checks
import grpc
import numpy as np
import triton_all_common
import triton_all_control
from checks import Raises
from samples import assert_same
from triton_all_subject import close, open_all
from triton_subject import GRPC
from tritonclient.grpc import service_pb2, service_pb2_grpc

SECONDS = 60


async def answers(t, requests, **options):
    """What a stream gives back to requests, each a dict of arguments: (result, error), in order of arrival."""
    if t.kind == GRPC:
        return await asyncio.to_thread(_stream, t, requests, options)

    async def given():
        for request in requests:
            yield request

    return [answer async for answer in t.client.stream_infer(given(), **options)]


def _stream(t, requests, options):
    found = queue.Queue()
    t.plain.start_stream(lambda result, error: found.put((result, error)), **options)
    try:
        for request in requests:
            t.plain.async_stream_infer(**request)
    finally:
        t.plain.stop_stream()
    return list(found.queue)


def repeat(t, values, delay=0, **more):
    inputs = [
        t.input("IN", np.array(values, np.int32)),
        t.input("DELAY", np.full(len(values), delay, np.uint32)),
        t.input("WAIT", np.zeros(1, np.uint32)),
    ]
    return {"model_name": "repeat_int32", "inputs": inputs, **more}


def wait(t, seconds):
    return [t.input("SECONDS", np.array([seconds], np.float32))]


async def check_explicit_contents(t):
    """As the clients that are made from the contract send them: typed, not raw."""

    def run():
        request = service_pb2.ModelInferRequest(model_name="simple")
        for at, value in enumerate((30, 12)):
            tensor = request.inputs.add(name=f"INPUT{at}", datatype="INT32", shape=[1, 16])
            tensor.contents.int_contents[:] = [value] * 16
        text = service_pb2.ModelInferRequest(model_name="simple_identity")
        added = text.inputs.add(name="INPUT0", datatype="BYTES", shape=[1, 2])
        added.contents.bytes_contents[:] = [b"explicit", b""]
        with grpc.insecure_channel(t.address) as channel:
            stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
            return stub.ModelInfer(request, timeout=SECONDS), stub.ModelInfer(text, timeout=SECONDS)

    numbers, words = await asyncio.to_thread(run)
    found = {output.name: raw for output, raw in zip(numbers.outputs, numbers.raw_output_contents, strict=True)}
    assert np.frombuffer(found["OUTPUT0"], np.int32).tolist() == [42] * 16
    assert np.frombuffer(found["OUTPUT1"], np.int32).tolist() == [18] * 16
    assert words.raw_output_contents[0] == b"\x08\0\0\0explicit\0\0\0\0"


async def check_compression(t):
    values = np.zeros((4, 100_000), np.float32)
    for algorithm in ("gzip", "deflate"):
        result = await t.client.infer(
            "identity_fp32", [t.input("INPUT0", values)], compression_algorithm=algorithm
        )
        assert_same(result.as_numpy("OUTPUT0"), values)


async def check_keepalive_and_channel_options(t):
    keepalive = t.module.KeepAliveOptions(
        keepalive_time_ms=10_000,
        keepalive_timeout_ms=5_000,
        keepalive_permit_without_calls=True,
        http2_max_pings_without_data=0,
    )
    for options in ({"keepalive_options": keepalive}, {"channel_args": [("grpc.primary_user_agent", "mine")]}):
        client = t.module.InferenceServerClient(t.address, **options)
        try:
            result = client.infer("simple", t.pair(1, 2), headers={"x-header": "value"})
            result = result if t.kind == GRPC else await result
            assert result.as_numpy("OUTPUT0").tolist() == [[3] * 16]
        finally:
            await close(t, client)


async def check_client_timeouts(t):
    assert await t.client.is_server_live(client_timeout=SECONDS) is True
    result = await t.client.infer("simple", t.pair(1, 2), client_timeout=SECONDS)
    assert result.as_numpy("OUTPUT1").tolist() == [[-1] * 16]
    call = t.client.infer("wait", wait(t, SECONDS), client_timeout=0.2)
    # The client's own text, or the server's where that is quicker.
    await t.refused(call, "eadline", grpc="DEADLINE_EXCEEDED", http=None)
    # The model has noticed, or this one would come too late.
    result = await t.client.infer("wait", wait(t, 0), client_timeout=SECONDS / 2)
    assert result.as_numpy("WAITED")[0] < SECONDS / 2


async def check_cancellation(t):
    if t.kind == GRPC:
        done, found = threading.Event(), []

        def callback(result, error):
            found.append((result, error))
            done.set()

        t.plain.async_infer("wait", wait(t, SECONDS), callback).cancel()
        assert await asyncio.to_thread(done.wait, SECONDS)
        result, error = found[0]
        assert result is None
        assert error.status() == "StatusCode.CANCELLED"
    else:
        task = asyncio.ensure_future(t.client.infer("wait", wait(t, SECONDS)))
        await asyncio.sleep(0)
        task.cancel()
        with Raises(asyncio.CancelledError):
            await task
    result = await t.client.infer("wait", wait(t, 0), client_timeout=SECONDS / 2)
    assert result.as_numpy("WAITED")[0] < SECONDS / 2


async def check_async_infer_with_all_its_arguments(t):
    options = {
        "model_version": "1",
        "outputs": [t.wanted("OUTPUT1")],
        "request_id": "all",
        "priority": 2,
        "timeout": 60_000_000,
        "client_timeout": SECONDS,
        "headers": {"x-header": "1"},
        "compression_algorithm": "gzip",
        "parameters": {"text": "v", "count": 3, "share": 0.5, "flag": True},
    }
    if t.kind == GRPC:
        found = queue.Queue()
        t.plain.async_infer("simple", t.pair(5, 1), lambda result, error: found.put((result, error)), **options)
        result, error = await asyncio.to_thread(found.get, True, SECONDS)
        assert error is None
    else:
        result = await t.client.infer("simple", t.pair(5, 1), **options)
    assert result.as_numpy("OUTPUT1").tolist() == [[4] * 16]
    assert result.get_response().id == "all"


async def check_a_stream_of_ordinary_requests(t):
    requests = [
        {"model_name": "simple", "inputs": t.pair(number, 1), "request_id": str(number)} for number in range(20)
    ]
    requests.insert(5, {"model_name": "nope", "inputs": t.pair(0, 0), "request_id": "bad"})
    found = await answers(t, requests, stream_timeout=SECONDS, headers={"x-header": "1"})
    assert [error is None for _, error in found] == [at != 5 for at in range(21)]
    assert "Request for unknown model: 'nope' is not found" in found[5][1].message()
    results = [result for result, error in found if error is None]
    assert [result.get_response().id for result in results] == [str(number) for number in range(20)]
    assert [result.as_numpy("OUTPUT0")[0, 0] for result in results] == list(range(1, 21))


async def check_a_stream_of_a_decoupled_model(t):
    requests = [repeat(t, [4, 2, 0, 1], request_id="four"), repeat(t, [7], request_id="one")]
    requests.append(repeat(t, [], request_id="none"))
    if t.kind == GRPC:
        for request in requests:
            request["enable_empty_final_response"] = True
    found = await answers(t, requests, compression_algorithm="gzip")
    assert [error for _, error in found if error is not None] == []
    values = {"four": [], "one": [], "none": []}
    finals = dict.fromkeys(values, 0)
    for result, _ in found:
        response = result.get_response()
        if response.outputs:
            values[response.id].append((result.as_numpy("IDX").item(), result.as_numpy("OUT").item()))
        finals[response.id] += response.parameters["triton_final_response"].bool_param
    assert values == {"four": [(0, 4), (1, 2), (2, 0), (3, 1)], "one": [(0, 7)], "none": []}
    assert finals == dict.fromkeys(values, 1 if t.kind == GRPC else 0)


async def check_a_stream_of_sequences(t):
    numbers = [2000 + t.next() for _ in range(3)]
    requests = [
        {
            "model_name": model,
            "inputs": [t.input("INPUT", np.array([[value]], np.int32))],
            "request_id": f"{model} {number}",
            "sequence_id": number,
            "sequence_start": value == 1,
            "sequence_end": value == 5,
        }
        for value in range(1, 6)
        for number in numbers
        for model in ("simple_sequence", "accumulator")
    ]
    found = await answers(t, requests)
    assert [error for _, error in found if error is not None] == []
    for number in numbers:
        for model, last in (("simple_sequence", 15), ("accumulator", 15 + number)):
            mine = [result for result, _ in found if result.get_response().id == f"{model} {number}"]
            assert [result.as_numpy("OUTPUT").item() for result in mine] == [1, 3, 6, 10, last]


async def check_a_stream_that_is_cancelled(t):
    request = repeat(t, [1] * 1000, delay=60)
    if t.kind == GRPC:
        found = queue.Queue()
        t.plain.start_stream(lambda result, error: found.put((result, error)))
        try:
            t.plain.async_stream_infer(**request)
            _, error = await asyncio.to_thread(found.get, True, SECONDS)
            assert error is None
        finally:
            await asyncio.to_thread(t.plain.stop_stream, cancel_requests=True)
    else:

        async def given():
            yield request
            await asyncio.sleep(SECONDS)

        stream = t.client.stream_infer(given())
        async for _, error in stream:
            assert error is None
            break
        stream.cancel()
    assert await t.client.is_server_ready() is True


async def check_a_stream_with_an_error_as_its_status(t):
    words = {"model_name": "words_to_numbers", "inputs": [t.input("WORDS", np.array([[b"x"] * 16], object))]}
    ((result, error),) = await answers(t, [words])
    assert result is None
    assert "invalid literal for int()" in error.message()
    call = answers(t, [words], headers={"triton_grpc_error": "true"})
    if t.kind == GRPC:
        ((_, error),) = await call
        status, text = error.status(), error.message()
    else:
        with Raises(grpc.RpcError) as caught:
            await call
        status, text = str(caught.error.code()), caught.error.details()
    assert status == "StatusCode.INVALID_ARGUMENT", status
    assert "invalid literal for int()" in text


async def check_messages_instead_of_json(t):
    live = await t.client.get_server_metadata()
    assert live.name == "triton"
    assert (await t.client.get_model_config("simple")).config.max_batch_size == 8
    assert (await t.client.get_model_repository_index()).models
    statistics = await t.client.get_inference_statistics("simple")
    assert statistics.model_stats[0].version == "1"
    assert "log_info" in (await t.client.get_log_settings()).settings
    assert "trace_level" in (await t.client.get_trace_settings()).settings
    assert not (await t.client.get_system_shared_memory_status()).regions
    assert not (await t.client.get_cuda_shared_memory_status()).regions


async def check_every_public_function_was_called(t):
    client = t.module.InferenceServerClient(t.address)
    await close(t, client)
    assert not t.calls.missing, sorted(t.calls.missing)


if __name__ == "__main__":
    address, _, kind = sys.argv[1:]
    checks.run([triton_all_common, triton_all_control, sys.modules["__main__"]], lambda: open_all(kind, address))
