"""Sequences while versions come and go: each ends in the version that it began in (spec 5.2)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.repository.scripted_loads import look_twice, put, settings, states
from tests.scheduling.sequence_models import HOUR, LONG, Summing
from tests.waiting import until
from triglot import Call, Ensemble, Model, Step, TensorSpec
from triglot.core.errors import Code, InvalidArgument, ServingError, Unavailable
from triglot.core.tensor import pack_bytes
from triglot.core.types import InferenceRequest, InputTensor
from triglot.dataplane.dataplane import DataPlane
from triglot.dataplane.model_calls import ModelCalls
from triglot.model.config import ModelConfig
from triglot.model.scheduling import SequenceBatching
from triglot.repository.manager.manager import Manager

V1, V2 = 1000.0, 2000.0


class Numbered(Summing):
    """Adds a thousand times its version."""

    def __init__(self, number: int, max_idle: float) -> None:
        super().__init__(replace(LONG, max_idle=max_idle))
        self.number = number

    def infer(self, inputs: Any, call: Call) -> dict[str, Any]:
        answer = super().infer(inputs, call)
        return {**answer, "y": answer["y"] + 1000 * self.number}


class OneStep(Ensemble):
    """Of one step, the model `m`."""

    inputs, outputs, max_batch_size = Summing.inputs, Summing.outputs, Summing.max_batch_size
    steps = (Step("m", {"x": "x"}, {"y": "y"}),)


class VersionedModel:
    """A model `m` whose versions come and go."""

    def __init__(self, manager: Manager, folder: Path) -> None:
        self.manager = manager
        self.folder = folder
        self.dataplane = DataPlane(manager)
        self.dataplane.reach = ModelCalls(self.dataplane, None).reach

    async def add(self, number: int, text: str = "") -> None:
        """Have a version served, too, or again."""
        put(self.folder / str(number), text)
        await look_twice(self.manager)
        await until(lambda: self.manager.registry.servable("m").version == number)

    async def send(
        self,
        value: float,
        sequence_id: int | str,
        *,
        start: bool = False,
        end: bool = False,
        version: str = "",
        model: str = "m",
    ) -> float:
        """What a request is answered with."""
        tensor = InputTensor("x", "FP32", (1, 1), np.array([value], np.float32))
        parameters: dict[str, Any] = {"sequence_id": sequence_id, "sequence_start": start, "sequence_end": end}
        request = InferenceRequest(model, version, inputs=[tensor], parameters=parameters)
        response = await self.dataplane.infer(request, Call())
        return float(response.outputs[0].array.item())

    async def error(self, value: float, sequence_id: int | str, **fields: Any) -> ServingError:
        """What a request is refused with."""
        with pytest.raises(ServingError) as caught:
            await self.send(value, sequence_id, **fields)
        return caught.value

    async def state(self, number: int, state: str) -> None:
        """Wait until a version is in this state."""
        await until(lambda: states(self.manager, "m").get(number) == state)


@asynccontextmanager
async def versioned_model(
    tmp_path: Path, *, max_idle: float = HOUR, all_versions: bool = False, ensemble: bool = False, **options: Any
) -> AsyncIterator[VersionedModel]:
    """Of version 1; later ones take its place, unless `all_versions` serve. `ensemble`: and of `e`."""

    def load(backend: str, file: Path, config: ModelConfig) -> Model:
        if file.parent.parent.name == "e":
            return OneStep()
        return Numbered(int(file.parent.name) + (10 if file.read_text() else 0), max_idle)

    folder = tmp_path / "m"
    put(folder / "1")
    roots = [tmp_path if all_versions else settings(folder)]
    if ensemble:
        put(tmp_path / "e" / "1")
        roots.append(settings(tmp_path / "e"))
    manager = Manager(roots, load, max_queue_size=100, **options)
    try:
        await manager.load_all()
        yield VersionedModel(manager, folder)
    finally:
        await manager.close()


async def test_sequence_stays_in_its_version(tmp_path: Path) -> None:
    async with versioned_model(tmp_path) as model:
        assert await model.send(1, 5, start=True) == V1 + 1
        await model.add(2)
        await model.state(1, "UNLOADING")
        assert await model.send(1, 5) == V1 + 2
        assert await model.send(1, 5, version="1") == V1 + 3
        # Others begin in the new one.
        assert await model.send(1, 6, start=True) == V2 + 1
        assert await model.send(1, 6) == V2 + 2
        assert (await model.error(1, 7)).code is Code.INVALID_ARGUMENT
        assert (await model.error(1, 7, start=True, version="1")).code is Code.UNAVAILABLE
        assert (await model.error(1, 5, version="2")).code is Code.INVALID_ARGUMENT
        assert states(model.manager, "m")[1] == "UNLOADING"
        assert await model.send(1, 5, end=True) == V1 + 4
        await model.state(1, "UNAVAILABLE")
        assert (await model.error(1, 5)).code is Code.INVALID_ARGUMENT


async def test_sequence_of_an_ensemble_step_stays_in_its_version(tmp_path: Path) -> None:
    """And another sequence begins in the new one."""
    async with versioned_model(tmp_path / "models", ensemble=True) as model:
        assert await model.send(1, 5, start=True, model="e") == V1 + 1
        await model.add(2)
        await model.state(1, "UNLOADING")
        assert await model.send(1, 5, model="e") == V1 + 2
        assert await model.send(1, 5) == V1 + 3
        assert await model.send(1, 6, start=True, end=True, model="e") == V2 + 1
        assert await model.send(1, 5, end=True, model="e") == V1 + 4
        await model.state(1, "UNAVAILABLE")


async def test_a_sequence_without_a_version_stays_where_it_began(tmp_path: Path) -> None:
    async with versioned_model(tmp_path, all_versions=True) as model:
        assert await model.send(1, 5, start=True) == V1 + 1
        await model.add(2)
        assert await model.send(1, 5) == V1 + 2
        assert await model.send(1, 5, start=True, version="2") == V2 + 1
        # Two of the same id: the one that a new one would be beside.
        assert await model.send(1, 5) == V2 + 2
        assert await model.send(1, 5, version="1") == V1 + 3


async def test_start_moves_a_sequence_to_the_new_version(tmp_path: Path) -> None:
    async with versioned_model(tmp_path) as model:
        assert await model.send(1, 5, start=True) == V1 + 1
        await model.add(2)
        assert await model.send(1, 5, start=True) == V2 + 1
        await model.state(1, "UNAVAILABLE")
        assert await model.send(1, 5) == V2 + 2


async def test_what_is_loaded_again_lets_the_former_ones_sequences_end(tmp_path: Path) -> None:
    async with versioned_model(tmp_path, all_versions=True, explicit=["m"]) as model:
        former = model.manager.registry.servable("m")
        assert await model.send(1, 5, start=True) == V1 + 1
        put(model.folder / "1", "changed")
        await model.manager.load_model("m")
        assert model.manager.registry.servable("m") is not former
        assert await model.send(1, 5) == V1 + 2
        assert await model.send(1, 5, version="1") == V1 + 3
        assert await model.send(1, 6, start=True, version="1") == 11 * V1 + 1
        assert await model.send(1, 6) == 11 * V1 + 2
        assert await model.send(1, 5, end=True) == V1 + 4
        await until(lambda: not model.manager.registry.draining("m"))
        assert former.leases == 0


async def test_an_idle_sequence_does_not_keep_a_version(tmp_path: Path) -> None:
    async with versioned_model(tmp_path, max_idle=0.05) as model:
        await model.send(1, 5, start=True)
        await model.add(2)
        await model.state(1, "UNAVAILABLE")


async def test_a_drain_has_its_own_patience(tmp_path: Path) -> None:
    async with versioned_model(tmp_path, drain_seconds=0.05) as model:
        await model.send(1, 5, start=True)
        await model.add(2)
        await model.state(1, "UNAVAILABLE")
        assert (await model.error(1, 5)).code is Code.INVALID_ARGUMENT


async def test_sequences_of_a_model_that_is_unloaded_may_end(tmp_path: Path) -> None:
    async with versioned_model(tmp_path, all_versions=True, explicit=["m"]) as model:
        await model.send(1, 5, start=True)
        model.manager.unload_model("m")
        assert await model.send(1, 5) == V1 + 2
        assert (await model.error(1, 6, start=True)).code is Code.NOT_FOUND
        assert await model.send(1, 5, end=True) == V1 + 3
        await model.state(1, "UNAVAILABLE")


async def test_a_server_that_stops_begins_no_sequence(tmp_path: Path) -> None:
    async with versioned_model(tmp_path) as model:
        await model.send(1, 5, start=True)
        model.dataplane.stop()
        error = await model.error(1, 6, start=True)
        assert isinstance(error, Unavailable)
        assert "the server is shutting down" in error.message
        assert await model.send(1, 5, end=True) == V1 + 2
        assert model.manager.registry.servable("m").leases == 0


async def test_a_timeout_is_no_deadline_of_a_sequences_request(tmp_path: Path) -> None:
    async with versioned_model(tmp_path) as model:
        tensor = InputTensor("x", "FP32", (1, 1), np.array([1], np.float32))
        parameters: dict[str, Any] = {"sequence_id": 5, "sequence_start": True, "timeout": 1_000_000}
        call = Call()
        await model.dataplane.infer(InferenceRequest("m", inputs=[tensor], parameters=parameters), call)
        assert call.deadline is None


async def test_wrong_inputs_leave_a_sequence_as_it_is(tmp_path: Path) -> None:
    async with versioned_model(tmp_path) as model:
        await model.send(1, 5, start=True)
        tensor = InputTensor("before", "FP32", (1, 1), np.array([1], np.float32))
        request = InferenceRequest("m", inputs=[tensor], parameters={"sequence_id": 5, "sequence_end": True})
        with pytest.raises(InvalidArgument, match="unexpected inference input 'before'"):
            await model.dataplane.infer(request, Call())
        assert await model.send(1, 5, end=True) == V1 + 2


async def test_large_texts_do_not_change_the_order(tmp_path: Path) -> None:
    """They are taken apart on threads, small ones are not."""

    class Words(Model):
        inputs = [TensorSpec("word", "BYTES", [1])]
        outputs = [TensorSpec("number", "INT32", [1])]
        sequence_batching = SequenceBatching(max_idle=HOUR)

        def __init__(self) -> None:
            self.lengths: list[int] = []

        def infer(self, inputs: Any) -> dict[str, Any]:
            self.lengths.append(len(inputs["word"][0]))
            return {"number": np.array([len(self.lengths)], np.int32)}

    model = Words()
    put(tmp_path / "m" / "1")
    manager = Manager([tmp_path], lambda *_: model, max_queue_size=100)
    await manager.load_all()
    dataplane = DataPlane(manager)

    def send(at: int) -> Any:
        data = pack_bytes([b"x" * (at + 1_000_000 * (at % 3 == 0))])
        parameters: dict[str, Any] = {"sequence_id": 5, "sequence_start": at == 0, "sequence_end": at == 11}
        request = InferenceRequest("m", inputs=[InputTensor("word", "BYTES", (1,), data)], parameters=parameters)
        return dataplane.infer(request, Call())

    answers = await asyncio.gather(*map(send, range(12)))
    assert [answer.outputs[0].array.item() for answer in answers] == [*range(1, 13)]
    assert [length % 1_000_000 for length in model.lengths] == [*range(12)]
    await manager.close()
