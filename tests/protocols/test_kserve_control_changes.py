"""Models loaded again: what has changed, what failed, and the configuration that a request brings (spec 3.9)."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
from control_clients import (
    EXPLICIT,
    FAILS,
    FINE,
    SAYS,
    UNLOADED,
    Loads,
    Row,
    ask,
    config_text,
    control_of,
    put,
    put_config,
    saying,
    until_index,
)
from kserve_served import Served, serve_models

from triglot.core.errors import Code
from triglot.core.operation import EVERYTHING
from triglot.pb.kserve import inference_pb2 as pb
from waiting import until


@pytest.fixture(params=["grpc", "rest"])
def interface(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def load() -> Loads:
    return Loads()


# --- loaded again ---


async def test_what_has_not_changed_is_not_loaded_again(interface: str, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put_config(tmp_path / "a", "max_batch_size: 4")
    async with serve_models([tmp_path], load, **EXPLICIT) as served:
        control = control_of(served, interface)
        for _ in range(3):
            assert await control.load("a") == FINE
        put_config(tmp_path / "a", 'name: "a" # says nothing more\nmax_batch_size: 4')
        assert await control.load("a") == FINE
        assert load.begun == ["a/1"]


async def test_changed_model_is_loaded_while_the_old_one_serves(
    interface: str, tmp_path: Path, load: Loads
) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], load, **EXPLICIT, load_model="a") as served:
        control = control_of(served, interface)
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


async def test_a_new_version_replaces_the_old_one(interface: str, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1", says=1)
    put_config(tmp_path / "a", "version_policy { latest { num_versions: 1 } }")
    async with serve_models([tmp_path], load, **EXPLICIT, load_model="a") as served:
        control = control_of(served, interface)
        put(tmp_path / "a" / "2", text=FAILS)
        assert (await control.load("a"))[0] is Code.INVALID_ARGUMENT
        assert [row[:3] for row in await control.index()] == [("a", "1", "READY"), ("a", "2", "UNAVAILABLE")]
        assert await ask(served, "a") == 1
        put(tmp_path / "a" / "2", says=2)
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 2
        await until_index(control, Row("a", "2", "READY"))
        assert await control.unload("a") == FINE
        await until_index(control, Row("a", "2", "UNAVAILABLE", UNLOADED))


async def test_what_failed_is_tried_again(interface: str, tmp_path: Path, load: Loads) -> None:
    """Although nothing has changed in its folder: what it needs may be elsewhere."""
    needed = tmp_path / "needed"
    text = SAYS + f"\n    def load(self, folder):\n        open({str(needed)!r}).close()\n"
    put(tmp_path / "models" / "a" / "1", says=1, text=text)
    async with serve_models([tmp_path / "models"], load, **EXPLICIT) as served:
        control = control_of(served, interface)
        for _ in range(2):
            assert (await control.load("a"))[0] is Code.INVALID_ARGUMENT
        assert load.begun == ["a/1"] * 2
        needed.touch()
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 1


async def test_a_repository_that_cannot_be_read(interface: str, tmp_path: Path) -> None:
    """A mount that went away: the serving version continues, and a load says what is the matter."""
    repository = tmp_path / "repository"
    put(repository / "a", says=1)
    async with serve_models([repository], **EXPLICIT, load_model="a") as served:
        control = control_of(served, interface)
        repository.rename(tmp_path / "elsewhere")
        why = f"failed to load 'a', failed to poll from model repository: {repository}: no such file or folder"
        assert await control.load("a") == (Code.INTERNAL, why)
        assert await ask(served, "a") == 1
        assert await control.index() == [Row("a", "1", "READY")]
        assert await control.unload("a") == FINE
        (tmp_path / "elsewhere").rename(repository)
        assert await control.load("a") == FINE


async def test_a_configuration_holds_until_the_next_load(interface: str, tmp_path: Path, load: Loads) -> None:
    for version in (1, 2, 3):
        put(tmp_path / "a" / str(version), says=version)
    put_config(tmp_path / "a", "version_policy { latest { num_versions: 2 } }\nmax_batch_size: 2")

    async with serve_models([tmp_path], load, **EXPLICIT, load_model="a") as served:
        control = control_of(served, interface)
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


async def expect_largest_batch(served: Served, size: int) -> None:
    """By what is refused."""
    x = pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[size + 1])
    request = pb.ModelInferRequest(model_name="a", inputs=[x], raw_input_contents=[bytes(4 * (size + 1))])
    code, text, _ = await served.grpc.call("ModelInfer", request.SerializeToString())
    assert code is Code.INVALID_ARGUMENT
    assert f"inference request batch-size must be <= {size} for 'a'" in text


async def test_a_configuration_is_forgotten_when_the_model_is_unloaded(interface: str, tmp_path: Path) -> None:
    put(tmp_path / "a", says=1)
    async with serve_models([tmp_path], **EXPLICIT) as served:
        control = control_of(served, interface)
        assert await control.load("a", config=config_text(**saying(5))) == FINE
        assert await ask(served, "a") == 5
        assert await control.unload("a") == FINE
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 1


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (config_text(max_batch_size=-1), "max_batch_size: expected at least 0, got -1"),
        (config_text(default_model_filename="../b/model.py"), "default_model_filename: expected a path inside"),
        (config_text(backend="nonsense"), "backend: expected one of"),
        (
            config_text(input=[{"name": "z", "data_type": "TYPE_FP32", "dims": [1]}]),
            "input[0].name: the configuration says 'z', the model has 'x'",
        ),
        ('{"nonsense": 1}', 'no field named "nonsense"'),
        ('{"max_batch_size": "', "the configuration in the request to load model 'a'"),
        ('{"input": ' + "[" * 100_000, "the configuration in the request to load model 'a'"),
    ],
)
async def test_a_configuration_that_is_wrong(interface: str, config: str, text: str, tmp_path: Path) -> None:
    put(tmp_path / "a", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        control = control_of(served, interface)
        code, found = await control.load("a", config=config)
        assert code is Code.INVALID_ARGUMENT
        assert text in found
        assert await ask(served, "a") == 1
        assert await control.load("a") == FINE


async def test_a_configuration_for_a_file(interface: str, tmp_path: Path) -> None:
    file = put(tmp_path / "a", says=1)
    async with serve_models([file], **EXPLICIT) as served:
        control = control_of(served, interface)
        assert await control.load("a", config="{}") == (
            Code.INVALID_ARGUMENT,
            f"'config' requires a model folder in a repository; model 'a' is {file}",
        )
        assert await control.load("a") == FINE
        assert await ask(served, "a") == 1


@pytest.mark.parametrize("verb", ["load", "unload"])
async def test_a_body_with_another_key(verb: str, tmp_path: Path, load: Loads) -> None:
    """As by mistake: a configuration is a parameter."""
    put(tmp_path / "a" / "1")
    async with serve_models([tmp_path], load, **EXPLICIT) as served:
        for fields in ({"config": {"max_batch_size": 4}}, {"parameters": {}, "config": "{}"}):
            body = json.dumps(fields).encode()
            status, _, reply = await served.rest.call("POST", f"/v2/repository/models/a/{verb}", body)
            assert (status, json.loads(reply)) == (
                400,
                {"error": "unexpected key 'config', expected 'parameters'"},
            )
        assert load.begun == []


# --- a configuration that says little: the rest is the model's ---

FREE = SAYS.replace('inputs["x"] * 0', "inputs.get('x', 0) * 0").replace('INT32", [-1])]', 'INT32", [-1, 2])]')


@pytest.mark.parametrize(
    "config",
    [
        '{"max_batch_size":"16"}',
        '{"maxBatchSize":16.0}',
        config_text(max_batch_size=16, backend="python", name="a"),
        config_text(max_batch_size=16, input=[{"name": "x"}], output=[{"name": "y", "data_type": "TYPE_INT32"}]),
        config_text(max_batch_size=16, input=[{"name": "x", "dims": ["2"]}], platform=""),
        config_text(max_batch_size=16, version_policy={"latest": {}}, instance_group=[{"count": "2"}]),
        config_text(max_batch_size=16, dynamic_batching={"max_queue_delay_microseconds": "1000"}),
        config_text(max_batch_size=16, dynamic_batching=None),
    ],
)
async def test_what_a_configuration_leaves_out_is_the_models(interface: str, config: str, tmp_path: Path) -> None:
    put(tmp_path / "a" / "1", text=FREE)
    put_config(tmp_path / "a", "max_batch_size: 4")
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        assert await control_of(served, interface).load("a", config=config) == FINE
        servable = served.server.dataplane.servable(EVERYTHING, "a")
        assert (servable.model.max_batch_size, servable.platform) == (16, "python")
        for specs, name in ((servable.signature.inputs, "x"), (servable.signature.outputs, "y")):
            assert [(spec.name, spec.datatype, spec.shape) for spec in specs] == [(name, "INT32", (-1, 2))]


async def test_a_configuration_stands_in_place_of_the_file(interface: str, tmp_path: Path) -> None:
    """What it omits is not taken from there, but from the model (spec 3.9)."""
    put(tmp_path / "a" / "1", says=1)
    put_config(tmp_path / "a", 'max_batch_size: 4 parameters { key: "says" value { string_value: "5" } }')
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        assert await ask(served, "a") == 5
        assert await control_of(served, interface).load("a", config="{}") == FINE
        assert await ask(served, "a") == 1
        assert served.server.dataplane.servable(EVERYTHING, "a").model.max_batch_size == 0


@pytest.mark.parametrize(
    ("config", "text"),
    [
        ("", "expected a JSON object"),
        ("[]", "expected a JSON object"),
        ('"{}"', "expected a JSON object"),
        ('{"max_batch_size": 4', "the configuration in the request to load model 'a': "),
        ('{"max_batch_size": "four"}', "max_batch_size"),
        ('{"max_batch_size": 4.5}', "max_batch_size"),
        ('{"max_batch_size": 4000000000}', "max_batch_size"),
        ('{"max_batch_size": {}}', "max_batch_size"),
        ('{"input": {"name": "x"}}', "input"),
        ('{"input": [{"name": "x", "data_type": "TYPE_FLOAT"}]}', "TYPE_FLOAT"),
        ('{"input": [{"data_type": "TYPE_INT32"}]}', "input[0].name: expected a name, got none"),
        ('{"dynamic_batching": {"preferred_size": 4}}', "preferred_size"),
        ('{"dynamic_batching": {}, "sequence_batching": {}}', "scheduling_choice"),
        ('{"name": "b"}', "name: expected 'a', got 'b'"),
        ('{"name": "a", "name": "a"}', "name"),
        (config_text(max_batch_size=8, input=[{"name": "x", "dims": [3]}]), "input[0].dims: the configuration"),
        (
            config_text(platform="onnxruntime_onnx"),
            "a: found a configuration, but no version of the model; expected 1/",
        ),
    ],
)
async def test_what_is_no_configuration(interface: str, config: str, text: str, tmp_path: Path) -> None:
    """The error is reported, and the serving version continues."""
    put(tmp_path / "a" / "1", says=1)
    async with serve_models([tmp_path], **EXPLICIT, load_model="a") as served:
        control = control_of(served, interface)
        code, found = await control.load("a", config=config)
        assert text in found
        assert "\n" not in found
        assert code is Code.INVALID_ARGUMENT
        assert await ask(served, "a") == 1
        [row] = await control.index()
        assert row[:3] == ("a", "1", "READY")
        assert row.reason.removesuffix(";") in found
