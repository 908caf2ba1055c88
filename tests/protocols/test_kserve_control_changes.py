"""Models loaded again and at the same time as others, by clients that may leave, on a server that may stop."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from control_doors import (
    FAILS,
    FINE,
    SAYS,
    Loads,
    Row,
    ask,
    config_text,
    control_of,
    put,
    put_config,
    saying,
    until,
    until_index,
)
from doors import House, open_house

from triglot.core.errors import Code
from triglot.pb.kserve import inference_pb2 as pb

EXPLICIT: dict[str, Any] = {"model_control_mode": "explicit"}
UNLOADED = "unloaded"


@pytest.fixture(params=["grpc", "rest"])
def door(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def load() -> Loads:
    return Loads()


# --- loaded again ---


async def test_what_has_not_changed_is_not_loaded_again(door: str, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    put_config(tmp_path / "a", "max_batch_size: 4")
    async with open_house([tmp_path], load, **EXPLICIT) as house:
        control = control_of(house, door)
        for _ in range(3):
            assert await control.load("a") == FINE
        put_config(tmp_path / "a", 'name: "a" # says nothing more\nmax_batch_size: 4')
        assert await control.load("a") == FINE
        assert load.begun == ["a/1"]


async def test_what_has_changed_is_loaded_beside_what_serves(door: str, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with open_house([tmp_path], load, **EXPLICIT, load_model="a") as house:
        control = control_of(house, door)
        put(tmp_path / "a" / "1", says=22)
        load.gate.clear()
        loading = asyncio.create_task(control.load("a"))
        await until(lambda: len(load.begun) == 2)
        assert await ask(house, "a") == 1
        assert await control.index() == [Row("a", "1", "READY")]
        assert await control.ready()
        load.gate.set()
        assert await loading == FINE
        assert await ask(house, "a") == 22
        put_config(tmp_path / "a", 'parameters { key: "says" value { string_value: "3" } }')
        assert await control.load("a") == FINE
        assert await ask(house, "a") == 3
        assert load.begun == ["a/1"] * 3


async def test_a_new_version_replaces_the_old_one(door: str, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1", says=1)
    put_config(tmp_path / "a", "version_policy { latest { num_versions: 1 } }")
    async with open_house([tmp_path], load, **EXPLICIT, load_model="a") as house:
        control = control_of(house, door)
        put(tmp_path / "a" / "2", text=FAILS)
        assert (await control.load("a"))[0] is Code.INVALID_ARGUMENT
        assert [row[:3] for row in await control.index()] == [("a", "1", "READY"), ("a", "2", "UNAVAILABLE")]
        assert await ask(house, "a") == 1
        put(tmp_path / "a" / "2", says=2)
        assert await control.load("a") == FINE
        assert await ask(house, "a") == 2
        await until_index(control, Row("a", "2", "READY"))


async def test_a_configuration_holds_until_the_next_load(door: str, tmp_path: Path, load: Loads) -> None:
    for version in (1, 2, 3):
        put(tmp_path / "a" / str(version), says=version)
    put_config(tmp_path / "a", "version_policy { latest { num_versions: 2 } }\nmax_batch_size: 2")

    async with open_house([tmp_path], load, **EXPLICIT, load_model="a") as house:
        control = control_of(house, door)
        assert await control.index() == [Row("a", "2", "READY"), Row("a", "3", "READY")]
        await expect_largest_batch(house, 2)

        config = config_text(
            version_policy={"specific": {"versions": [1]}},
            max_batch_size=7,
            instance_group=[{"count": 3, "kind": "KIND_CPU"}],
            **saying(55),
        )
        assert await control.load("a", config=config) == FINE
        assert await ask(house, "a") == 55
        await until_index(control, Row("a", "1", "READY"))
        await expect_largest_batch(house, 7)
        assert house.server.manager.servable("a").model.instances == 3

        begun = len(load.begun)
        assert await control.load("a", config=config) == FINE
        assert len(load.begun) == begun, "the same configuration again is no change"

        assert await control.load("a") == FINE
        await until_index(control, Row("a", "2", "READY"), Row("a", "3", "READY"))
        await expect_largest_batch(house, 2)
        assert house.server.manager.servable("a").model.instances == 1


async def expect_largest_batch(house: House, size: int) -> None:
    """By what is refused."""
    x = pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[size + 1])
    request = pb.ModelInferRequest(model_name="a", inputs=[x], raw_input_contents=[bytes(4 * (size + 1))])
    code, text, _ = await house.grpc.call("ModelInfer", request.SerializeToString())
    assert code is Code.INVALID_ARGUMENT
    assert f"inference request batch-size must be <= {size} for 'a'" in text


async def test_a_configuration_is_forgotten_when_the_model_is_unloaded(door: str, tmp_path: Path) -> None:
    put(tmp_path / "a", says=1)
    async with open_house([tmp_path], **EXPLICIT) as house:
        control = control_of(house, door)
        assert await control.load("a", config=config_text(**saying(5))) == FINE
        assert await ask(house, "a") == 5
        assert await control.unload("a") == FINE
        assert await control.load("a") == FINE
        assert await ask(house, "a") == 1


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
async def test_a_configuration_that_is_wrong(door: str, config: str, text: str, tmp_path: Path) -> None:
    put(tmp_path / "a", says=1)
    async with open_house([tmp_path], **EXPLICIT, load_model="a") as house:
        control = control_of(house, door)
        code, found = await control.load("a", config=config)
        assert code in (Code.INVALID_ARGUMENT, Code.INTERNAL)
        assert text in found
        assert await ask(house, "a") == 1
        assert await control.load("a") == FINE


async def test_a_configuration_for_a_file(door: str, tmp_path: Path) -> None:
    file = put(tmp_path / "a", says=1)
    async with open_house([file], **EXPLICIT) as house:
        control = control_of(house, door)
        assert await control.load("a", config="{}") == (
            Code.INVALID_ARGUMENT,
            "model 'a' is no folder, and takes no configuration",
        )
        assert await control.load("a") == FINE
        assert await ask(house, "a") == 1


# --- at the same time ---


async def test_one_model_by_many_at_once(door: str, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1", says=1)
    async with open_house([tmp_path], load, **EXPLICIT) as house:
        control = control_of(house, door)
        load.gate.clear()
        loading = [asyncio.create_task(control.load("a")) for _ in range(10)]
        await until(lambda: len(load.begun) == 1)
        assert await control.index() == [Row("a", "1", "LOADING")]
        assert not await control.ready("a")
        assert not await control.ready()
        load.gate.set()
        assert await asyncio.gather(*loading) == [FINE] * 10
        assert load.begun == ["a/1"]


async def test_many_models_at_once(door: str, tmp_path: Path) -> None:
    names = [f"m{number}" for number in range(10)]
    for number, name in enumerate(names):
        put(tmp_path / name, says=number, text=FAILS if number == 3 else SAYS)
    async with open_house([tmp_path], **EXPLICIT) as house:
        control = control_of(house, door)
        told = await asyncio.gather(*(control.load(name) for name in names))
        assert [one == FINE for one in told] == [number != 3 for number in range(10)]
        assert [await ask(house, name) for name in names if name != "m3"] == [0, 1, 2, *range(4, 10)]
        await asyncio.gather(*(control.unload(name) for name in names))
        assert {row.reason for row in await control.index() if row.state == "UNAVAILABLE"} == {UNLOADED}


async def test_a_model_that_is_unloaded_while_it_loads(door: str, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    async with open_house([tmp_path], load, **EXPLICIT) as house:
        control = control_of(house, door)
        load.gate.clear()
        loading = asyncio.create_task(control.load("a"))
        await until(lambda: load.begun == ["a/1"])
        assert await control.unload("a") == FINE
        assert await control.index() == [Row("a", "1", "LOADING")]
        load.gate.set()
        assert await loading == (
            Code.UNAVAILABLE,
            "model 'a' was unloaded, or loaded again, while it was loaded",
        )
        await until_index(control, Row("a", "1", "UNAVAILABLE", UNLOADED))
        assert await control.load("a") == FINE


async def test_the_last_of_several_configurations_counts(door: str, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1")
    async with open_house([tmp_path], load, **EXPLICIT) as house:
        control = control_of(house, door)
        load.gate.clear()
        first = asyncio.create_task(control.load("a", config=config_text(**saying(1))))
        await until(lambda: len(load.begun) == 1)
        second = asyncio.create_task(control.load("a", config=config_text(**saying(2))))
        # It is wanted as soon as the disk has been looked at; only then does the first load go on.
        wanted = house.server.manager._wanted
        await until(lambda: house.server.manager._wanted is not wanted)
        load.gate.set()
        assert (await first)[0] is Code.UNAVAILABLE
        assert await second == FINE
        assert await ask(house, "a") == 2


async def test_loads_and_unloads_in_any_order(tmp_path: Path) -> None:
    """Whatever comes of each, the models are where the last word puts them."""
    names = ["a", "b", "c"]
    for name in names:
        put(tmp_path / name, says=1)
    choose = random.Random(7)
    async with open_house([tmp_path], **EXPLICIT) as house:

        async def client(door: str) -> None:
            control = control_of(house, door)
            for _ in range(20):
                name = choose.choice(names)
                match choose.randrange(4):
                    case 0:
                        assert await control.unload(name) == FINE
                    case 1:
                        config = config_text(**saying(choose.randrange(3)))
                        code, text = await control.load(name, config=config)
                        assert code is Code.OK or (code is Code.UNAVAILABLE and "while it was loaded" in text)
                    case 2:
                        code, text = await control.load(name)
                        assert code is Code.OK or (code is Code.UNAVAILABLE and "while it was loaded" in text)
                    case _:
                        answer = await ask(house, name)
                        assert isinstance(answer, int) or answer[0] in (Code.NOT_FOUND, Code.UNAVAILABLE)

        await asyncio.gather(*(client(door) for door in ("grpc", "rest") * 3))
        control = control_of(house, "grpc")
        for name in names[:2]:
            assert await control.load(name) == FINE
            assert await ask(house, name) == 1
        assert await control.unload("c") == FINE
        rows = sorted(await control.index())
        assert [row[:3] for row in rows[:2]] == [(name, "1", "READY") for name in names[:2]]
        assert all(row.state in ("UNLOADING", "UNAVAILABLE", "LOADING") for row in rows[2:])
        assert await control.ready()


# --- clients that leave, a server that stops ---


async def test_a_client_that_leaves_while_its_model_loads(tmp_path: Path, load: Loads) -> None:
    for name in ("a", "b"):
        put(tmp_path / name / "1", says=1)
    async with open_house([tmp_path], load, **EXPLICIT) as house:
        for name, door in (("a", "grpc"), ("b", "rest")):
            control = control_of(house, door)
            load.gate.clear()
            loading = asyncio.create_task(control.load(name))
            await until(lambda name=name: f"{name}/1" in load.begun)  # type: ignore[misc]
            loading.cancel()
            await asyncio.wait([loading])
            assert Row(name, "1", "LOADING") in await control.index()
            load.gate.set()
            # What it asked for is done all the same.
            async with asyncio.timeout(20):
                while Row(name, "1", "READY") not in await control.index():
                    pass
            assert await ask(house, name) == 1


async def test_a_server_that_stops_while_a_model_loads(door: str, tmp_path: Path, load: Loads) -> None:
    put(tmp_path / "a" / "1", says=1)
    put(tmp_path / "b" / "1", says=1)
    load.gate.clear()
    async with open_house([tmp_path], load, **EXPLICIT, grace=0.05) as house:
        control = control_of(house, door)
        loads = [asyncio.create_task(control.load(name)) for name in ("a", "b")]
        await until(lambda: len(load.begun) == 1)
        stopping = asyncio.create_task(house.server.stop())
        assert await asyncio.gather(*loads) == [(Code.UNAVAILABLE, "the server is shutting down")] * 2
        await stopping
        assert len(load.begun) == 1
        load.gate.set()
