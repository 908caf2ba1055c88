"""Custom prediction routines: what is called with what, and what becomes of the result."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import numpy as np
import pytest

import triglot
from tests.process import SECONDS
from tests.protocol_clients.channel import SERVICE
from triglot import backends, testing
from triglot.core.errors import Internal, InvalidArgument, ModelLoadError
from triglot.core.tensor import object_array, pack_bytes, unpack_bytes
from triglot.model.model import signatures_of
from triglot.pb.kserve import inference_pb2 as pb

TOML = 'prediction_class = "predictor.Predictor"\n'
CLASS = """
import numpy as np

class Predictor:
    def __init__(self, folder):
        self.folder = folder

    @classmethod
    def from_path(cls, model_dir):
        return cls(model_dir)

    def predict(self, instances, **kwargs):
"""
ECHO = CLASS + "        return [instances, kwargs]\n"


def write(folder: Path, predictor: str, toml: str = TOML) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "predictor.py").write_text(predictor)
    (folder / "predictor.toml").write_text(toml)
    return folder / "predictor.toml"


def load(folder: Path, predictor: str, toml: str = TOML) -> triglot.Model:
    return backends.load("predictor", write(folder, predictor, toml))


def load_error(folder: Path, predictor: str, toml: str = TOML) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, predictor, toml)
    return str(caught.value)


def texts(*elements: str) -> Any:
    return object_array([element.encode() for element in elements], [len(elements)])


def predict(model: triglot.Model, *instances: str, parameters: str = "{}") -> str:
    answer = model.infer({"instances": texts(*instances), "parameters": texts(parameters)})["predictions"]
    assert answer.shape == (1,)
    return bytes(answer[0]).decode()


def returning(folder: Path, value: str) -> str:
    """The JSON of what `predict` returns."""
    return predict(load(folder, f"{CLASS}        return {value}\n"))


# --- what is passed on ---


def test_the_declared_tensors(tmp_path: Path) -> None:
    model = load(tmp_path, ECHO)
    (signature,) = signatures_of(model).values()
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.inputs] == [
        ("instances", "BYTES", (-1,)),
        ("parameters", "BYTES", (1,)),
    ]
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.outputs] == [
        ("predictions", "BYTES", (1,))
    ]
    assert signature.defaults["parameters"].tolist() == [b"{}"]
    assert (model.platform, model.speaks_json) == ("predictor", True)


@pytest.mark.parametrize(
    "instances",
    [
        [],
        ["1"],
        ["[1.5, 2]", '{"a": {"b": null}}', '"größe"', "true"],
        ['{"b64": "AAE="}'],
        ["18446744073709551615"],
    ],
)
def test_instances_are_decoded(tmp_path: Path, instances: list[str]) -> None:
    passed, _ = json.loads(predict(load(tmp_path, ECHO), *instances))
    assert passed == [json.loads(instance) for instance in instances]


def test_tokens_that_only_python_knows(tmp_path: Path) -> None:
    assert predict(load(tmp_path, ECHO), "[NaN, Infinity, -Infinity]") == "[[[NaN,Infinity,-Infinity]],{}]"


def test_parameters_are_keyword_arguments(tmp_path: Path) -> None:
    _, passed = json.loads(predict(load(tmp_path, ECHO), parameters='{"k": 3, "names": ["a"]}'))
    assert passed == {"k": 3, "names": ["a"]}


def test_the_folder_is_passed_as_text(tmp_path: Path) -> None:
    assert json.loads(returning(tmp_path, "[self.folder, type(self.folder).__name__]")) == [str(tmp_path), "str"]


@pytest.mark.parametrize(
    ("instances", "parameters", "text"),
    [
        (["1", "{"], "{}", "instances[1]: expected JSON: "),
        (["1, 2"], "{}", "instances[0]: expected JSON: "),
        ([""], "{}", "instances[0]: expected JSON: "),
        (["[" * 100_000], "{}", "instances[0]: expected JSON: "),
        (["1"], "{", "parameters: expected JSON: "),
        (["1"], "[1]", "parameters: expected a JSON object of keyword arguments"),
        (["1"], '{"instances": 1}', "parameters: predict() multiple values for argument 'instances'"),
        (["1"], '{"self": 1}', "parameters: predict() multiple values for argument 'self'"),
    ],
)
def test_what_is_no_json(tmp_path: Path, instances: list[str], parameters: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        predict(load(tmp_path, ECHO), *instances, parameters=parameters)
    assert caught.value.message.startswith(text)


def test_bytes_that_are_no_text(tmp_path: Path) -> None:
    inputs = {"instances": object_array([b'"\xff"'], [1]), "parameters": texts("{}")}
    with pytest.raises(InvalidArgument, match=r"instances\[0\]: expected JSON: 'utf-8' codec"):
        load(tmp_path, ECHO).infer(inputs)


def test_arguments_that_predict_does_not_have(tmp_path: Path) -> None:
    model = load(tmp_path, ECHO.replace("**kwargs", "k=1").replace("kwargs", "k"))
    assert json.loads(predict(model, parameters='{"k": 2}')) == [[], 2]
    with pytest.raises(InvalidArgument, match=r"parameters: predict\(\) got an unexpected keyword argument 'n'"):
        predict(model, parameters='{"n": 2}')


def test_a_type_error_inside_of_predict_is_not_the_callers(tmp_path: Path) -> None:
    with pytest.raises(Internal, match="unsupported operand"):
        returning(tmp_path, "1 + None")


# --- what comes back ---


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("[1, 2.5, 'a', None, True]", [1, 2.5, "a", None, True]),
        ("{'a': (1, 2)}", {"a": [1, 2]}),
        ("'not a list'", "not a list"),
        ("None", None),
        ("np.arange(6).reshape(2, 3)", [[0, 1, 2], [3, 4, 5]]),
        ("np.array(['a', 'b'])", ["a", "b"]),
        ("np.array([True, None], object)", [True, None]),
        ("[np.float32(0.1), np.float64(0.1), np.int8(3), np.bool_(True)]", [float(np.float32(0.1)), 0.1, 3, True]),
        ("np.array([0.1], 'f4')", [float(np.float32(0.1))]),
        ("{1: 'a', None: 'b'}", {"1": "a", "null": "b"}),
        ("[2 ** 70]", [2**70]),
        ("'null'", "null"),
        ("'\\ud800'", "\ud800"),
    ],
)
def test_results(tmp_path: Path, value: str, expected: object) -> None:
    assert json.loads(returning(tmp_path, value)) == expected


@pytest.mark.parametrize("value", ["[float('nan'), -np.inf]", "np.array([np.nan, -np.inf], 'f4')"])
def test_nan_is_a_bare_token(tmp_path: Path, value: str) -> None:
    assert returning(tmp_path, value) == "[NaN,-Infinity]"


def test_array_reads_the_same_with_a_nan(tmp_path: Path) -> None:
    plain, nan = (
        json.loads(returning(tmp_path, "np.array([0.1, 1e20, 3], 'f4')")),
        returning(tmp_path, "np.array([0.1, 1e20, 3, np.nan], 'f4')"),
    )
    *numbers, last = json.loads(nan)
    assert numbers == plain
    assert math.isnan(last)


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        ("{1, 2}", "set"),
        ("[b'a']", "bytes"),
        ("[self]", "Predictor"),
        ("np.array([1j])", "complex"),
        ("__import__('datetime').date(2020, 1, 1)", "date"),
        ("(number for number in [1])", "generator"),
    ],
)
def test_results_that_are_no_json(tmp_path: Path, value: str, kind: str) -> None:
    with pytest.raises(Internal) as caught:
        returning(tmp_path, value)
    assert caught.value.message == (
        "There was a problem processing the outputs: predict() returned a value with no JSON form: "
        f"Object of type {kind} is not JSON serializable"
    )


def test_a_result_that_contains_itself(tmp_path: Path) -> None:
    text = f"{CLASS}        instances.append(instances)\n        return instances\n"
    with pytest.raises(Internal, match="There was a problem processing the outputs"):
        predict(load(tmp_path, text))


# --- what keeps it from loading ---


@pytest.mark.parametrize(
    ("toml", "text"),
    [
        ("", "prediction_class: expected a name like 'module.Class', got None"),
        ("prediction_class = 3", "prediction_class: expected a name like 'module.Class', got 3"),
        (
            'prediction_class = "Predictor"',
            "prediction_class: expected a name like 'module.Class', got 'Predictor'",
        ),
        (
            TOML + 'package = ["a.tar.gz"]',
            "unknown key 'package', expected prediction_class, handler_class, packages, path",
        ),
        (TOML + 'packages = "a.tar.gz"', "packages: expected a list of names, got 'a.tar.gz'"),
        (TOML + "path = [1]", "path: expected a list of names, got [1]"),
        (TOML + 'path = ["src"]', "path: {folder}/src is not a folder"),
        (TOML + 'path = [".."]', "'..' is not inside the model's folder"),
        (TOML + 'packages = ["/a.tar.gz"]', "'/a.tar.gz' is not inside the model's folder"),
        (TOML + 'packages = ["a.tar.gz"]', "packages: cannot unpack a.tar.gz: "),
        (TOML + 'packages = ["predictor.py"]', "packages: cannot unpack predictor.py: "),
        ("prediction_class", "TOMLDecodeError: "),
        (
            'prediction_class = "predict.Predictor"',
            "prediction_class: no module 'predict'; the model has predictor",
        ),
        (
            'prediction_class = "predictor.inner.Predictor"',
            "prediction_class: no module 'predictor.inner'; the model has predictor",
        ),
        ('prediction_class = "predictor.Other"', "prediction_class: {folder}/predictor.py has no 'Other'"),
        ('prediction_class = "predictor.np"', "predictor.np has no class method from_path(model_dir)"),
    ],
)
def test_what_the_file_cannot_say(tmp_path: Path, toml: str, text: str) -> None:
    error = load_error(tmp_path, ECHO, toml)
    assert error.startswith(f"{tmp_path / 'predictor.toml'}: {text.format(folder=tmp_path)}")


NO_FROM_PATH = "class Predictor:\n    def predict(self, instances): ...\n"
NO_PREDICT = "class Predictor:\n    @classmethod\n    def from_path(cls, model_dir):\n        return {}\n"


@pytest.mark.parametrize(
    ("predictor", "text"),
    [
        (NO_FROM_PATH, "predictor.toml: predictor.Predictor has no class method from_path(model_dir)"),
        (
            NO_PREDICT.format("cls()"),
            "predictor.toml: from_path() of predictor.Predictor returned Predictor, which has no "
            "predict(instances, **kwargs)",
        ),
        (NO_PREDICT.format("None"), "predictor.toml: from_path() of predictor.Predictor returned NoneType, which"),
        (ECHO.replace("    @classmethod\n", ""), "missing 1 required positional argument: 'model_dir'"),
        (ECHO.replace("return cls", "return open"), "predictor.py:10: IsADirectoryError: "),
        (
            "import no_such_module\n" + ECHO,
            "predictor.py:1: ModuleNotFoundError: No module named 'no_such_module'",
        ),
        ("def f(:", "SyntaxError: "),
    ],
)
def test_what_the_class_cannot_be(tmp_path: Path, predictor: str, text: str) -> None:
    assert text in load_error(tmp_path, predictor)


# --- served ---


@asynccontextmanager
async def serve(folder: Path) -> AsyncIterator[grpc.aio.Channel]:
    async with testing.serve(folder) as server, grpc.aio.insecure_channel(server.grpc_address) as channel:
        yield channel


def request(**inputs: list[bytes]) -> bytes:
    return pb.ModelInferRequest(
        model_name="model",
        inputs=[
            pb.ModelInferRequest.InferInputTensor(name=name, datatype="BYTES", shape=[len(elements)])
            for name, elements in inputs.items()
        ],
        raw_input_contents=[pack_bytes(elements) for elements in inputs.values()],
    ).SerializeToString()


async def test_v2_clients_call_it(tmp_path: Path) -> None:
    write(tmp_path / "model", ECHO)
    async with serve(tmp_path) as channel:
        infer = channel.unary_unary(SERVICE + "ModelInfer")
        for inputs, expected in (
            ({"instances": [b"1", b"[2]"]}, b"[[1,[2]],{}]"),
            ({"parameters": [b'{"k": 3}'], "instances": [b"1"]}, b'[[1],{"k":3}]'),
        ):
            reply = pb.ModelInferResponse.FromString(await infer(request(**inputs), timeout=SECONDS))
            assert unpack_bytes(reply.raw_output_contents[0], 1) == [expected]
            assert [(output.name, list(output.shape)) for output in reply.outputs] == [("predictions", [1])]


@pytest.mark.parametrize(
    ("raised", "text"),
    [("ValueError('Divide by zero')", "Divide by zero"), ("ValueError", "ValueError"), ("KeyError('k')", "'k'")],
)
async def test_an_exceptions_text_reaches_the_client_and_its_trace_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, raised: str, text: str
) -> None:
    write(tmp_path / "model", f"{CLASS}        raise {raised}\n")
    async with serve(tmp_path) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(SERVICE + "ModelInfer")(request(instances=[b"1"]), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert caught.value.details() == text
    assert "predict() of Predictor failed" in caplog.text
    assert f"raise {raised}" in caplog.text


async def test_an_error_of_its_own_reaches_the_client(tmp_path: Path) -> None:
    raising = "        import triglot\n        raise triglot.InvalidArgument('at most 3 instances')\n"
    write(tmp_path / "model", CLASS + raising)
    async with serve(tmp_path) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await channel.unary_unary(SERVICE + "ModelInfer")(request(instances=[b"1"]), timeout=SECONDS)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert caught.value.details() == "at most 3 instances"
