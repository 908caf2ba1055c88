"""Ensembles in explicit control: what is loaded and unloaded along with them (spec 3.9, 5.3)."""

from __future__ import annotations

import asyncio
import operator
from functools import partial
from pathlib import Path

import pytest

from tests.gates import Gate
from tests.protocols.control_clients import (
    EXPLICIT,
    FINE,
    SAYS,
    Explicit,
    Row,
    ask,
    control_of,
    put,
    put_config,
    until_index,
)
from tests.protocols.kserve_served import serve_models
from tests.waiting import until_found
from triglot.core.errors import Code, ModelNotFound
from triglot.core.operation import Permission

TENSORS = 'input { name: "x" data_type: TYPE_INT32 dims: -1 } output { name: "y" data_type: TYPE_INT32 dims: -1 }'
PYTHON_FORM = """
import triglot

class Pipeline(triglot.Ensemble):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]
    steps = [triglot.Step("a", {{"x": "x"}}, {{"y": "t"}}), triglot.Step("b", {{"x": "t"}}, {{"y": "y"}})]
"""
UNLOADED = ("UNAVAILABLE", "unloaded")


@pytest.fixture(params=["grpc", "rest"])
def explicit(request: pytest.FixtureRequest, tmp_path: Path) -> Explicit:
    return Explicit(request.param, tmp_path)


def put_ensemble(folder: Path, *parts: str) -> None:
    """One after the other; what it says is what the last one says."""
    (folder / "1").mkdir(parents=True)
    tensors = ["x", *(f"t{at}" for at in range(1, len(parts))), "y"]
    steps = "".join(
        f'step {{ model_name: "{part}" input_map {{ key: "x" value: "{tensors[at]}" }} '
        f'output_map {{ key: "y" value: "{tensors[at + 1]}" }} }}'
        for at, part in enumerate(parts)
    )
    put_config(folder, f'platform: "ensemble" {TENSORS} ensemble_scheduling {{ {steps} }}')


def put_parts(folder: Path, **says: int) -> None:
    for name, number in says.items():
        put(folder / name / "1", says=number)


def ready(*names: str) -> list[Row]:
    return [Row(name, "1", "READY") for name in names]


@pytest.mark.parametrize("form", ["config", "python"])
async def test_parts_are_loaded_and_unloaded_with_their_ensemble(
    explicit: Explicit, form: str, tmp_path: Path
) -> None:
    put_parts(tmp_path, a=1, b=2)
    if form == "config":
        put_ensemble(tmp_path / "e", "a", "b")
    else:
        put(tmp_path / "e" / "1", text=PYTHON_FORM)
    async with explicit() as (served, control):
        assert await control.load("e") == FINE
        assert await control.index() == ready("e", "a", "b")
        assert await ask(served, "e") == 2
        assert await control.unload("e", unload_dependents=True) == FINE
        await until_index(control, *[Row(name, "1", *UNLOADED) for name in ("e", "a", "b")])
        assert (await ask(served, "a"))[0] is Code.NOT_FOUND  # type: ignore[index]
        assert await control.load("e") == FINE
        assert await ask(served, "e") == 2


@pytest.mark.parametrize("parameters", [{}, {"unload_dependents": False}])
async def test_what_it_is_made_of_stays_unless_asked(
    explicit: Explicit, parameters: dict[str, bool], tmp_path: Path
) -> None:
    put_parts(tmp_path, a=1)
    put_ensemble(tmp_path / "e", "a")
    async with explicit() as (served, control):
        assert await control.load("e") == FINE
        assert await control.unload("e", **parameters) == FINE
        await until_index(control, Row("e", "1", *UNLOADED), *ready("a"))
        assert await ask(served, "a") == 1


@pytest.mark.parametrize("turns", range(8))
async def test_asked_for_while_it_is_tried_without_a_part(turns: int, tmp_path: Path) -> None:
    """It stops with its part, and is tried again at once; a request for it then has the part loaded, too."""
    put_parts(tmp_path, a=1)
    put_ensemble(tmp_path / "e", "a")
    async with serve_models([tmp_path], **EXPLICIT) as served:
        manager = served.server.manager
        await manager.load_model("e")
        for _ in range(10):
            manager.unload_model("a")
            for _turn in range(turns):
                await asyncio.sleep(0)
            await manager.load_model("e")
            assert await ask(served, "e") == 1


async def test_what_others_need_stays(explicit: Explicit, tmp_path: Path) -> None:
    """A model that was asked for by its own name, and one that another ensemble is made of."""
    put_parts(tmp_path, own=1, shared=2, only=3, deep=4)
    put_ensemble(tmp_path / "inner", "deep", "shared")
    put_ensemble(tmp_path / "e", "own", "shared", "inner", "only")
    put_ensemble(tmp_path / "other", "shared")
    async with explicit() as (served, control):
        for name in ("own", "e", "other"):
            assert await control.load(name) == FINE
        everything = await control.index()
        assert sorted(row.name for row in everything) == ["deep", "e", "inner", "only", "other", "own", "shared"]
        assert await control.unload("e", unload_dependents=True) == FINE
        unloaded = ("deep", "e", "inner", "only")
        await until_index(
            control, *[Row(row.name, "1", *UNLOADED) if row.name in unloaded else row for row in everything]
        )
        assert await ask(served, "other") == 2


async def test_a_part_that_is_unloaded(explicit: Explicit, tmp_path: Path) -> None:
    """The ensemble is not ready then, says why, and serves again as soon as the part does."""
    put_parts(tmp_path, a=1, b=2)
    put_ensemble(tmp_path / "e", "a", "b")
    async with explicit() as (served, control):
        assert await control.load("e") == FINE
        assert await control.unload("a") == FINE
        assert not await control.ready("e")
        key = f"{tmp_path}/e/config.pbtxt: ensemble_scheduling.step[0].model_name"
        why = f"{key}: 'a' is not available: it was unloaded"
        await until_index(control, Row("e", "1", "UNAVAILABLE", why), Row("a", "1", *UNLOADED), *ready("b"))
        assert await ask(served, "e") == (
            Code.NOT_FOUND,
            f"Request for unknown model: 'e' has no available versions: {why}",
        )
        # A client whose access is controlled may not be allowed to see the model's state.
        with pytest.raises(ModelNotFound) as caught:
            served.server.dataplane.servable(Permission("someone"), "e")
        assert caught.value.message == "Request for unknown model: 'e' has no available versions"
        assert await control.load("a") == FINE
        await until_index(control, *ready("e", "a", "b"))
        assert await control.ready("e")
        assert await ask(served, "e") == 2


async def test_a_part_that_cannot_be_loaded(explicit: Explicit, tmp_path: Path) -> None:
    put_parts(tmp_path, a=1)
    put(tmp_path / "b" / "1", text="raise OSError('no disk')")
    put_ensemble(tmp_path / "e", "a", "b", "c")
    async with explicit() as (served, control):
        code, text = await control.load("e")
        assert code is Code.INVALID_ARGUMENT
        assert text.startswith("load failed for model 'e': version 1 is at UNAVAILABLE state: ")
        assert "step[1].model_name: 'b' is not available: " in text
        assert text.endswith(": OSError: no disk;")
        put_parts(tmp_path, b=2, c=3)
        assert await control.load("e") == FINE
        assert await ask(served, "e") == 3


async def test_a_part_that_is_unloaded_while_the_others_load(tmp_path: Path) -> None:
    """Who unloads a model has the last word."""
    put_parts(tmp_path, a=1)
    gate = Gate(tmp_path / "b" / "1")
    put_ensemble(tmp_path / "e", "a", "b")
    async with serve_models([tmp_path], **EXPLICIT) as served:
        control = control_of(served, "grpc")
        assert await control.load("a") == FINE
        loading = asyncio.create_task(control.load("e"))
        await asyncio.to_thread(gate.wait_until_it_waits, "load")
        assert await control.unload("a") == FINE
        gate.open("load")
        code, text = await loading
        assert code is Code.INVALID_ARGUMENT
        assert "'a' is not available: it was unloaded" in text
        assert not await control.ready("a")
        assert await control.load("a") == FINE
        await until_index(control, *ready("a", "e", "b"))


async def test_parts_at_the_start(tmp_path: Path) -> None:
    put_parts(tmp_path, a=1, b=2, z=3)
    put_ensemble(tmp_path / "e", "a", "b")
    async with serve_models([tmp_path], **EXPLICIT, load_model="e") as served:
        control = control_of(served, "grpc")
        assert await control.ready()
        assert await control.index() == [*ready("e", "a", "b"), Row("z")]
        assert await ask(served, "e") == 2


async def test_another_configuration_of_an_ensemble(explicit: Explicit, tmp_path: Path) -> None:
    """A request's configuration makes it of others; a wrong one leaves it as it was."""
    put_parts(tmp_path, a=1, b=2)
    put_ensemble(tmp_path / "e", "a")
    tensors = '"input":[{"name":"x","data_type":"TYPE_INT32","dims":[-1]}],'
    tensors += '"output":[{"name":"y","data_type":"TYPE_INT32","dims":[-1]}]'
    text = f'{{"platform":"ensemble",{tensors},"ensemble_scheduling":{{"step":[%s]}}}}'
    step = '{"model_name":"b","input_map":{"x":"x"},"output_map":{"y":"%s"}}'
    async with explicit() as (served, control):
        assert await control.load("e") == FINE
        assert await ask(served, "e") == 1
        code, why = await control.load("e", config=text % (step % "z"))
        assert code is Code.INVALID_ARGUMENT
        assert "in the request to load model 'e': output[0]: no step produces the ensemble's output 'y'" in why
        assert await ask(served, "e") == 1
        assert await control.load("e", config=text % (step % "y")) == FINE
        assert await ask(served, "e") == 2


async def test_a_part_that_batches_takes_the_place_of_one_that_does_not(
    explicit: Explicit, tmp_path: Path
) -> None:
    """The ensemble continues, and its tensors get the batch dim that they now need."""
    put_parts(tmp_path, a=1)
    put_ensemble(tmp_path / "e", "a")
    async with explicit() as (served, control):
        assert await control.load("e") == FINE
        assert await ask(served, "e") == 1
        batched = SAYS.replace("[-1]", "[-1, -1]") + "\n    max_batch_size = 4\n"
        for says, text in ((2, batched), (3, SAYS)):
            put(tmp_path / "a" / "1", says, text)
            assert await control.load("a") == FINE
            assert await ask(served, "e") == says


async def test_a_decoupled_part_takes_the_place_of_one_that_is_not(explicit: Explicit, tmp_path: Path) -> None:
    """The ensemble is loaded again, as what it then is."""
    put_parts(tmp_path, a=1)
    put_ensemble(tmp_path / "e", "a")
    decoupled = (Code.UNIMPLEMENTED, "ModelInfer RPC doesn't support models with decoupled transaction policy")
    async with explicit() as (served, control):
        assert await control.load("e") == FINE
        for says, text, answer in ((2, SAYS.replace("return", "yield"), decoupled), (3, SAYS, 3)):
            put(tmp_path / "a" / "1", says, text)
            assert await control.load("a") == FINE
            await until_found(lambda: ask(served, "e"), partial(operator.eq, answer))
