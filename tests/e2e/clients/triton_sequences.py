"""Checks of sequences with tritonclient.grpc, tritonclient.grpc.aio and tritonclient.http.

python triton_sequences.py GRPC_ADDRESS REST_ADDRESS
"""

import asyncio
import itertools
import queue
import sys
from contextlib import asynccontextmanager

import checks
import numpy as np
import tritonclient.grpc as sync_client
import tritonclient.grpc.aio as aio_client
import tritonclient.http as http_client
from tritonclient.utils import InferenceServerException

MODELS = ("direct", "oldest", "onnx")
"""Each answers the sum of what its sequence has sent."""
_numbers = itertools.count(1)


class Subject:
    """The addresses, and unused ids."""

    def __init__(self, grpc, rest):
        self.grpc = grpc
        self.rest = rest

    def id_of(self, model):
        """A text where the model's ids are texts."""
        number = next(_numbers)
        return f"sequence-{number}" if model == "oldest" else number


def tensor(module, value):
    input_tensor = module.InferInput("x", [1, 1], "FP32")
    input_tensor.set_data_from_numpy(np.array([[value]], dtype=np.float32))
    return [input_tensor]


def flags(at, last):
    return {"sequence_start": at == 0, "sequence_end": at == last}


def sum_of(result):
    (value,) = result.as_numpy("y").ravel().tolist()
    return value


def unary(module, address, model, sequence_id):
    with module.InferenceServerClient(address) as client:
        return [
            sum_of(client.infer(model, tensor(module, at + 1), sequence_id=sequence_id, **flags(at, 4)))
            for at in range(5)
        ]


async def check_unary_calls_of_grpc(t):
    for model in MODELS:
        sums = await asyncio.to_thread(unary, sync_client, t.grpc, model, t.id_of(model))
        assert sums == [1, 3, 6, 10, 15], (model, sums)


async def check_unary_calls_of_http(t):
    for model in MODELS:
        sums = await asyncio.to_thread(unary, http_client, t.rest, model, t.id_of(model))
        assert sums == [1, 3, 6, 10, 15], (model, sums)


async def check_many_sequences_at_once(t):
    async with aio_client.InferenceServerClient(t.grpc) as client:

        async def run(model):
            sequence_id = t.id_of(model)
            results = [
                await client.infer(model, tensor(aio_client, at + 1), sequence_id=sequence_id, **flags(at, 4))
                for at in range(5)
            ]
            return [sum_of(result) for result in results]

        sums = await asyncio.gather(*[run(model) for model in MODELS * 7])
    assert sums == [[1, 3, 6, 10, 15]] * 21


async def check_a_stream_keeps_the_order_of_each_sequence(t):
    ids = {(model, number): t.id_of(model) for model in MODELS for number in range(2)}

    def stream():
        answers = queue.Queue()
        with sync_client.InferenceServerClient(t.grpc) as client:
            client.start_stream(lambda result, error: answers.put((result, error)))
            for at in range(20):
                for (model, _), sequence_id in ids.items():
                    client.async_stream_infer(
                        model,
                        tensor(sync_client, at),
                        request_id=f"{model} {sequence_id}",
                        sequence_id=sequence_id,
                        **flags(at, 19),
                    )
            client.stop_stream()
        return list(answers.queue)

    answers = await asyncio.to_thread(stream)
    assert [error for _, error in answers if error is not None] == []
    for (model, _), sequence_id in ids.items():
        sums = [sum_of(answer) for answer, _ in answers if answer.get_response().id == f"{model} {sequence_id}"]
        assert sums == np.cumsum(range(20)).tolist(), (model, sums)


async def check_the_aio_clients_stream(t):
    async def requests():
        for at in range(10):
            yield {
                "model_name": "oldest",
                "inputs": tensor(aio_client, at),
                "sequence_id": "aio",
                **flags(at, 9),
            }

    async with aio_client.InferenceServerClient(t.grpc) as client:
        answers = [answer async for answer in client.stream_infer(requests())]
    assert [error for _, error in answers if error is not None] == []
    assert [sum_of(result) for result, _ in answers] == np.cumsum(range(10)).tolist()


def refused(call):
    with checks.Raises(InferenceServerException) as caught:
        call()
    return caught.error.status(), caught.error.message()


async def check_errors(t):
    def run():
        with sync_client.InferenceServerClient(t.grpc) as client:
            infer = client.infer
            two = sync_client.InferInput("x", [2, 1], "FP32")
            two.set_data_from_numpy(np.ones((2, 1), np.float32))
            return [
                refused(lambda: infer("direct", tensor(sync_client, 1), sequence_id=999)),
                refused(lambda: infer("direct", tensor(sync_client, 1))),
                refused(lambda: infer("direct", tensor(sync_client, 1), sequence_id="a", sequence_start=True)),
                refused(lambda: infer("oldest", tensor(sync_client, 1), sequence_id=5, sequence_start=True)),
                refused(lambda: infer("direct", [two], sequence_id=999, sequence_start=True)),
            ]

    texts = [
        "inference request for sequence 999 to model 'direct' must specify the START flag on the first request of "
        "the sequence",
        "inference request to model 'direct' must specify a non-zero or non-empty correlation ID",
        "sequence id 'a': expected an integer of type UINT64, the type of the model's input",
        "sequence id 5: expected a string",
        "must specify batch-size 1 due to requirements of sequence batcher",
    ]
    for (status, message), text in zip(await asyncio.to_thread(run), texts, strict=True):
        assert status == "StatusCode.INVALID_ARGUMENT", message
        assert text in message


async def check_an_error_on_a_stream_leaves_the_sequence_alone(t):
    async def requests():
        for value, more in (
            (1, {"sequence_start": True}),
            (2, {"sequence_id": 998}),
            (3, {"sequence_end": True}),
        ):
            yield {"model_name": "direct", "inputs": tensor(aio_client, value), "sequence_id": 997, **more}

    async with aio_client.InferenceServerClient(t.grpc) as client:
        first, second, third = [answer async for answer in client.stream_infer(requests())]
    assert (sum_of(first[0]), sum_of(third[0])) == (1, 4)
    assert "must specify the START flag" in str(second[1])


async def check_metadata_has_only_what_clients_send_and_get(t):
    async with aio_client.InferenceServerClient(t.grpc) as client:
        for model in MODELS:
            metadata = await client.get_model_metadata(model)
            assert [tensor.name for tensor in metadata.inputs] == ["x"], model
            assert [output.name for output in metadata.outputs] == ["y"], model


@asynccontextmanager
async def open_subject():
    yield Subject(*sys.argv[1:])


if __name__ == "__main__":
    checks.run([sys.modules["__main__"]], open_subject)
