"""Models whose inputs and outputs are declared by the annotations of `infer`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from triglot.backends import python
from triglot.core.errors import ModelLoadError
from triglot.model.config import NO_CONFIG

HEAD = """
from __future__ import annotations
from collections.abc import AsyncIterator, Iterator
from typing import Annotated, NamedTuple, TypedDict
import numpy as np
from numpy.typing import NDArray
from triglot import Bytes, Call, Float32, Float64, Int64, Model

class Both(TypedDict):
    total: Float32[-1]
    names: Bytes[-1]

class Pair(NamedTuple):
    total: Float32[-1]
    names: Bytes[-1]

"""
X = {"name": "x", "datatype": "FP32", "shape": [2, 2], "data": [1, 2, 3, 4]}
TOTAL = {"name": "total", "datatype": "FP32", "shape": [2], "data": [3.0, 7.0]}
NAMES = {"name": "names", "datatype": "BYTES", "shape": [2], "data": ["a", "b"]}
BOTH = 'x.sum(axis=1), np.array([b"a", b"b"], dtype=object)'


def output(data: list[float], datatype: str = "FP32", shape: list[int] | None = None) -> dict[str, Any]:
    return {"name": "output", "datatype": datatype, "shape": shape or [len(data)], "data": data}


def write(folder: Path, infer: str, attributes: str = "") -> Path:
    """Write a model of one method; returns its file."""
    file = folder / "mine.py"
    body = "\n".join(f"    {line}" for line in (*attributes.splitlines(), *infer.splitlines()))
    file.write_text(f"{HEAD}class Mine(Model):\n{body}\n")
    return file


def post(url: str, path: str, request: dict[str, Any]) -> bytes:
    with urllib.request.urlopen(f"{url}/v2/models/mine{path}", json.dumps(request).encode()) as answer:
        body: bytes = answer.read()
    return body


SCALAR = {"name": "output", "datatype": "FP64", "shape": [], "data": [10.0]}


@pytest.mark.parametrize(
    ("parameters", "result", "outputs"),
    [
        ("x: Float32[-1, 2]", "Float32[-1]: return x.sum(axis=1)", [output([3, 7])]),
        ("x: Float32[-1, 2], call: Call", "Float32[-1]: return x[:, 0]", [output([1, 3])]),
        ("x: Float32[...]", "Float32[...]: return x[0]", [output([1, 2])]),
        ("x: NDArray[np.float32]", "Float64[()]: return x.sum(dtype=float)", [SCALAR]),
        (
            "x: Annotated[NDArray[np.float32], (-1, 2)]",
            "Int64[2]: return np.array([5, 6])",
            [output([5, 6], "INT64")],
        ),
        ("x: Float32[-1, 2]", f"Both: return dict(zip(('total', 'names'), ({BOTH})))", [TOTAL, NAMES]),
        ("x: Float32[-1, 2]", f"Pair: return Pair({BOTH})", [TOTAL, NAMES]),
        ("x: Float32[-1, 2], by: Float32[1] = np.float32(2)", "Float32[-1]: return x[0] * by", [output([2, 4])]),
    ],
)
@pytest.mark.parametrize("execution", ["thread", "process"])
@pytest.mark.parametrize("function", ["def", "async def"])
def test_arguments_and_results_are_tensors(
    tmp_path: Path, function: str, execution: str, parameters: str, result: str, outputs: list[dict[str, Any]]
) -> None:
    infer = f"{function} infer(self, {parameters}) -> {result}"
    with triglot.running(write(tmp_path, infer, f"execution = {execution!r}")) as server:
        answer = json.loads(post(server.url, "/infer", {"inputs": [X]}))
    assert answer["outputs"] == outputs


@pytest.mark.parametrize("function", ["def", "async def"])
@pytest.mark.parametrize("execution", ["thread", "process"])
def test_a_stream_of_results(tmp_path: Path, execution: str, function: str) -> None:
    iterator = "Iterator" if function == "def" else "AsyncIterator"
    infer = (
        f"{function} infer(self, count: Int64[1]) -> {iterator}[Int64[1]]:\n"
        "    for number in range(count[0]): yield np.array([number])"
    )
    with triglot.running(write(tmp_path, infer, f"execution = {execution!r}")) as server:
        events = post(server.url, "/generate_stream", {"count": 3}).decode().split("\n\n")
    assert [json.loads(event.removeprefix("data: "))["output"] for event in events if event] == [0, 1, 2]


def test_requests_are_batched(tmp_path: Path) -> None:
    infer = "def infer(self, x: Float32[-1, 2]) -> Float32[-1]: return x.sum(axis=1)"
    attributes = "max_batch_size = 8\nfrom triglot import DynamicBatching\ndynamic_batching = DynamicBatching()"
    with triglot.running(write(tmp_path, infer, attributes)) as server:
        assert json.loads(post(server.url, "/infer", {"inputs": [X]}))["outputs"] == [output([3, 7])]


def test_a_request_is_checked_against_the_types(tmp_path: Path) -> None:
    infer = "def infer(self, x: Float32[-1, 3]) -> Float32[-1]: return x.sum(axis=1)"
    with (
        triglot.running(write(tmp_path, infer)) as server,
        pytest.raises(urllib.error.HTTPError) as raised,
    ):
        post(server.url, "/infer", {"inputs": [X]})
    with raised.value as error:
        assert "Expected [-1,3], got [2,2]" in error.read().decode()


@pytest.mark.parametrize(
    ("infer", "error"),
    [
        ("def infer(self, x: Float32[2], y) -> Float32[2]: ...", "infer: y: expected a tensor type, such as"),
        ("def infer(self, x: Float32[2]): ...", "infer: expected to return a tensor type, such as"),
        (
            "def infer(self, x: Float32[2]) -> dict: ...",
            "of tensor types, got <class 'dict'>",
        ),
        ("def infer(self, x: Float32[-2]) -> Float32[2]: ...", "x: a dim of shape [-2] is below -1"),
        ("def infer(self, x: NDArray[np.datetime64]) -> Float32[2]: ...", "infer: x: numpy dtype datetime64"),
    ],
)
def test_types_that_declare_no_tensors(tmp_path: Path, infer: str, error: str) -> None:
    file = write(tmp_path, infer)
    with pytest.raises(ModelLoadError) as raised:
        python.load(file, NO_CONFIG)
    assert str(raised.value).startswith(f"{file}: ")
    assert error in str(raised.value)


@pytest.mark.parametrize(
    "infer",
    [
        "def infer(self, inputs: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]: return inputs",
        "def infer(self, inputs: NoSuchName) -> NoSuchName: return inputs",
    ],
)
def test_other_annotations_declare_nothing(tmp_path: Path, infer: str) -> None:
    attributes = "from triglot import TensorSpec\ninputs = outputs = [TensorSpec('x', 'FP32', [-1])]"
    for written in (attributes, ""):
        model = python.load(write(tmp_path, infer, written), NO_CONFIG)
        assert not model.takes_arguments
        assert len(model.inputs) == bool(written)


def test_a_frozen_dataclass(tmp_path: Path) -> None:
    file = write(tmp_path, "def infer(self, x: Float32[-1]) -> Float32[-1]: return x * self.by", "by: int = 2")
    frozen = "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass Mine"
    file.write_text(file.read_text().replace("class Mine", frozen))
    assert [spec.name for spec in python.load(file, NO_CONFIG).inputs] == ["x"]


def test_a_model_is_called_as_it_is_written(tmp_path: Path) -> None:
    infer = "def infer(self, x: Float32[-1, 2]) -> Float32[-1]: return x.sum(axis=1)"
    model = python.load(write(tmp_path, infer), NO_CONFIG)
    assert model.infer(np.array([[1, 2]], np.float32)).tolist() == [3]
