"""Models loaded again: what has changed, what failed, and the configuration that a request brings (spec 3.9)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.protocols.control_clients import (
    FAILS,
    FINE,
    INVALID,
    SAYS,
    UNLOADED,
    Explicit,
    Loads,
    Row,
    ask,
    config_text,
    put,
    put_config,
    saying,
    until_index,
)
from tests.protocols.kserve_served import Served
from tests.waiting import until
from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING
from triglot.pb.kserve import inference_pb2 as pb


@pytest.fixture(params=["grpc", "rest"])
def explicit(request: pytest.FixtureRequest, tmp_path: Path) -> Explicit:
    return Explicit(request.param, tmp_path)


async def test_changed_model_is_loaded_while_the_old_one_serves(explicit: Explicit, tmp_path: Path) -> None:
    load = Loads()
    put(tmp_path / "a" / "1", says=1)
    put_config(tmp_path / "a", "max_batch_size: 4")
    async with explicit(load=load) as (served, control):
        for _ in range(3):
            assert await control.load("a") == FINE
        put_config(tmp_path / "a", 'name: "a" # says nothing more\nmax_batch_size: 4')
        assert await control.load("a") == FINE
        assert load.begun == ["a/1"], "nothing has changed"

        put(tmp_path / "a" / "1", says=22)
        load.gate.clear()
        loading = asyncio.create_task(control.load("a"))
        await until(lambda: len(load.begun) == 2)
        assert await ask(served, "a") == 1
        assert await control.index() == [Row("a", "1", "READY")]
        assert await control.ready()
        load.gate.set()
        assert await loading == FINE
        assert await ask(served, "a") == 22
        put_config(tmp_path / "a", 'parameters { key: "says" value { string_value: "3" } }')
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 3
        assert load.begun == ["a/1"] * 3


async def test_a_new_version_replaces_the_old_one(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1)
    put_config(tmp_path / "a", "version_policy { latest { num_versions: 1 } }")
    async with explicit(load_model="a") as (served, control):
        put(tmp_path / "a" / "2", text=FAILS)
        assert (await control.load("a"))[0] is INVALID
        assert [row[:3] for row in await control.index()] == [("a", "1", "READY"), ("a", "2", "UNAVAILABLE")]
        assert await ask(served, "a") == 1
        put(tmp_path / "a" / "2", says=2)
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 2
        await until_index(control, Row("a", "2", "READY"))
        assert await control.unload("a") == FINE
        await until_index(control, Row("a", "2", "UNAVAILABLE", UNLOADED))


async def test_what_failed_is_tried_again(explicit: Explicit, tmp_path: Path) -> None:
    """Although nothing has changed in its folder: what it needs may be elsewhere."""
    load, needed = Loads(), tmp_path / "needed"
    text = SAYS + f"\n    def load(self, folder):\n        open({str(needed)!r}).close()\n"
    put(tmp_path / "models" / "a" / "1", says=1, text=text)
    async with explicit(tmp_path / "models", load=load) as (served, control):
        for _ in range(2):
            assert (await control.load("a"))[0] is INVALID
        assert load.begun == ["a/1"] * 2
        needed.touch()
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 1


async def test_a_configuration_holds_until_the_next_load(explicit: Explicit, tmp_path: Path) -> None:
    load = Loads()
    for version in (1, 2, 3):
        put(tmp_path / "a" / str(version), says=version)
    put_config(tmp_path / "a", "version_policy { latest { num_versions: 2 } }\nmax_batch_size: 2")

    async with explicit(load=load, load_model="a") as (served, control):
        assert await control.index() == [Row("a", "2", "READY"), Row("a", "3", "READY")]
        await expect_largest_batch(served, 2)

        config = config_text(
            version_policy={"specific": {"versions": [1]}},
            max_batch_size=7,
            instance_group=[{"count": 3, "kind": "KIND_CPU"}],
            **saying(55),
        )
        assert await control.load("a", config=config) == FINE
        assert await ask(served, "a") == 55
        await until_index(control, Row("a", "1", "READY"))
        await expect_largest_batch(served, 7)
        assert served.server.manager.registry.servable("a").model.instances == 3

        begun = len(load.begun)
        assert await control.load("a", config=config) == FINE
        assert len(load.begun) == begun, "the same configuration again is no change"

        assert await control.load("a") == FINE
        await until_index(control, Row("a", "2", "READY"), Row("a", "3", "READY"))
        await expect_largest_batch(served, 2)
        assert served.server.manager.registry.servable("a").model.instances == 1

        assert await control.load("a", config=config_text(**saying(5))) == FINE
        assert await ask(served, "a") == 5
        assert await control.unload("a") == FINE
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 3, "it is forgotten when the model is unloaded"


async def expect_largest_batch(served: Served, size: int) -> None:
    """By what is refused."""
    x = pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[size + 1])
    request = pb.ModelInferRequest(model_name="a", inputs=[x], raw_input_contents=[bytes(4 * (size + 1))])
    code, text, _ = await served.grpc.call("ModelInfer", request.SerializeToString())
    assert code is Code.INVALID_ARGUMENT
    assert f"inference request batch-size must be <= {size} for 'a'" in text


async def test_a_configuration_for_a_file(explicit: Explicit, tmp_path: Path) -> None:
    file = put(tmp_path / "a", says=1)
    async with explicit(file) as (served, control):
        refused = f"'config' requires a model folder in a repository; model 'a' is {file}"
        assert await control.load("a", config="{}") == (INVALID, refused)
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 1


# --- a configuration that says little: the rest is the model's, not the file's ---

FREE = SAYS.replace('inputs["x"] * 0', "inputs.get('x', 0) * 0").replace('INT32", [-1])]', 'INT32", [-1, 2])]')
LITTLE = [
    '{"max_batch_size":"16"}',
    '{"maxBatchSize":16.0}',
    config_text(max_batch_size=16, backend="python", name="a"),
    config_text(max_batch_size=16, input=[{"name": "x"}], output=[{"name": "y", "data_type": "TYPE_INT32"}]),
    config_text(max_batch_size=16, input=[{"name": "x", "dims": ["2"]}], platform=""),
    config_text(max_batch_size=16, version_policy={"latest": {}}, instance_group=[{"count": "2"}]),
    config_text(max_batch_size=16, dynamic_batching={"max_queue_delay_microseconds": "1000"}),
    config_text(max_batch_size=16, dynamic_batching=None),
]


async def test_what_a_configuration_leaves_out_is_the_models(explicit: Explicit, tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", says=1, text=FREE)
    put_config(tmp_path / "a", 'max_batch_size: 4 parameters { key: "says" value { string_value: "5" } }')
    async with explicit(load_model="a") as (served, control):
        for config in LITTLE:
            assert await control.load("a", config=config) == FINE
            servable = served.server.dataplane.servable(EVERYTHING, "a")
            assert (servable.model.max_batch_size, servable.platform) == (16, "python")
            assert servable.model.model_config.parameters == {}
            for specs, name in ((servable.signature.inputs, "x"), (servable.signature.outputs, "y")):
                assert [(spec.name, spec.datatype, spec.shape) for spec in specs] == [(name, "INT32", (-1, 2))]
            assert await control.load("a") == FINE
            servable = served.server.dataplane.servable(EVERYTHING, "a")
            assert (servable.model.max_batch_size, servable.model.model_config.parameters) == (4, {"says": "5"})
        assert await control.load("a", config="{}") == FINE
        assert served.server.dataplane.servable(EVERYTHING, "a").model.max_batch_size == 0
