"""TensorFlow Serving's batching, from its flags and files to PredictionService's answers (tfs 6.5)."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import numpy as np
import pytest

import triglot
from tests.served_models import SECONDS, Served
from tests.waiting import until
from triglot.cli import tfserving as tfserving_cli
from triglot.cli.tfserving import read_parameters
from triglot.core.errors import ModelLoadError
from triglot.pb.tfserving import predict_pb2, tensor_pb2
from triglot.protocols.tfserving.batching import PER_MODEL_FILE
from triglot.repository.config.settings import ModelSettings
from triglot.testing import GatedModel

PREDICT = "/tensorflow.serving.PredictionService/Predict"
NEVER = "batch_timeout_micros { value: 30000000 }"
"""A window that no test waits for: the batch fills up before."""
Arrays = Mapping[str, np.ndarray[Any, Any]]


class Sizes(GatedModel):
    """Says of each row how many rows came with it, as a model of a file would."""

    platform = "onnxruntime_onnx"
    inputs = [triglot.TensorSpec("x", "FP32", [-1, -1]), triglot.TensorSpec("k", "FP32", [-1])]
    outputs = [
        triglot.TensorSpec("y", "FP32", [-1, -1]),
        triglot.TensorSpec("n", "INT32", [-1]),
    ]

    def __init__(self) -> None:
        super().__init__()
        self.ran: list[int] = []

    def infer(self, inputs: Arrays) -> dict[str, Any]:
        rows = len(inputs["k"])
        self.ran.append(rows)
        self.wait_at("infer")
        return {"y": inputs["x"] + inputs["k"][:, None], "n": np.full(rows, rows, np.int32)}


class Counting(Sizes):
    """Has an output that is not a list of rows."""

    outputs = [triglot.TensorSpec("y", "FP32", [-1, -1]), triglot.TensorSpec("n", "INT32", [])]


class Running:
    """A server of TensorFlow Serving's flags, its model "m", and a client."""

    def __init__(self, server: triglot.Server, model: Sizes, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.model = model
        self._call = channel.unary_unary(
            PREDICT,
            request_serializer=predict_pb2.PredictRequest.SerializeToString,
            response_deserializer=predict_pb2.PredictResponse.FromString,
        )

    async def predict(self, x: Any, k: Any, outputs: Sequence[str] = ()) -> dict[str, Any]:
        """The outputs as lists."""
        request = predict_pb2.PredictRequest(model_spec={"name": "m"}, output_filter=outputs)
        for name, values in (("x", x), ("k", k)):
            array = np.array(values, np.float32)
            tensor = request.inputs[name]
            tensor.dtype, tensor.tensor_content = tensor_pb2.DT_FLOAT, array.tobytes()
            tensor.tensor_shape.SetInParent()
            for size in array.shape:
                tensor.tensor_shape.dim.add(size=size)
        answer = await self._call(request, timeout=SECONDS)
        return {
            name: np.array(tensor.float_val or tensor.int_val)
            .reshape([dim.size for dim in tensor.tensor_shape.dim])
            .tolist()
            for name, tensor in answer.outputs.items()
        }

    async def sizes(self, *rows: int) -> list[list[int]]:
        """Of requests with so many rows, all at once, what each gets of its batch."""
        answers = await asyncio.gather(*[self.predict([[0.0]] * count, [0] * count) for count in rows])
        return [answer["n"] for answer in answers]

    async def error(self, x: Any, k: Any) -> tuple[grpc.StatusCode, str]:
        """Of a request that fails."""
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.predict(x, k)
        return caught.value.code(), caught.value.details() or ""

    async def rest_error(self, x: Any, k: Any) -> tuple[int, str]:
        """Of a REST request of one row that fails: the status, and Retry-After."""
        url = f"http://127.0.0.1:{self.server.rest_port}/v1/models/m:predict"
        body = {"instances": [{"x": x, "k": k}]}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as answer:
            return answer.status, answer.headers.get("Retry-After", "")


@asynccontextmanager
async def running(
    folder: Path, text: str = "", *, own: str | None = None, kind: type[Sizes] = Sizes, **flags: Any
) -> AsyncIterator[Running]:
    """`text` is the parameters file; `own` the version's own parameters."""
    version = folder / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.onnx").write_bytes(b"")
    if own is not None:
        (version / PER_MODEL_FILE).write_text(own)
    (folder / "batching.config").write_text(text)
    flags = {"enable_batching": True, "batching_parameters_file": str(folder / "batching.config")} | flags
    model = kind()
    config = triglot.Config(grpc_port=0, rest_port=0, protocols="tfserving", grace=1.0)
    async with (
        triglot.Server(
            models=[ModelSettings("m", folder / "m")],
            config=config,
            load=lambda *_: model,
            adapt=tfserving_cli.batching(flags),
        ) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        yield Running(server, model, channel)


async def test_requests_share_a_batch(tmp_path: Path) -> None:
    async with running(tmp_path, f"max_batch_size {{ value: 4 }} {NEVER}") as here:
        assert await here.sizes(1, 1, 1, 1) == [[4]] * 4
        assert await here.sizes(2, 1, 1) == [[4, 4], [4], [4]]
        first, second = await asyncio.gather(
            here.predict([[1, 2], [3, 4]], [10, 20]), here.predict([[5, 6], [7, 8]], [30, 40])
        )
        assert (first["y"], second["y"]) == ([[11, 12], [23, 24]], [[35, 36], [47, 48]])


async def test_requests_that_ask_for_some_outputs_share_it_too(tmp_path: Path) -> None:
    async with running(tmp_path, f"max_batch_size {{ value: 2 }} {NEVER}") as here:
        some, every = await asyncio.gather(here.predict([[0]], [0], ["n"]), here.predict([[1]], [1]))
        assert some == {"n": [2]}
        assert every == {"n": [2], "y": [[2]]}


async def test_by_default_no_request_waits(tmp_path: Path) -> None:
    async with running(tmp_path) as here:
        assert await here.sizes(1) == [[1]]
        assert await here.sizes(1000) == [[1000] * 1000]


async def test_without_the_flag_every_request_runs_alone(tmp_path: Path) -> None:
    async with running(tmp_path, enable_batching=False, batching_parameters_file="") as here:
        assert await here.sizes(1, 2, 3) == [[1], [2, 2], [3, 3, 3]]
        assert (await here.predict([[0]], [0, 0]))["n"] == [2, 2]


async def test_what_cannot_be_batched(tmp_path: Path) -> None:
    invalid = grpc.StatusCode.INVALID_ARGUMENT
    async with running(tmp_path, "max_batch_size { value: 4 }") as here:
        text = "Task size 5 is larger than maximum input batch size 4"
        assert await here.error([[0]] * 5, [0] * 5) == (invalid, text)
        text = "Batching Run() input tensors must have at least one dimension"
        assert await here.error([[0]], 0) == (invalid, text)
        text = "Batching Run() input tensors must have equal 0th-dimension size"
        assert await here.error([[0]], [0, 0]) == (invalid, text)
        assert here.model.ran == []
        assert await here.sizes(4) == [[4] * 4]


async def test_batches_are_padded_to_an_allowed_size(tmp_path: Path) -> None:
    text = "max_batch_size { value: 8 } allowed_batch_sizes: [ 2, 4, 8 ]"
    async with running(tmp_path, text) as here:
        answer = await here.predict([[1], [2], [3]], [0, 0, 0])
        assert answer == {"y": [[1], [2], [3]], "n": [4, 4, 4]}
        assert await here.sizes(2) == [[2, 2]]
        assert here.model.ran == [4, 2]


async def test_a_large_request_runs_in_parts(tmp_path: Path) -> None:
    text = "max_batch_size { value: 8 } max_execution_batch_size { value: 2 }"
    async with running(tmp_path, f"{text} enable_large_batch_splitting {{ value: true }}") as here:
        answer = await here.predict([[1], [2], [3], [4], [5]], [10] * 5)
        assert answer == {"y": [[11], [12], [13], [14], [15]], "n": [2, 2, 2, 2, 1]}
        assert (await here.error([[0]] * 9, [0] * 9))[1].startswith("Task size 9 ")


@pytest.mark.parametrize("pad", [True, False])
async def test_unlike_lengths_share_a_batch_if_they_are_padded(tmp_path: Path, pad: bool) -> None:
    window = NEVER if pad else ""
    text = f"max_batch_size {{ value: 2 }} {window} pad_variable_length_inputs: {str(pad).lower()}"
    async with running(tmp_path, text) as here:
        short, long = await asyncio.gather(here.predict([[1]], [0]), here.predict([[2, 3]], [0]))
        assert (short["n"], long["n"]) == (([2], [2]) if pad else ([1], [1]))
        assert (short["y"], long["y"]) == ([[1, 0]] if pad else [[1]], [[2, 3]])


async def test_no_more_batches_wait_than_may(tmp_path: Path) -> None:
    text = "max_batch_size { value: 2 } max_enqueued_batches { value: 1 } num_batch_threads { value: 1 }"
    async with running(tmp_path, text) as here:
        here.model.close_point("infer")
        first = asyncio.create_task(here.sizes(1))
        await until(lambda: here.model.ran)
        waiting = asyncio.create_task(here.sizes(2))
        await until(lambda: here.server.dataplane.queue_depth() == 1)
        assert await here.error([[0]], [0]) == (
            grpc.StatusCode.UNAVAILABLE,
            "The batch scheduling queue to which this task was submitted is full; currently 1 batches enqueued "
            "and max_enqueued_batches is 1",
        )
        assert await here.rest_error([0.0], 0) == (503, "1")
        here.model.open_point("infer")
        assert (await first, await waiting) == ([[1]], [[2, 2]])


async def test_one_batch_runs_per_thread(tmp_path: Path) -> None:
    async with running(tmp_path, "max_batch_size { value: 1 } num_batch_threads { value: 3 }") as here:
        here.model.close_point("infer")
        calls = asyncio.create_task(here.sizes(1, 1, 1, 1))
        await until(lambda: len(here.model.ran) == 3)
        await until(lambda: here.server.dataplane.queue_depth() == 1)
        here.model.open_point("infer")
        assert await calls == [[1]] * 4


# --- parameters of one version ---


@pytest.mark.parametrize(
    ("own", "sizes"),
    [("max_batch_size { value: 2 }", [[2]] * 2), (None, [[1]] * 2)],
    ids=["in its folder", "without any"],
)
async def test_a_versions_own_parameters(tmp_path: Path, own: str | None, sizes: list[list[int]]) -> None:
    """The common ones say how many threads there are, and nothing else."""
    text = f"max_batch_size {{ value: 4 }} num_batch_threads {{ value: 2 }} {NEVER}"
    own = None if own is None else f"{own} {NEVER} num_batch_threads {{ value: 9 }}"
    async with running(tmp_path, text, own=own, enable_per_model_batching_parameters=True) as here:
        assert await here.sizes(1, 1) == sizes
        assert here.model.instances == (2 if own else 1)


async def test_a_versions_own_parameters_are_read_where_a_flag_says_so(tmp_path: Path) -> None:
    async with running(tmp_path, f"max_batch_size {{ value: 2 }} {NEVER}", own="max_batch_size {}") as here:
        assert await here.sizes(1, 1) == [[2]] * 2


async def test_wrong_parameters_keep_a_version_from_serving(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelLoadError):
        async with running(tmp_path, own="max_batch_size {}", enable_per_model_batching_parameters=True):
            pass
    file = tmp_path / "m" / "1" / PER_MODEL_FILE
    assert f"{file}: max_batch_size: expected 1 to 2147483647, got 0" in caplog.text


async def test_what_is_not_batched_is_named_in_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with running(tmp_path, kind=Counting) as here:
        assert here.model.dynamic_batching is None
    assert (
        "m version 1: requests run one by one: signature 'serving_default': output 'n' is [], expected -1 as its "
        "first dim"
    ) in caplog.text


IN_A_PROCESS = """
import os

import numpy as np
import triglot


class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1, 2])]
    execution = "process"

    def infer(self, inputs):
        rows = len(inputs["x"])
        return {"y": np.full((rows, 2), [rows, os.getpid()], np.int32)}
"""


async def test_a_model_in_a_process_of_its_own_is_batched_too(tmp_path: Path) -> None:
    version = tmp_path / "m" / "1"
    version.mkdir(parents=True)
    (version / "model.py").write_text(IN_A_PROCESS)
    (tmp_path / "batching.config").write_text(f"max_batch_size {{ value: 4 }} {NEVER}")
    flags = {"enable_batching": True, "batching_parameters_file": str(tmp_path / "batching.config")}
    config = triglot.Config(grpc_port=0, rest_port=0, grace=1.0)
    async with triglot.Server(
        models=[ModelSettings("m", tmp_path / "m")], config=config, adapt=tfserving_cli.batching(flags)
    ) as server:
        here = Served(server)
        answers = await asyncio.gather(*[here.infer("m", np.zeros(rows, np.int32)) for rows in (1, 3)])
    rows = np.concatenate(answers).tolist()
    assert rows == [[4, rows[0][1]]] * 4
    assert rows[0][1] != os.getpid()


def test_a_name_for_threads_has_no_effect(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "batching.config"
    file.write_text('max_batch_size { value: 8 } thread_pool_name { value: "a" }')
    assert read_parameters(file).batching.max_batch_size == 8
    assert [record.getMessage() for record in caplog.records] == [
        f"{file}: thread_pool_name: not supported, ignored"
    ]
