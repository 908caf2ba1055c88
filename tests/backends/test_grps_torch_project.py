"""grps projects whose inferers and converters are torch's, called by grps and by others."""

# ruff: noqa: E402 — without the library there is nothing to import.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from tests.backends import grps_conf
from tests.backends.grps_tensor_messages import floats, message, named
from triglot.backends.grps.model import GrpsModel
from triglot.backends.grps.project import GrpsProject
from triglot.core.call import Call
from triglot.core.errors import InvalidArgument, ModelLoadError, ServingError
from triglot.core.types import Exchange
from triglot.pb.grps import grps_pb2 as pb
from triglot.telemetry.monitor import Monitor

torch = pytest.importorskip("torch", reason="the torch environment has it")

from tests.backends.grps_torch_scripts import SUM, script

REQUESTS = 4
DYNAMIC = {"type": "dynamic", "max_batch_size": REQUESTS, "batch_timeout_us": 1000}
CUSTOMIZED = """
from grps_framework.apis.grps_pb2 import GrpsMessage
from grps_framework.converter.converter import Converter, converter_register
from grps_framework.converter.torch_tensor_converter import TorchTensorConverter
from grps_framework.model_infer.inferer import inferer_register
from grps_framework.model_infer.torch_inferer import TorchModelInferer


class Summing(TorchModelInferer):
    def __init__(self):
        self.calls = 0

    def infer(self, inp, context):
        self.calls += 1
        return super().infer(inp, context) * 10


class Texts(TorchTensorConverter):
    def postprocess(self, inp, context):
        return GrpsMessage(str_data=str(inp.tolist()))


inferer_register.register("summing", Summing())
converter_register.register("texts", Texts())
"""

Open = Callable[..., GrpsModel]


@pytest.fixture
def open_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Open]:
    """Makes a project of one model, which sums `a` and `b`, and opens its DAG."""
    opened: list[GrpsModel] = []
    script(tmp_path / "sum.pt", SUM)
    monkeypatch.chdir(tmp_path)

    def open_(**entry: Any) -> GrpsModel:
        model = {
            "name": "m",
            "version": "1",
            "device": "cpu",
            "inferer_type": "torch",
            "inferer_path": "./sum.pt",
            "converter_type": "torch",
            **entry,
        }
        inference = yaml.safe_dump({"models": [model], "dag": grps_conf.DAG})
        project = GrpsProject(grps_conf.project(tmp_path, inference=inference), Monitor())
        opened.append(project.dag())
        return opened[-1]

    yield open_
    for model in opened:
        model.close()


def sent(number: float, rows: int = 1) -> pb.GrpsMessage:
    return message(floats("a", [rows, 1], *[number] * rows), floats("b", [rows, 1], *range(rows)))


def answered(model: GrpsModel, request: pb.GrpsMessage) -> pb.GrpsMessage:
    """The answer to a call that came by grps."""
    call = Call()
    call.exchange = Exchange(request.SerializeToString())
    return pb.GrpsMessage.FromString(model.infer({}, call))


@pytest.mark.parametrize("converter_type", ["torch", "none"])
def test_tensors_in_and_out(open_model: Open, converter_type: str) -> None:
    model = open_model(converter_type=converter_type)
    assert named(answered(model, sent(1, 2)))["output"].tolist() == [[1], [2]]


@pytest.mark.parametrize("converter_type", ["torch", "none"])
def test_callers_who_speak_of_tensors(open_model: Open, converter_type: str) -> None:
    model = open_model(converter_type=converter_type)
    answer = model.infer({"b": np.array([1, 2], "f2"), "a": np.array([10, 20], "f2")}, Call())
    assert {name: (array.dtype, array.tolist()) for name, array in answer.items()} == {
        "output": (np.float16, [11, 22])
    }
    with pytest.raises(InvalidArgument, match=r"^tensor 'a': expected dtype DT_UINT8, .*, got DT_STRING$"):
        model.infer({"a": np.array([b"x"], object)}, Call())


def batch_answered(model: GrpsModel, requests: Iterable[pb.GrpsMessage]) -> list[Any]:
    """The answers to calls that came by grps and are executed together, or their errors."""
    assert model.infer_batch is not None
    calls = []
    for request in requests:
        calls.append(Call())
        calls[-1].exchange = Exchange(request.SerializeToString())
    answers = model.infer_batch([{} for _ in calls], calls)
    return [pb.GrpsMessage.FromString(answer) if isinstance(answer, bytes) else answer for answer in answers]


@pytest.mark.parametrize("converter_type", ["torch", "none"])
def test_requests_of_a_batch_get_their_own_rows(open_model: Open, converter_type: str) -> None:
    model = open_model(converter_type=converter_type, batching=DYNAMIC)
    answers = batch_answered(model, [sent(10 * number, number) for number in range(1, REQUESTS + 1)])
    assert [named(answer)["output"].tolist() for answer in answers] == [
        [[10 * number + row] for row in range(number)] for number in range(1, REQUESTS + 1)
    ]


def test_requests_that_make_no_batch_all_fail(open_model: Open) -> None:
    model = open_model(batching=DYNAMIC)
    shapes = [[1, 1]] * (REQUESTS - 1) + [[1, 2]]
    errors = batch_answered(model, [message(floats("a", shape, *range(shape[1]))) for shape in shapes])
    (text,) = {error.message for error in errors if isinstance(error, ServingError)}
    assert f"of a batch of {REQUESTS} has different tensors than the first request: tensor 'a' float32 [?," in text
    assert len({id(error) for error in errors}) == REQUESTS


def test_subclasses_of_a_project(open_model: Open, tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "__init__.py").touch()
    (tmp_path / "src" / "customized_inferer.py").write_text(CUSTOMIZED)
    model = open_model(
        inferer_type="customized",
        inferer_name="summing",
        converter_type="customized",
        converter_name="texts",
    )
    assert answered(model, sent(1, 2)).str_data == "[[10.0], [20.0]]"


def test_missing_file(open_model: Open) -> None:
    with pytest.raises(
        ModelLoadError, match=r"inference\.yml: model m-1: \./missing\.pt: the model cannot be loaded"
    ):
        open_model(inferer_path="./missing.pt")
