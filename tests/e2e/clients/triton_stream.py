"""Checks of streams with tritonclient.grpc and tritonclient.grpc.aio.

python triton_stream.py GRPC_ADDRESS REST_ADDRESS
"""

import asyncio
import queue
import sys
from contextlib import asynccontextmanager

import checks
import numpy as np
import tritonclient.grpc as sync_client
import tritonclient.grpc.aio as aio_client

FINAL = "triton_final_response"


def floats(*values):
    tensor = sync_client.InferInput("x", [len(values)], "FP32")
    return [tensor.set_data_from_numpy(np.array(values, dtype=np.float32))]


def text(words):
    tensor = sync_client.InferInput("text", [1], "BYTES")
    return [tensor.set_data_from_numpy(np.array([words], dtype=object))]


def run_stream(address, send, **options):
    """What the callback of one stream of the sync client is given, after `stop_stream` has returned."""
    answers = queue.Queue()
    with sync_client.InferenceServerClient(address) as client:
        client.start_stream(lambda result, error: answers.put((result, error)), **options)
        send(client)
        client.stop_stream()
    return list(answers.queue)


def final(result):
    return result.get_response().parameters[FINAL].bool_param


async def check_requests_are_answered_in_order_and_stop_returns(address):
    def send(client):
        for number in range(50):
            client.async_stream_infer("half_plus_two", floats(number), request_id=str(number))

    answers = await asyncio.to_thread(run_stream, address, send)
    assert [result.get_response().id for result, _ in answers] == [str(number) for number in range(50)]
    assert [result.as_numpy("y")[0] for result, _ in answers] == [number / 2 + 2 for number in range(50)]
    assert all(final(result) for result, _ in answers)


async def check_an_error_is_one_callback_and_the_stream_continues(address):
    def send(client):
        client.async_stream_infer("no_such_model", floats(1), request_id="a")
        client.async_stream_infer("half_plus_two", floats(2), request_id="b")

    (nothing, error), (result, no_error) = await asyncio.to_thread(run_stream, address, send)
    assert nothing is None
    assert "Request for unknown model: 'no_such_model' is not found" in str(error)
    assert no_error is None
    assert result.as_numpy("y").tolist() == [3.0]


async def check_a_decoupled_model_with_and_without_the_empty_final_answer(address):
    for wanted in (True, False):

        def send(client, wanted=wanted):
            client.async_stream_infer(
                "token_stream", text(b"a bc d"), request_id="t", enable_empty_final_response=wanted
            )

        results = [result for result, _ in await asyncio.to_thread(run_stream, address, send)]
        tokens = [result.as_numpy("token").tolist() for result in results if result.get_response().outputs]
        assert tokens == [[b"a"], [b"bc"], [b"d"]]
        assert [final(result) for result in results] == [False] * 3 + [True] * wanted


async def check_an_error_of_the_status_when_the_client_wants_it(address):
    def send(client):
        client.async_stream_infer("uppercase", text(b"\xff"), request_id="a")

    in_band = await asyncio.to_thread(run_stream, address, send)
    assert "text must be UTF-8" in str(in_band[0][1])
    headers = {"triton_grpc_error": "true"}
    answers = await asyncio.to_thread(run_stream, address, send, headers=headers)
    assert len(answers) == 1
    assert "text must be UTF-8" in str(answers[0][1])


async def check_the_aio_client(address):
    async def requests():
        for number in range(5):
            yield {"model_name": "half_plus_two", "inputs": floats(number), "request_id": str(number)}
        yield {"model_name": "no_such_model", "inputs": floats(1)}

    async with aio_client.InferenceServerClient(address) as client:
        answers = [answer async for answer in client.stream_infer(requests())]
    assert [result.as_numpy("y")[0] for result, _ in answers[:5]] == [2, 2.5, 3, 3.5, 4]
    assert "unknown model" in str(answers[5][1])


async def check_the_aio_client_may_leave_in_the_middle(address):
    async def requests():
        while True:
            yield {"model_name": "token_stream", "inputs": text(b"word " * 1000)}
            await asyncio.sleep(0)

    async with aio_client.InferenceServerClient(address) as client:
        stream = client.stream_infer(requests())
        async for result, error in stream:
            assert error is None
            assert result.as_numpy("token").tolist() == [b"word"]
            break
        stream.cancel()
        assert await client.is_server_ready()


@asynccontextmanager
async def open_subject():
    yield sys.argv[1]


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], open_subject)
