"""Triton's Python models as their users write them, through a server's ports."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from numpy.testing import assert_array_equal

from tests.backends.triton_served import (
    MODELS,
    X_TO_Y,
    GrpcClient,
    copied,
    ints,
    reply,
    request,
    serving,
    text,
    write_model,
)
from triglot.backends.child_modules import ROOT, SPAWNED

SUM = {"INPUT0": np.arange(4, dtype=np.float32), "INPUT1": np.full(4, 2, np.float32)}
UTILS = ("triton_python_backend_utils", "c_python_backend_utils")


def is_sum(outputs: Mapping[str, Any]) -> bool:
    return bool(
        (outputs["OUTPUT0"] == SUM["INPUT0"] + SUM["INPUT1"]).all()
        and (outputs["OUTPUT1"] == SUM["INPUT0"] - SUM["INPUT1"]).all()
    )


def caches(folder: Path) -> list[Path]:
    return list(folder.rglob("__pycache__"))


async def request_seen(client: GrpcClient, **fields: Any) -> dict[str, Any]:
    """What the model `what_came` says."""
    answer = await client.infer("what_came", {"TEXT": text("a")[None]}, **fields)
    seen: dict[str, Any] = json.loads(answer.outputs["SAID"].item())
    return seen


async def test_add_sub() -> None:
    async with serving(MODELS / "add_sub") as client:
        assert is_sum((await client.infer("add_sub", SUM)).outputs)
        answer = await client.infer("add_sub", SUM, outputs=["OUTPUT1"])
        assert list(answer.outputs) == ["OUTPUT1"]


async def test_other_models() -> None:
    async with serving(MODELS) as client:
        assert is_sum((await client.infer("bls_sync", SUM | {"MODEL_NAME": text("add_sub")})).outputs)
        assert is_sum((await client.infer("bls_async", SUM)).outputs)
        answer = await client.infer("bls_square", {"IN": ints(5)})
        assert answer.outputs["SUM"].tolist() == [25]
        answer = await client.infer("bls_square_async", {"IN": ints(5)})
        assert answer.outputs["SUM"].tolist() == [50]
        answer = await client.infer("bls_square", {"IN": ints(0)})
        assert answer.outputs["SUM"].tolist() == [0]


async def test_the_errors_of_other_models() -> None:
    async with serving(MODELS) as client:
        code, message = await client.failure("bls_sync", SUM | {"MODEL_NAME": text("nope")})
        assert (code, "'nope'" in message) == (grpc.StatusCode.NOT_FOUND, True)
        code, message = await client.failure("bls_sync", SUM | {"MODEL_NAME": text("square")})
        assert (code, "'square'" in message) == (grpc.StatusCode.UNIMPLEMENTED, True)


async def test_what_a_model_knows() -> None:
    async with serving(MODELS) as client:
        seen = await request_seen(
            client,
            id="seven",
            parameters={"priority": 2, "timeout": 9_000_000, "mine": 3, "text": "a", "yes": True},
        )
        own = {name: seen[name] for name in ("id", "correlation_id", "flags", "timeout", "priority", "bias")}
        assert own == {
            "id": "seven",
            "correlation_id": 0,
            "flags": 0,
            "timeout": 9_000_000,
            "priority": 2,
            "bias": False,
        }
        assert json.loads(seen["parameters"]) == {"mine": 3, "text": "a", "yes": True}
        assert seen["outputs"] == ["OTHER", "SAID"]
        assert seen["model"] == ["what_came", 1]
        assert seen["inputs"] == [["TEXT", [1, 1], 13, True]]
        assert (seen["cancelled"], seen["trace"]) == (False, None)
        assert seen["ready"] == [True, False]
        assert seen["version_ready"] == [True, False]
        assert seen["model_dir"] == str(MODELS / "what_came" / "1")

        seen = await request_seen(
            client, outputs=["SAID"], parameters={"sequence_id": "a", "sequence_start": True}
        )
        assert (seen["outputs"], seen["correlation_id"], seen["flags"]) == (["SAID"], "a", 1)
        seen = await request_seen(client, parameters={"sequence_id": 4, "sequence_end": True})
        assert (seen["correlation_id"], seen["flags"]) == (4, 2)


async def test_the_parameters_of_a_response() -> None:
    async with serving(MODELS) as client:
        answer = await client.infer("what_came", {"TEXT": text("a")[None]})
        assert answer.parameters == {"words": 2, "short": True, "of": "it"}
        assert_array_equal(answer.outputs["OTHER"], [["é".encode()]])


async def test_arguments_of_initialize(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    async with serving(MODELS) as client:
        args = (await request_seen(client))["args"]
    assert all(isinstance(value, str) for value in args.values())
    config = json.loads(args.pop("model_config"))
    kinds = {args.pop("model_instance_name"), args.pop("model_instance_device_id")}
    assert kinds in ({f"what_came_0_{number}", str(number // 2)} for number in range(4))
    assert args == {
        "model_instance_kind": "GPU",
        "model_name": "what_came",
        "model_repository": str(MODELS / "what_came"),
        "model_version": "1",
    }
    assert (config["name"], config["backend"], config["max_batch_size"]) == ("what_came", "python", 8)
    assert [tensor["dims"] for tensor in config["input"]] == [[1], [1]]
    assert [tensor["optional"] for tensor in config["input"]] == [False, True]
    assert config["output"][1]["data_type"] == "TYPE_STRING"
    assert config["parameters"]["unit"] == {"string_value": "km"}
    (group,) = config["instance_group"]
    assert (group["name"], group["kind"], group["count"]) == ("what_came_0", "KIND_GPU", 2)
    assert config["version_policy"] == {"latest": {"num_versions": 1}}
    assert "model_transaction_policy" not in config
    assert sorted(record.message for record in caplog.records if record.message.startswith("initializing")) == [
        f"initializing what_came_0_{number}" for number in range(4)
    ]


NAMED = """
class TritonPythonModel:
    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.names = " ".join((args["model_name"], config["name"], args["model_instance_name"]))

    def execute(self, requests):
        names = pb_utils.Tensor("Y", np.array([self.names.encode()], object))
        return [pb_utils.InferenceResponse([names]) for _ in requests]
"""


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_a_name_of_ones_own(tmp_path: Path, execution: str) -> None:
    """As with --model-name."""
    parameter = f'parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}'
    config = X_TO_Y.replace('"Y" data_type: TYPE_INT32', '"Y" data_type: TYPE_STRING') + parameter
    path = write_model(tmp_path, "export", NAMED, config)
    async with serving({"mine": path}) as client:
        answer = await client.infer("mine", {"X": ints(1)})
        assert answer.outputs["Y"].item() == b"mine mine mine_0_0"


async def test_its_own_modules(tmp_path: Path) -> None:
    copied(tmp_path, "with_helpers")
    path, modules = list(sys.path), set(sys.modules)
    async with serving(tmp_path) as client:
        answer = await client.infer("with_helpers", {"IN": ints(1, 2)})
        assert answer.outputs["OUT"].tolist() == [8, 14]
        assert "helper" not in sys.modules
    assert [entry for entry in sys.path if entry != SPAWNED] == [entry for entry in path if entry != SPAWNED]
    new = sys.modules.keys() - modules
    assert not [name for name in new if name.startswith(f"{ROOT}.") or name in ("helper", "late", *UTILS)]
    assert not caches(tmp_path)


IMPORTS = """
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(__file__), "net"))
import model
import weights

class TritonPythonModel:
    def execute(self, requests):
        import model as again
        assert again is model, again
        y = np.array([model.VALUE, weights.VALUE], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]) for _ in requests]
"""


async def test_a_folder_that_it_puts_in_front_of_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files may be called as the model's own; what another model finds there is another module."""
    for number, name in enumerate("mn"):
        folder = write_model(tmp_path, name, IMPORTS, X_TO_Y) / "1"
        (folder / "weights.py").write_text("from model import VALUE\n")
        (folder / "net").mkdir()
        (folder / "net" / "model.py").write_text(f"VALUE = {number}\n")
    monkeypatch.setattr(sys, "path", list(sys.path))
    modules = set(sys.modules)
    async with serving(tmp_path) as client:
        for number, name in enumerate("mn"):
            assert (await client.infer(name, {"X": ints(1)})).outputs["Y"].tolist() == [number, number]
    assert not [name for name in sys.modules.keys() - modules if name.startswith(f"{ROOT}.")]
    assert "model" not in sys.modules.keys() - modules


TESTED = """
import importlib
import unittest

VALUE = {number}


class Case(unittest.TestCase):
    def test_value(self):
        import package.inner

        self.assertEqual(importlib.import_module("helper").VALUE, {number})
        self.assertEqual(importlib.import_module("package.inner").VALUE, {number})
        self.assertIs(importlib.import_module("package.inner").MARK, package.inner.MARK)
        with self.assertRaisesRegex(ModuleNotFoundError, "No module named 'helpless'"):
            importlib.import_module("helpless")


class TritonPythonModel:
    def execute(self, requests):
        result = unittest.main("model", exit=False).result
        y = np.array([result.testsRun, result.wasSuccessful()], np.int32)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)]) for _ in requests]
"""


@pytest.mark.parametrize("execution", ["thread", "process"])
async def test_what_its_code_calls_finds_its_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, execution: str
) -> None:
    """unittest imports the model, as Triton's own tests of such models have it do; each model is its own."""
    more = f'parameters {{ key: "execution" value {{ string_value: "{execution}" }} }}'
    for number, name in enumerate("mn"):
        folder = write_model(tmp_path, name, TESTED.format(number=number), X_TO_Y + more) / "1"
        (folder / "package").mkdir()
        for file in ("helper.py", "package/__init__.py", "package/inner.py"):
            (folder / file).write_text(f"VALUE, MARK = {number}, object()\n")
    monkeypatch.setattr(sys, "argv", ["triglot"])
    modules, finders = set(sys.modules), list(sys.meta_path)
    async with serving(tmp_path) as client:
        for name in "mnm":
            assert (await client.infer(name, {"X": ints(1)})).outputs["Y"].tolist() == [1, 1]
    assert sys.meta_path == finders
    assert not {"model", "helper", "package", "package.inner"} & (sys.modules.keys() - modules)


async def test_utilities_can_be_imported_while_a_model_is_loaded() -> None:
    assert not sys.modules.keys() & set(UTILS)
    async with serving(MODELS / "add_sub"):
        assert sys.modules.keys() >= set(UTILS)
    assert not sys.modules.keys() & set(UTILS)


async def test_utilities_that_are_installed_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "installed").mkdir()
    (tmp_path / "installed" / f"{UTILS[0]}.py").write_text("INSTALLED = True\n")
    monkeypatch.syspath_prepend(str(tmp_path / "installed"))
    async with serving(MODELS / "add_sub") as client:
        assert is_sum((await client.infer("add_sub", SUM)).outputs)
        assert UTILS[0] not in sys.modules


async def test_a_decoupled_model() -> None:
    async with serving(MODELS / "square") as client:
        messages = [
            message
            async for message in client.stream(
                request("square", {"IN": ints(number)}, id=str(number)) for number in (3, 0, 5)
            )
        ]
    assert not any(message.error_message for message in messages)
    by_id: dict[str, list[int]] = {}
    for message in messages:
        answer = reply(message.infer_response)
        assert answer.parameters["triton_final_response"] is False
        by_id.setdefault(message.infer_response.id, []).append(answer.outputs["OUT"].item())
    assert by_id == {"3": [3] * 3, "5": [5] * 5}


async def test_a_decoupled_model_over_a_call_with_one_answer() -> None:
    async with serving(MODELS / "square") as client:
        code, _ = await client.failure("square", {"IN": ints(1)})
        assert code is grpc.StatusCode.UNIMPLEMENTED
