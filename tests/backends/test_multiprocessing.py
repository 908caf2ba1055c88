"""Models that compute in processes of their own: these find the model's modules, however they are started."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.process import FREE_PORTS, Triglot
from tests.protocol_clients.rest import Rest

HELPER = "def times(value, factor):\n    return value * factor\n"
COMPUTES = """
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

import numpy as np

CONTEXT = multiprocessing.get_context("{method}")


@dataclass
class Square:
    value: int
    pid: int


class TooLarge(Exception):
    pass


def square(value):
    if value > 100:
        raise TooLarge(value)
    return Square(helper.times(value, value), os.getpid())


class Squaring(CONTEXT.Process):
    def __init__(self, values, results):
        super().__init__()
        self.values, self.results = values, results

    def run(self):
        self.results.put([square(value) for value in self.values])


def by_process(values):
    results = CONTEXT.Queue()
    process = Squaring(values, results)
    process.start()
    process.join()
    assert process.exitcode == 0
    return results.get()


def by_pool(values):
    with CONTEXT.Pool(1) as pool:
        return pool.map(square, values)


def by_executor(values):
    with ProcessPoolExecutor(1, mp_context=CONTEXT) as executor:
        try:
            executor.submit(square, 101).result()
        except TooLarge:
            return list(executor.map(square, values))


def compute(values):
    squares = by_process(values) + by_pool(values) + by_executor(values)
    assert os.getpid() not in {{each.pid for each in squares}}
    return [each.value for each in squares if isinstance(each, Square)]
"""
MODEL = """
import triglot
from . import helper


class Squares(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]
    execution = "{execution}"

    def infer(self, inputs):
        return {{"y": np.array(compute(inputs["x"].tolist()), np.int32)}}
"""
TRITON = """
import helper
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            squares = compute(pb_utils.get_input_tensor_by_name(request, "x").as_numpy().tolist())
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.array(squares, np.int32))]))
        return answers
"""
TRITON_CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_INT32 dims: -1 }
output { name: "y" data_type: TYPE_INT32 dims: -1 }
"""
IN_A_PROCESS = 'parameters { key: "execution" value { string_value: "process" } }\n'
PREDICTOR = """
import helper


class Squares:
    @classmethod
    def from_path(cls, model_dir):
        return cls()

    def predict(self, instances):
        return compute(instances)
"""


def write(folder: Path, files: dict[str, str]) -> None:
    """Write files to a model's folder, with the module that they import."""
    for name, text in {"helper.py": HELPER, **files}.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    if (folder / "1").is_dir():
        (folder / "helper.py").rename(folder / "1" / "helper.py")


@pytest.fixture(scope="module", params=["spawn", "forkserver"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rest]:
    """A server of such models."""
    folder, computes = tmp_path_factory.mktemp("models-1.0"), COMPUTES.format(method=request.param)
    for name in ("thread", "process"):
        write(folder / name, {"model.py": computes + MODEL.format(execution=name)})
    for name, config in (("triton", TRITON_CONFIG), ("triton_process", TRITON_CONFIG + IN_A_PROCESS)):
        write(folder / name, {"config.pbtxt": config, "1/model.py": computes + TRITON})
    toml = 'prediction_class = "squares.Squares"\n'
    write(folder / "predictor", {"predictor.toml": toml, "squares.py": computes + PREDICTOR})
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0") as process:
        yield Rest(process.ports()[1])
        process.stop()


@pytest.mark.parametrize("model", ["thread", "process", "triton", "triton_process"])
def test_processes_of_a_model_find_its_modules(server: Rest, model: str) -> None:
    tensor = {"name": "x", "datatype": "INT32", "shape": [3], "data": [1, 2, 3]}
    status, answer = server.post(f"/v2/models/{model}/infer", {"inputs": [tensor]})
    assert (status, answer["outputs"][0]["data"]) == (200, 3 * [1, 4, 9])


def test_processes_of_a_predictor_find_its_modules(server: Rest) -> None:
    answer = server.post("/v1/models/predictor:predict", {"instances": [1, 2, 3]})
    assert answer == (200, {"predictions": 3 * [1, 4, 9]})
