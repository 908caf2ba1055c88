"""Requests that omit an optional input, in every protocol; batches, sequences and ensembles of such models."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from tests.transports.live import Live, live
from tests.waiting import until
from triglot import Call, Ensemble, InvalidArgument, Model, Step, TensorSpec
from triglot.model.scheduling import ControlInput, DynamicBatching, SequenceBatching
from triglot.testing import CLIENTS, GatedModel, KServeGrpc, KServeRest

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


THREADS = ThreadPoolExecutor(12)
"""As many as there are calls at the same time."""


def columns(values: Values) -> dict[str, Any]:
    return {name: np.array(numbers, np.int32).reshape(-1, 1) for name, numbers in values.items()}


async def infer(server: Live, model: str, values: Values, **parameters: int | bool) -> list[int]:
    """Call a model with a row for each number."""

    def call() -> list[int]:
        with KServeGrpc(server.grpc_address, timeout=30) as client:
            return by(client.infer(model, columns(values), parameters=parameters))

    return await asyncio.get_running_loop().run_in_executor(THREADS, call)


def by(outputs: Mapping[str, Any]) -> list[int]:
    return list(outputs["y"].reshape(-1))


def rows(values: Values) -> list[dict[str, int]]:
    return [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]


Ask = Callable[[Live, str, Values], list[int]]


def over(client: str) -> Ask:
    """What a client of the protocol gets."""

    def ask(server: Live, model: str, values: Values) -> list[int]:
        with server.client(client) as opened:
            return by(opened.infer(model, {name: np.array(data, np.int32) for name, data in values.items()}))

    return ask


def over_a_stream(server: Live, model: str, values: Values) -> list[int]:
    with KServeGrpc(server.grpc_address) as client:
        (outputs,) = client.infer_stream(model, {name: np.array(data, np.int32) for name, data in values.items()})
        return by(outputs)


def post(server: Live, path: str, body: object) -> Any:
    return KServeRest(server.root).post(path, body)


INTERFACES: dict[str, Ask] = {
    **{name: over(name) for name in CLIENTS},
    "kserve_stream": over_a_stream,
    "generate": lambda server, model, values: post(server, f"/v2/models/{model}/generate", values)["y"],
    "tensorflow_rows": lambda server, model, values: post(
        server, f"/v1/models/{model}:predict", {"instances": rows(values)}
    )["predictions"],
    "projects_predict": lambda server, model, values: [
        row["y"]
        for row in post(server, f"/v1/projects/p/models/{model}:predict", {"instances": rows(values)})[
            "predictions"
        ]
    ],
}


@pytest.mark.parametrize("interface", INTERFACES)
async def test_every_interface_lets_it_be_omitted(server: Live, interface: str) -> None:
    """An ensemble passes on the present inputs."""

    async def ask(model: str, values: Values) -> list[int]:
        return await asyncio.to_thread(INTERFACES[interface], server, model, values)

    assert await ask("adding", {"x": [1, 2], "bias": [10, 20]}) == [11, 22]
    assert await ask("adding", {"x": [1, 2]}) == [101, 102]
    assert await ask("chain", {"x": [1, 2], "bias": [10, 20]}) == [111, 122]
    assert await ask("chain", {"x": [1, 2]}) == [201, 202]


@pytest.mark.parametrize("body", [{"inputs": [1, 2]}, {"instances": [1, 2]}])
async def test_a_bare_value_is_the_input_that_is_required(server: Live, body: object) -> None:
    (found,) = (await asyncio.to_thread(post, server, "/v1/models/adding:predict", body)).values()
    assert found == [101, 102]


async def test_what_is_required_is_missed(server: Live) -> None:
    with pytest.raises(InvalidArgument, match=r"missing required input\(s\) \['x'\]"):
        await asyncio.to_thread(INTERFACES["kserve_grpc"], server, "adding", {"bias": [1]})
    mixed = {"instances": [{"x": 1, "bias": 2}, {"x": 1}]}
    with pytest.raises(InvalidArgument, match="keys must be equal to: bias,x"):
        await asyncio.to_thread(post, server, "/v1/models/adding:predict", mixed)


async def test_a_sequence_may_change_its_mind(server: Live) -> None:
    ask = partial(infer, server, "running", sequence_id=7)
    assert await ask({"x": [1]}, sequence_start=True) == [1101]
    assert await ask({"x": [2], "bias": [5]}) == [7]
    assert await ask({"x": [3]}, sequence_end=True) == [103]


async def test_sequences_side_by_side_with_unlike_inputs(server: Live) -> None:
    wanted = [(n, {"x": [n], "bias": [n]} if n % 2 else {"x": [n]}) for n in range(1, 13)]
    flags = {"sequence_start": True, "sequence_end": True}
    found = await asyncio.gather(
        *(infer(server, "running", values, sequence_id=n, **flags) for n, values in wanted)
    )
    assert found == [[1000 + (2 * n if n % 2 else n + 100)] for n in range(1, 13)]


@pytest.mark.parametrize("kind", [Batching, Listed], ids=["joined", "listed"])
async def test_a_batch_is_of_requests_with_the_same_inputs(kind: type[Batching]) -> None:
    model = kind()
    async with live({"batching": model}) as server:
        values: list[Values] = [{"x": [n], "bias": [n]} if n % 2 else {"x": [n]} for n in range(8)]
        asked = [asyncio.ensure_future(infer(server, "batching", value)) for value in values]
        await until(lambda: server.leases() == 8)
        model.open_point("infer")
        found = await asyncio.gather(*asked)
    assert found == [[2 * n if n % 2 else n + 100] for n in range(8)]
    assert sum(rows for _, rows in model.batches) == 8
    assert {tuple(names) for names, _ in model.batches} == {("x",), ("bias", "x")}
    assert len(model.batches) < 8
