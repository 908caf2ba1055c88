"""What keeps Triton Python models from loading, and what their `auto_complete_config` may say."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import triglot
from tests.backends.triton_served import X_TO_Y, ints, serving, write_model
from triglot import backends
from triglot.backends.triton_python.config import ModelConfig
from triglot.core.errors import ModelLoadError
from triglot.core.operation import EVERYTHING

EXECUTE = "\n    def execute(self, requests):\n        return []\n"
CLASS = f"class TritonPythonModel:{EXECUTE}"


def with_auto_complete(*lines: str) -> str:
    body = "\n".join(f"        {line}" for line in lines)
    return f"class TritonPythonModel:\n    @staticmethod\n    def auto_complete_config(config):\n{body}\n{EXECUTE}"


@pytest.mark.parametrize(
    ("code", "config", "expected"),
    [
        (CLASS, "", "model.py: expected inputs and outputs in a config.pbtxt, or from"),
        ("class TritonPythonModel:\n    pass\n", X_TO_Y, "TritonPythonModel has no execute(self, requests)"),
        ("1 / 0  # TritonPythonModel\n", X_TO_Y, "ZeroDivisionError: division by zero"),
        ("# TritonPythonModel\n", X_TO_Y, "found no subclass of triglot.Model"),
        ("import nope  # TritonPythonModel\n", X_TO_Y, "No module named 'nope'"),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n"
            f"        raise OSError('no file')\n{EXECUTE}",
            X_TO_Y,
            "model.py:10: OSError: no file",
        ),
        (
            f"class TritonPythonModel:\n    def initialize(self, args):\n        raise SystemExit(3)\n{EXECUTE}",
            X_TO_Y,
            "model.py:10: SystemExit: 3",
        ),
        (
            "class TritonPythonModel:\n    def initialize(self, args):\n"
            "        raise pb_utils.TritonModelException('no GPU')\n" + EXECUTE,
            X_TO_Y + "model_transaction_policy { decoupled: true }",
            "model.py:10: TritonModelException: no GPU",
        ),
        (
            with_auto_complete("pass"),
            X_TO_Y,
            "expected it to return the ModelConfig it received, got NoneType",
        ),
        (with_auto_complete("raise KeyError('a')"), X_TO_Y, "model.py:11: KeyError: 'a'"),
        (
            with_auto_complete(
                'config.add_input({"name": "X", "data_type": "FP32", "dims": [1]})', "return config"
            ),
            "",
            "input 'X': data_type: expected one like TYPE_FP32, got 'FP32'",
        ),
        (
            with_auto_complete('config.add_input({"name": "X", "data_type": "TYPE_FP32", "dims": [1]})'),
            X_TO_Y,
            "configuration expects data_type TYPE_INT32 for input 'X'",
        ),
        (
            with_auto_complete("config.set_max_batch_size(2)"),
            X_TO_Y + "max_batch_size: 4",
            "max_batch_size 4, but in",
        ),
    ],
)
async def test_what_keeps_it_from_loading(tmp_path: Path, code: str, config: str, expected: str) -> None:
    write_model(tmp_path, "m", code, config)
    with pytest.raises(ModelLoadError) as caught:
        async with serving(tmp_path):
            pass
    assert expected in str(caught.value.__cause__)
    assert not [name for name in sys.modules if "triton_python_backend" in name and "triglot.backends" not in name]


async def test_an_instance_that_fails_ends_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = f"""
class TritonPythonModel:
    def initialize(self, args):
        assert not args["model_instance_name"].endswith("2")

    def finalize(self):
        print("finalized")
{EXECUTE}"""
    for name, policy in (("one", "false"), ("two", "true")):
        config = (
            X_TO_Y + "instance_group [ { count: 3 } ] " + f"model_transaction_policy {{ decoupled: {policy} }}"
        )
        write_model(tmp_path / name, "m", code, config)
        with pytest.raises(ModelLoadError):
            async with serving(tmp_path / name):
                pass
        assert capsys.readouterr().out == "finalized\n" * 2


async def test_a_model_without_initialize_and_finalize(tmp_path: Path) -> None:
    code = CLASS.replace("[]", "[pb_utils.InferenceResponse([])]")
    write_model(tmp_path, "m", code, X_TO_Y)
    async with serving(tmp_path) as client:
        assert (await client.infer("m", {"X": ints(1)})).outputs == {}


async def test_auto_complete_says_it_all(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    @staticmethod
    def auto_complete_config(auto_complete_model_config):
        inputs = [{"name": "X", "data_type": "TYPE_INT32", "dims": [1]},
                  {"name": "BIAS", "data_type": "TYPE_INT32", "dims": [1], "optional": True}]
        outputs = [{"name": "Y", "data_type": "TYPE_STRING", "dims": [1]}]
        config = auto_complete_model_config.as_dict()
        input_names = [one["name"] for one in config["input"]]
        output_names = [one["name"] for one in config["output"]]
        for input in inputs:
            if input["name"] not in input_names:
                auto_complete_model_config.add_input(input)
        for output in outputs:
            if output["name"] not in output_names:
                auto_complete_model_config.add_output(output)
        auto_complete_model_config.set_max_batch_size(3)
        auto_complete_model_config.set_dynamic_batching()
        return auto_complete_model_config

    def initialize(self, args):
        self.config = args["model_config"]

    def execute(self, requests):
        y = [[self.config]] * len(pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy())
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array(y, object))])]
"""
    write_model(tmp_path, "m", code)
    async with serving(tmp_path) as client:
        answer = await client.infer("m", {"X": ints(1)[None]})
        model = client.server.dataplane.servable(EVERYTHING, "m").model
        assert (model.max_batch_size, model.dynamic_batching) == (3, triglot.DynamicBatching())
        assert [(tensor.name, tensor.shape, tensor.optional) for tensor in model.inputs] == [
            ("X", (-1, 1), False),
            ("BIAS", (-1, 1), True),
        ]
    config = json.loads(answer.outputs["Y"].item())
    assert (config["max_batch_size"], config["dynamic_batching"]) == (3, {})
    assert [tensor["name"] for tensor in config["input"]] == ["X", "BIAS"]
    assert config["output"][0]["label_filename"] == ""
    assert config["instance_group"][0]["kind"] == "KIND_CPU"


def test_a_model_can_be_used_without_a_server(tmp_path: Path) -> None:
    code = """
class TritonPythonModel:
    def initialize(self, args):
        self.version = args["model_version"]

    def execute(self, requests):
        request = pb_utils.InferenceRequest(model_name="other", inputs=[])
        try:
            request.exec()
        except pb_utils.TritonModelException as error:
            y = np.array([f"{self.version}: {error}"], object)
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", y)])]
"""
    folder = write_model(tmp_path, "m", code)
    (folder / "1").rename(folder / "3")
    file = folder / "3" / "model.py"
    file.write_text(file.read_text() + AUTO)
    model = backends.load("python", file)
    try:
        [y] = model.infer({"X": ints(1)}, triglot.Call())["Y"]
        assert y == "3: cannot call other models before this model is served"
    finally:
        model.close()


AUTO = """
    @staticmethod
    def auto_complete_config(config):
        config.add_input({"name": "X", "data_type": "TYPE_INT32", "dims": [-1]})
        config.add_output({"name": "Y", "data_type": "TYPE_STRING", "dims": [-1]})
        return config
"""


# --- the configuration that is completed ---

X = {"name": "X", "data_type": "TYPE_FP32", "dims": [1]}


def config_of(**keys: Any) -> ModelConfig:
    return ModelConfig(json.dumps({"name": "m", "max_batch_size": 0, "input": [], "output": []} | keys))


def test_a_tensor_is_completed() -> None:
    config = config_of(input=[{"name": "X", "data_type": "TYPE_INVALID", "dims": []}])
    config.add_input(X)
    config.add_input(X)
    assert config.as_dict()["input"] == [X]


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        ({"name": "X", "data_type": "TYPE_FP32"}, "is missing 'dims' property"),
        ({"data_type": "TYPE_FP32", "dims": [1]}, "is missing 'name' property"),
        (X | {"dtype": 1}, "contains property other than"),
    ],
)
def test_a_tensor_that_is_none(tensor: dict[str, Any], expected: str) -> None:
    config = config_of()
    for add in (config.add_input, config.add_output):
        with pytest.raises(ValueError, match=expected):
            add(tensor)
    with pytest.raises(ValueError, match="contains property other than"):
        config.add_output(X | {"optional": True})


def test_what_is_configured_stays() -> None:
    config = config_of(
        max_batch_size=4, input=[X], sequence_batching={}, model_transaction_policy={"decoupled": False}
    )
    calls: list[tuple[Callable[[], None], str]] = [
        (lambda: config.set_max_batch_size(3), "configuration specified max_batch_size 4"),
        (lambda: config.set_max_batch_size(-1), "expected an integer of at least 0, got -1"),
        (lambda: config.add_input(X | {"dims": [2]}), r"expects dims \[1\] for input 'X'"),
        (config.set_dynamic_batching, "scheduling_choice as 'sequence_batching'"),
        (lambda: config.set_model_transaction_policy({"decoupled": True}), "already set to 'False'"),
        (lambda: config.set_model_transaction_policy({"coupled": True}), "other than 'decoupled': 'coupled'"),
    ]
    for call, expected in calls:
        with pytest.raises(ValueError, match=expected):
            call()
    config.set_max_batch_size(4)
    config.set_model_transaction_policy({})
    config.set_model_transaction_policy({"decoupled": False})
