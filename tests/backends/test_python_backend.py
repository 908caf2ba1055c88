"""Models written in Python: how their file is found and imported, which class is served, what is called."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

import triglot
from process import IDENTITY, SECONDS, SERVICE, answer_value, infer_request, write_model
from triglot import backends
from triglot.core.errors import ModelLoadError
from triglot.core.model_config import ModelConfig
from triglot.pb.kserve import inference_pb2 as pb

HEAD = """
import triglot

X = triglot.TensorSpec("x", "INT32", [1])
Y = triglot.TensorSpec("y", "INT32", [1])

"""


def load(folder: Path, text: str, file: str = "model.py") -> triglot.Model:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    return backends.load("python", folder / file)


def load_error(folder: Path, text: str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, text)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'model.py'}:")
    return message


def run(model: triglot.Model) -> Any:
    return model.infer({"x": np.array([7], np.int32)})


def model_of(value: str, head: str = HEAD) -> str:
    """A model that answers with the value of an expression, whatever it is asked."""
    return f"{head}class Mine(triglot.Model):\n    def infer(self, inputs):\n        return {value}\n"


# --- imports ---


def test_neighbours_do_not_shadow_packages(tmp_path: Path) -> None:
    for name in ("json", "numpy", "triglot", "model"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported by the name of a package')")
    path, modules = list(sys.path), set(sys.modules)
    model = load(tmp_path, model_of("[json.dumps(1), numpy.ones(1).tolist()]", "import json, numpy, triglot\n"))
    assert run(model) == ["1", [1.0]]
    assert sys.path == path
    added = [name for name in set(sys.modules) - modules if str(tmp_path) in str(sys.modules[name])]
    assert added == [type(model).__module__]
    assert "model" not in sys.modules


def test_neighbours_are_imported_relatively(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 3")
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("from .inner.deep import DEEP")
    (tmp_path / "package" / "inner" / "deep.py").write_text("from ...helper import VALUE\nDEEP = VALUE + 1")
    imports = "from . import helper\nfrom .helper import VALUE\nfrom .package import DEEP\n"
    assert run(load(tmp_path, imports + model_of("[helper.VALUE, VALUE, DEEP]"))) == [3, 3, 4]
    late = (
        model_of("self.late()")
        + "    def late(self):\n        from . import helper\n        return helper.VALUE\n"
    )
    assert run(load(tmp_path, late)) == 3
    assert "No module named 'helper'" in load_error(tmp_path, "import helper\n" + model_of("1"))


def test_models_with_files_of_the_same_names(tmp_path: Path) -> None:
    models = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "helper.py").write_text(f"VALUE = {number}")
        models.append(load(folder, "from .helper import VALUE\n" + model_of("VALUE")))
    assert [run(model) for model in models] == [1, 2]
    assert type(models[0]).__module__ != type(models[1]).__module__
    # The same file twice: two models that share nothing.
    again = load(tmp_path / "1", "from .helper import VALUE\n" + model_of("VALUE"))
    assert type(again) is not type(models[0])


@pytest.mark.parametrize("file", ["my-model.py", "my.model.py", "json.py", "1.py"])
def test_a_file_may_have_any_name(tmp_path: Path, file: str) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 3")
    assert run(load(tmp_path, "from .helper import VALUE\n" + model_of("VALUE"), file)) == 3


DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass
import triglot

@dataclass
class Mine(triglot.Model):
    value: int = 3

    def infer(self, inputs):
        return self.value
"""


def test_a_model_may_be_a_dataclass(tmp_path: Path) -> None:
    assert run(load(tmp_path, DATACLASS)) == 3


@pytest.mark.parametrize("cached", ["model.py", "helper.py", "package/inner.py"])
def test_a_file_that_was_changed_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: str
) -> None:
    """Python would take the code that it has compiled before: the file has the same size and time."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "package").mkdir()
    files = {
        "model.py": "from . import helper\nfrom .package import inner\nA = 1\n"
        + model_of("[A, helper.A, inner.A]"),
        "helper.py": "A = 1",
        "package/inner.py": "A = 1",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run(backends.load("python", tmp_path / "model.py")) == [1, 1, 1]
    file = tmp_path / cached
    time = file.stat().st_mtime_ns
    file.write_text(file.read_text().replace("A = 1", "A = 2"))
    os.utime(file, ns=(time, time))
    assert run(backends.load("python", tmp_path / "model.py")) == [1 + (name == cached) for name in files]


def test_nothing_is_written_beside_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "helper.py").write_text("VALUE = 3")
    load(tmp_path, "from .helper import VALUE\n" + model_of("VALUE"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["helper.py", "model.py"]


# --- the class ---

CLASS = "class {}({}):\n    def infer(self, inputs):\n        return type(self).__name__\n"


@pytest.mark.parametrize(
    "classes",
    [
        [("Mine", "triglot.Model")],
        [("Other", "triglot.Model"), ("Model", "triglot.Model")],
        [("Base", "triglot.Model"), ("Model", "Base")],
        [("Helper", "object"), ("Mine", "triglot.Model")],
    ],
)
def test_the_class_that_is_served(tmp_path: Path, classes: list[tuple[str, str]]) -> None:
    text = HEAD + "".join(CLASS.format(name, base) for name, base in classes)
    assert run(load(tmp_path, text)) == classes[-1][0]


def test_imported_and_abstract_classes_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(HEAD + CLASS.format("Imported", "triglot.Model"))
    text = (
        HEAD
        + "from triglot import Model\nfrom .base import Imported\n"
        + "class Abstract(triglot.Model):\n    inputs = [X]\n"
        + CLASS.format("Mine", "Abstract")
    )
    assert run(load(tmp_path, text)) == "Mine"


def test_a_second_name_is_not_a_second_class(tmp_path: Path) -> None:
    assert run(load(tmp_path, HEAD + CLASS.format("Mine", "triglot.Model") + "Model = Mine\n")) == "Mine"


def test_several_classes(tmp_path: Path) -> None:
    text = HEAD + CLASS.format("One", "triglot.Model") + CLASS.format("Two", "triglot.Model")
    assert "more than one model class (One, Two); call the one to serve Model" in load_error(tmp_path, text)


@pytest.mark.parametrize(
    "text", ["", HEAD, "class Model:\n    def infer(self, inputs): ...\n", HEAD + "M = triglot.Model"]
)
def test_no_class(tmp_path: Path, text: str) -> None:
    assert load_error(tmp_path, text).endswith("no class here derives from triglot.Model and has an infer()")


NOT_PORTED = (
    "Triton's Python models (TritonPythonModel) are not supported yet; expected a class that derives from "
    "triglot.Model"
)
TRITON_MODEL = "class TritonPythonModel:\n    def execute(self, requests): ...\n"


@pytest.mark.parametrize("head", ["", "import triton_python_backend_utils as pb_utils\n", HEAD])
def test_a_model_of_tritons(tmp_path: Path, head: str) -> None:
    assert load_error(tmp_path, head + TRITON_MODEL) == f"{tmp_path / 'model.py'}: {NOT_PORTED}"


def test_a_class_of_ours_beside_one_of_tritons(tmp_path: Path) -> None:
    assert run(backends.load("python", write_model(tmp_path, model_of("1") + TRITON_MODEL))) == 1


# --- what keeps a model from loading ---


@pytest.mark.parametrize("function", ["load(self, folder): ...", "close(self): ...", "close(self): yield"])
async def test_only_infer_may_be_async(tmp_path: Path, function: str) -> None:
    name = function.partition("(")[0]
    assert load_error(tmp_path, model_of("1") + f"    async def {function}\n") == (
        f"{tmp_path / 'model.py'}: Mine.{name}: expected a plain function, it is called on a thread; got async "
        "def, which infer alone may be"
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
        (model_of("1") + "    def __init__(self, size): ...\n", "TypeError: "),
        (
            model_of("1") + "    def load(self, folder):\n        (folder / 'no').read_bytes()\n",
            "FileNotFoundError: ",
        ),
        (
            model_of("1") + "    inputs = [triglot.TensorSpec('x', 'FLOAT', [1])]\n",
            "datatype 'FLOAT' is none of BOOL,",
        ),
        (
            model_of("1") + "    inputs = [triglot.TensorSpec('x', 'FP32', [-2])]\n",
            "a dim of shape [-2] is below -1",
        ),
    ],
)
def test_load_errors_name_file_and_reason(tmp_path: Path, text: str, reason: str) -> None:
    assert reason in load_error(tmp_path, text)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "import triglot\n\n  \nclass Mine(triglot.Model):\n    def infer(self inputs):\n        return 1\n",
            ":5: SyntaxError: invalid syntax: 'def infer(self inputs):'",
        ),
        ("x = 1\n  y = 2\n", ":2: IndentationError: unexpected indent: 'y = 2'"),
        ("# coding: nope\n", ": SyntaxError: unknown encoding: nope"),
        ("\nexec('1 +')\n", ":2: SyntaxError: invalid syntax (<string>, line 1)"),
    ],
)
def test_a_mistake_in_the_syntax(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, reason: str) -> None:
    assert load_error(tmp_path, text) == f"{tmp_path / 'model.py'}{reason}"
    (tmp_path / "helper.py").write_text(text)
    (tmp_path / "model.py").write_text("\nfrom .helper import VALUE\n")
    for folder in (tmp_path, Path()):
        monkeypatch.chdir(tmp_path)
        with pytest.raises(ModelLoadError) as caught:
            backends.load("python", folder / "model.py")
        assert str(caught.value) == f"{tmp_path / 'helper.py'}{reason}"


# --- its configuration ---

CONFIG = ModelConfig(parameters={"unit": "km"})
SETS_UNIT = "    def load(self, folder):\n        self.unit = self.model_config.parameters.get('unit')\n"


def test_parameters_are_there_when_it_loads(tmp_path: Path) -> None:
    file = write_model(tmp_path, model_of("self.unit") + SETS_UNIT)
    assert run(backends.load("python", file, CONFIG)) == "km"
    assert run(backends.load("python", file)) is None


def test_a_model_may_have_a_config_of_its_own(tmp_path: Path) -> None:
    own = "    def load(self, folder):\n        self.config = {'own': 1}\n"
    model = backends.load("python", write_model(tmp_path, model_of("self.config") + own), CONFIG)
    assert run(model) == {"own": 1}
    assert model.model_config is CONFIG


def test_a_frozen_dataclass_has_its_configuration(tmp_path: Path) -> None:
    text = DATACLASS.replace("@dataclass", "@dataclass(frozen=True)").replace(
        "self.value", "self.model_config.parameters"
    )
    assert run(backends.load("python", write_model(tmp_path, text), CONFIG)) == {"unit": "km"}


@asynccontextmanager
async def serve(folder: Path) -> AsyncIterator[grpc.aio.UnaryUnaryMultiCallable]:
    """ModelInfer of a server of these models."""
    config = triglot.Config(grpc_port=0, rest_port=0, grace=1)
    async with (
        triglot.Server([folder], config) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel,
    ):
        yield channel.unary_unary(SERVICE + "ModelInfer")


@pytest.mark.parametrize(
    ("attributes", "reason"),
    [
        ("inputs = [X, X]", "two inputs have the same name: ['x', 'x']"),
        ("outputs = [Y, Y]", "two outputs have the same name: ['y', 'y']"),
        (
            "inputs = [X]\n    max_batch_size = 4",
            "input 'x': max_batch_size is 4, so the shape must begin with -1",
        ),
        (
            "outputs = [Y]\n    max_batch_size = 4",
            "output 'y': max_batch_size is 4, so the shape must begin with -1",
        ),
        (
            "inputs = [triglot.TensorSpec('x', 'INT32', [])]\n    max_batch_size = 1",
            "must begin with -1 (the batch), got []",
        ),
        ("inputs = None", "NoneType"),
        ("inputs = ['x']", "inputs"),
        ("max_batch_size = '4'", "expected an integer"),
        ("infer = 4", "4"),
    ],
)
async def test_wrong_declarations_are_load_errors(tmp_path: Path, attributes: str, reason: str) -> None:
    file = write_model(tmp_path / "model", model_of("1") + f"    {attributes}\n")
    with pytest.raises(ModelLoadError) as caught:
        async with serve(tmp_path):
            pass
    assert f"{file}: " in str(caught.value.__cause__)
    assert reason in str(caught.value.__cause__)


# --- what is called ---


LOGGING = """
import triglot

class Logging(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]

    def load(self, folder):
        self.log = folder / "log"
        self.note("load")

    def infer(self, inputs):
        self.note("infer")
        return {}

    def close(self):
        self.note("close")

    def note(self, text):
        with self.log.open("a") as log:
            print(text, file=log)
"""


async def test_load_and_close_are_called_once(tmp_path: Path) -> None:
    folder = tmp_path / "model" / "3"
    write_model(folder, LOGGING)
    async with serve(tmp_path) as infer:
        await infer(infer_request("model").SerializeToString(), timeout=SECONDS)
        await infer(infer_request("model").SerializeToString(), timeout=SECONDS)
    assert (folder / "log").read_text().split() == ["load", "infer", "infer", "close"]


@pytest.mark.parametrize(
    ("signature", "value"),
    [
        ("def infer(self, inputs):", 'inputs["x"]'),
        ("def infer(self, inputs, call):", 'inputs["x"] + int(call.request_id)'),
        ("def infer(self, inputs, call=None):", 'inputs["x"] + int(call.request_id)'),
        ("def infer(self, *both):", 'both[0]["x"] + int(both[1].request_id)'),
        ("def infer(self, inputs, *, extra=0):", 'inputs["x"] + extra'),
        ("async def infer(self, inputs):", 'inputs["x"]'),
        ("async def infer(self, inputs, call):", 'inputs["x"] + int(call.request_id)'),
    ],
)
async def test_infer_with_and_without_the_call(tmp_path: Path, signature: str, value: str) -> None:
    text = IDENTITY.replace("def infer(self, inputs):", signature).replace('inputs["x"]}', f"{value}}}")
    write_model(tmp_path / "model", text)
    async with serve(tmp_path) as infer:
        request = infer_request("model", 7)
        request.id = "100"
        reply = pb.ModelInferResponse.FromString(await infer(request.SerializeToString(), timeout=SECONDS))
    assert answer_value(reply) == (107 if "request_id" in value else 7)


async def test_inputs_are_read_only(tmp_path: Path) -> None:
    write_model(tmp_path / "model", IDENTITY.replace('inputs["x"]}', 'inputs["x"] + inputs["x"].flags.writeable}'))
    async with serve(tmp_path) as infer:
        reply = await infer(infer_request("model", 7).SerializeToString(), timeout=SECONDS)
    assert answer_value(pb.ModelInferResponse.FromString(reply)) == 7
