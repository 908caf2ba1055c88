"""Models written in Python: what keeps one from loading, its configuration, and what of it is called."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest

from tests.backends.python_files import DATACLASS, load_error, model_of, run
from tests.process import IDENTITY, SECONDS, write_model
from tests.protocol_clients.channel import SERVICE
from tests.protocol_clients.kserve import answer_value, infer_request
from triglot import backends, testing
from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig
from triglot.pb.kserve import inference_pb2 as pb

# --- what keeps a model from loading ---


@pytest.mark.parametrize("function", ["load(self, folder): ...", "close(self): ...", "close(self): yield"])
async def test_only_infer_may_be_async(tmp_path: Path, function: str) -> None:
    name = function.partition("(")[0]
    assert load_error(tmp_path, model_of("1") + f"    async def {function}\n") == (
        f"{tmp_path / 'model.py'}: Mine.{name}: expected a plain function, which runs on a thread, "
        "got async def; only infer may be async"
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


def test_parameters_are_set_before_load(tmp_path: Path) -> None:
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
    async with testing.serve(folder) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
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
