"""Requests that omit an optional input, in every protocol; batches, sequences and ensembles of such models."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import grpc.aio
import numpy as np
import pytest
import pytest_asyncio
from live import Live, live

from triglot import Call, Ensemble, Model, Step, TensorSpec
from triglot.model.scheduling import ControlInput, DynamicBatching, SequenceBatching
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2 as pb
from triglot.pb.tfserving import predict_pb2, tensor_pb2
from triglot.testing import GatedModel
from waiting import until

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.both_transports]
Values = Mapping[str, Sequence[int]]
SPECS = [TensorSpec("x", "INT32", [-1]), TensorSpec("bias", "INT32", [-1], optional=True)]
Y = [TensorSpec("y", "INT32", [-1])]


class Adding(Model):
    """Adds `bias`, or 100 where there is none."""

    inputs, outputs = SPECS, Y

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"] + inputs.get("bias", np.int32(100))}


class Batching(GatedModel, Adding):
    """Waits in `infer` until the test opens the gate; keeps what each batch was made of."""

    inputs = [TensorSpec("x", "INT32", [-1, 1]), TensorSpec("bias", "INT32", [-1, 1], optional=True)]
    outputs = [TensorSpec("y", "INT32", [-1, 1])]
    max_batch_size = 8
    dynamic_batching = DynamicBatching()

    def __init__(self) -> None:
        super().__init__("infer")
        self.batches: list[tuple[list[str], int]] = []

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        self.batches.append((sorted(inputs), len(inputs["x"])))
        self.wait_at("infer")
        return Adding.infer(self, inputs)


class Listed(Batching):
    """Takes its batches as lists."""

    def infer_batch(self, inputs: Sequence[Mapping[str, Any]], _: Sequence[Call]) -> list[dict[str, Any]]:
        self.batches.append((sorted({name for tensor in inputs for name in tensor}), len(inputs)))
        self.wait_at("infer")
        return [Adding.infer(self, tensor) for tensor in inputs]


class Running(Adding):
    """The sum of its sequence."""

    inputs = [TensorSpec("x", "INT32", [-1, 1]), TensorSpec("bias", "INT32", [-1, 1], optional=True)]
    outputs = [TensorSpec("y", "INT32", [-1, 1])]
    max_batch_size = 4
    sequence_batching = SequenceBatching(controls=[ControlInput("start", "START", "INT32")])

    def infer(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"y": inputs["x"] + inputs.get("bias", np.int32(100)) + 1000 * inputs["start"]}


class Chain(Ensemble):
    """`bias` of the ensemble is `bias` of the first step; the second one has none."""

    inputs, outputs = SPECS, Y
    steps = [Step("adding", {"x": "x", "bias": "bias"}, {"y": "m"}), Step("adding", {"x": "m"}, {"y": "y"})]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server() -> AsyncIterator[Live]:
    async with live({"adding": Adding(), "chain": Chain(), "running": Running()}) as opened:
        yield opened


def message(model: str, values: Values, columns: bool = False, **parameters: int | bool) -> bytes:
    request = pb.ModelInferRequest(model_name=model)
    for name, numbers in values.items():
        shape = (len(numbers), 1) if columns else (len(numbers),)
        request.inputs.add(name=name, datatype="INT32", shape=shape)
        request.raw_input_contents.append(np.array(numbers, "i4").tobytes())
    for key, value in parameters.items():
        if isinstance(value, bool):
            request.parameters[key].bool_param = value
        else:
            request.parameters[key].int64_param = value
    return request.SerializeToString()


def numbers(reply: bytes) -> list[int]:
    return list(np.frombuffer(pb.ModelInferResponse.FromString(reply).raw_output_contents[0], "i4"))


async def by_kserve_grpc(server: Live, model: str, values: Values) -> list[int]:
    return numbers(await server.infer(message(model, values), timeout=20))


async def by_kserve_stream(server: Live, model: str, values: Values) -> list[int]:
    async def sending() -> AsyncIterator[bytes]:
        yield message(model, values)

    (answer,) = [response async for response in server.stream_infer(sending(), timeout=20)]
    assert not answer.error_message
    return numbers(answer.infer_response.SerializeToString())


async def post(server: Live, path: str, body: object) -> Any:
    url = f"http://127.0.0.1:{server.server.rest_port}{path}"
    async with server.session.post(url, json=body) as response:
        reply = json.loads(await response.read())
        assert response.status == 200, reply
        return reply


async def by_kserve_rest(server: Live, model: str, values: Values) -> list[int]:
    inputs = [
        {"name": name, "datatype": "INT32", "shape": [len(data)], "data": data} for name, data in values.items()
    ]
    reply = await post(server, f"/v2/models/{model}/infer", {"inputs": inputs})
    found: list[int] = reply["outputs"][0]["data"]
    return found


async def by_generate(server: Live, model: str, values: Values) -> list[int]:
    found: list[int] = (await post(server, f"/v2/models/{model}/generate", values))["y"]
    return found


async def by_tensorflow_grpc(server: Live, model: str, values: Values) -> list[int]:
    request = predict_pb2.PredictRequest(model_spec={"name": model})
    for name, data in values.items():
        tensor = request.inputs[name]
        tensor.dtype = tensor_pb2.DT_INT32
        tensor.tensor_shape.dim.add(size=len(data))
        tensor.int_val.extend(data)
    predict = server.channel.unary_unary("/tensorflow.serving.PredictionService/Predict")
    reply = predict_pb2.PredictResponse.FromString(await predict(request.SerializeToString(), timeout=20))
    return list(reply.outputs["y"].int_val)


async def by_tensorflow_columns(server: Live, model: str, values: Values) -> list[int]:
    found: list[int] = (await post(server, f"/v1/models/{model}:predict", {"inputs": values}))["outputs"]
    return found


async def by_tensorflow_rows(server: Live, model: str, values: Values) -> list[int]:
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    found: list[int] = (await post(server, f"/v1/models/{model}:predict", {"instances": rows}))["predictions"]
    return found


async def by_projects_predict(server: Live, model: str, values: Values) -> list[int]:
    rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
    reply = await post(server, f"/v1/projects/p/models/{model}:predict", {"instances": rows})
    return [row["y"] for row in reply["predictions"]]


async def by_grps(server: Live, model: str, values: Values) -> list[int]:
    request = grps_pb2.GrpsMessage(model=model)
    for name, data in values.items():
        request.gtensors.tensors.add(name=name, dtype=grps_pb2.DT_INT32, shape=[len(data)], flat_int32=data)
    predict = server.channel.unary_unary("/grps.protos.v1.GrpsService/Predict")
    reply = grps_pb2.GrpsMessage.FromString(await predict(request.SerializeToString(), timeout=20))
    assert reply.status.code == 200, reply
    return list(reply.gtensors.tensors[0].flat_int32)


Ask = Callable[[Live, str, Values], Any]
INTERFACES: list[Ask] = [
    by_kserve_grpc,
    by_kserve_stream,
    by_kserve_rest,
    by_generate,
    by_tensorflow_grpc,
    by_tensorflow_columns,
    by_tensorflow_rows,
    by_projects_predict,
    by_grps,
]


@pytest.mark.parametrize("ask", INTERFACES, ids=lambda function: function.__name__)
async def test_every_interface_lets_it_be_omitted(server: Live, ask: Ask) -> None:
    assert await ask(server, "adding", {"x": [1, 2], "bias": [10, 20]}) == [11, 22]
    assert await ask(server, "adding", {"x": [1, 2]}) == [101, 102]


@pytest.mark.parametrize("ask", INTERFACES, ids=lambda function: function.__name__)
async def test_ensemble_passes_on_the_present_inputs(server: Live, ask: Ask) -> None:
    assert await ask(server, "chain", {"x": [1, 2], "bias": [10, 20]}) == [111, 122]
    assert await ask(server, "chain", {"x": [1, 2]}) == [201, 202]


@pytest.mark.parametrize("body", [{"inputs": [1, 2]}, {"instances": [1, 2]}])
async def test_a_bare_value_is_the_input_that_is_required(server: Live, body: object) -> None:
    (found,) = (await post(server, "/v1/models/adding:predict", body)).values()
    assert found == [101, 102]


async def test_what_is_required_is_missed(server: Live) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await server.infer(message("adding", {"bias": [1]}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "missing required input(s) ['x']" in str(caught.value.details())
    url = f"http://127.0.0.1:{server.server.rest_port}/v1/models/adding:predict"
    mixed = {"instances": [{"x": 1, "bias": 2}, {"x": 1}]}
    async with server.session.post(url, json=mixed) as response:
        assert response.status == 400
        assert "keys must be equal to: bias,x" in (await response.json())["error"]


async def test_a_sequence_may_change_its_mind(server: Live) -> None:
    async def ask(values: Values, *, start: bool = False, end: bool = False) -> list[int]:
        sent = message("running", values, True, sequence_id=7, sequence_start=start, sequence_end=end)
        return numbers(await server.infer(sent, timeout=20))

    assert await ask({"x": [1]}, start=True) == [1101]
    assert await ask({"x": [2], "bias": [5]}) == [7]
    assert await ask({"x": [3]}, end=True) == [103]


async def test_sequences_side_by_side_with_unlike_inputs(server: Live) -> None:
    async def run(sequence: int, values: Values) -> list[int]:
        sent = message("running", values, True, sequence_id=sequence, sequence_start=True, sequence_end=True)
        return numbers(await server.infer(sent, timeout=20))

    wanted = [(n, {"x": [n], "bias": [n]} if n % 2 else {"x": [n]}) for n in range(1, 13)]
    found = await asyncio.gather(*(run(sequence, values) for sequence, values in wanted))
    assert found == [[1000 + (2 * n if n % 2 else n + 100)] for n in range(1, 13)]


@pytest.mark.parametrize("kind", [Batching, Listed], ids=["joined", "listed"])
async def test_a_batch_is_of_requests_with_the_same_inputs(kind: type[Batching]) -> None:
    model = kind()
    async with live({"batching": model}) as server:
        values: list[Values] = [{"x": [n], "bias": [n]} if n % 2 else {"x": [n]} for n in range(8)]
        asked = [
            asyncio.ensure_future(server.infer(message("batching", value, True), timeout=30)) for value in values
        ]
        (servable,) = [version.servable for version in server.server.manager.registry.versions()]
        assert servable is not None
        await until(lambda: servable.leases == 8)
        model.open_point("infer")
        found = [numbers(reply) for reply in await asyncio.gather(*asked)]
    assert found == [[2 * n if n % 2 else n + 100] for n in range(8)]
    assert sum(rows for _, rows in model.batches) == 8
    assert {tuple(names) for names, _ in model.batches} == {("x",), ("bias", "x")}
    assert len(model.batches) < 8
