"""Versions of real backends that are warmed before they take calls."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.direct_work import direct_infer
from tests.repository.scripted_loads import look_twice, states
from tests.waiting import until
from triglot import Call, backends, testing
from triglot.model.config import ModelConfig, WarmUpInput, WarmUpRequest
from triglot.repository.manager.manager import Manager
from triglot.repository.manager.warm_up import warm_up
from triglot.repository.scan.source import ModelFiles, Root

PYTHON = """
import threading
import time
from collections import Counter

import triglot


class Warm(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, 2])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    instances = 3
    max_batch_size = 8
    EXAMPLE

    def load(self, folder):
        self.runs = Counter()

    def infer(self, inputs, call):
        self.runs[threading.get_ident(), inputs["x"].shape, float(inputs["x"].sum())] += 1
        while inputs["x"][0, 0] == 99 and not call.cancelled:
            time.sleep(0.001)
        if inputs["x"][0, 0] < 0:
            raise ValueError("below 0")
        return {"y": inputs["x"].sum(axis=1)}
"""


def write(folder: Path, example: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "model.py").write_text(PYTHON.replace("EXAMPLE", example))


@asynccontextmanager
async def serving(*roots: Root, **options: Any) -> AsyncIterator[Manager]:
    manager = Manager(
        roots,
        backends.load,
        max_queue_size=1,
        warm=lambda servable, files: warm_up(servable, files.config.warm_up),
        **options,
    )
    try:
        await manager.load_all()
        yield manager
    finally:
        await manager.close()


def runs_of(manager: Manager) -> list[tuple[tuple[int, ...], float, int]]:
    """Shape, sum and count of what each thread of the model `m` has run."""
    runs: Any = vars(manager.registry.servable("m").model)["runs"]
    return sorted((shape, total, count) for (_, shape, total), count in runs.items())


# --- a Python model with examples ---


@pytest.mark.parametrize(
    ("example", "runs"),
    [
        ('example = {"x": [[1, 2]]}', [((1, 2), 3.0, 1)] * 3),
        (
            'example = [{"x": [[1, 2]]}, {"x": [[0.5, 0], [0, 0]]}]',
            [((1, 2), 3.0, 1)] * 3 + [((2, 2), 0.5, 1)] * 3,
        ),
        ("example = ()", []),
        ("", []),
    ],
)
async def test_an_example_runs_on_every_instance(
    tmp_path: Path, example: str, runs: list[tuple[tuple[int, ...], float, int]]
) -> None:
    write(tmp_path / "m" / "1", example)
    async with serving(tmp_path / "m") as manager:
        assert states(manager, "m") == {1: "READY"}
        assert runs_of(manager) == runs


async def test_an_example_that_load_sets(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", "")
    file = tmp_path / "m" / "1" / "model.py"
    file.write_text(
        file.read_text()
        .replace("def load(self, folder):", "def load(self, folder):\n        SET")
        .replace("SET", 'self.example = {"x": [[4, 4]]}')
    )
    async with serving(tmp_path / "m") as manager:
        assert runs_of(manager) == [((1, 2), 8.0, 1)] * 3


@pytest.mark.parametrize(
    ("example", "text"),
    [
        ('{"x": [[-1, 2]]}', "example: ValueError: below 0"),
        (
            '{"x": [1, 2]}',
            "example: unexpected shape for input 'x' for model 'm'. Expected [-1,2], got [2]. ",
        ),
        ('{"x": [[1, 2]] * 9}', "example: inference request batch-size must be <= 8 for 'm'"),
    ],
)
async def test_a_version_whose_example_fails_leaves_the_old_one(tmp_path: Path, example: str, text: str) -> None:
    write(tmp_path / "m" / "1", 'example = {"x": [[1, 2]]}')
    async with serving(tmp_path / "m") as manager:
        write(tmp_path / "m" / "2", f"example = {example}")
        await look_twice(manager)
        await until(lambda: 2 in states(manager, "m") and states(manager, "m")[2] not in ("START", "LOADING"))
        assert states(manager, "m")[1] == "READY"
        assert states(manager, "m")[2].startswith(f"m version 2: {text}")
        with manager.registry.servable("m") as servable:
            answer = await direct_infer(servable, {"x": np.ones((1, 2), np.float32)}, Call())
        assert (servable.version, answer["y"].tolist()) == (1, [2])


async def test_a_warm_up_that_takes_too_long(tmp_path: Path) -> None:
    write(tmp_path / "m" / "1", 'example = {"x": [[99, 0]]}')
    async with serving(tmp_path / "m", load_timeout=0.2) as manager:
        (text,) = states(manager, "m").values()
        assert text == f"{tmp_path / 'm' / '1' / 'model.py'}: loading took longer than load_timeout, 0.2 s"
    assert not any(thread.name.startswith("m/1#") for thread in threading.enumerate())


# --- an ONNX model with configured requests ---


def save_gather(file: Path) -> None:
    """y = the elements of [10, 20, 30] at x, so a wrong index is an error of onnxruntime's."""
    onnx = pytest.importorskip("onnx")
    table = onnx.numpy_helper.from_array(np.array([10, 20, 30], np.float32), "table")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Gather", ["table", "x"], ["y"])],
        "graph",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.INT64, ["n", 2])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, ["n", 2])],
        initializer=[table],
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)], ir_version=8), file)


@pytest.mark.parametrize(
    ("request_", "text"),
    [
        (lambda file: WarmUpRequest("w", {"x": WarmUpInput("INT64", [2])}, batch_size=4, count=3), "READY"),
        (lambda file: WarmUpRequest("w", {"x": WarmUpInput("INT64", [2], file=file)}), "READY"),
        (lambda file: WarmUpRequest("w", {"x": WarmUpInput("INT64", [3])}), "unexpected shape for input 'x' for "),
        (
            lambda file: WarmUpRequest("w", {"x": WarmUpInput("FP32", [2])}),
            "inference input 'x' data-type is ",
        ),
        (
            lambda file: WarmUpRequest("w", {"x": WarmUpInput("INT64", [2], True)}),
            "indices element out of data ",
        ),
    ],
)
async def test_configured_requests(tmp_path: Path, request_: Callable[[Path], WarmUpRequest], text: str) -> None:
    file, raw = tmp_path / "m" / "1" / "model.onnx", tmp_path / "m" / "warmup" / "raw"
    save_gather(file)
    raw.parent.mkdir()
    raw.write_bytes(np.array([2, 0], "<i8").tobytes())
    config = ModelConfig(max_batch_size=4, warm_up=[request_(raw)])
    async with serving(ModelFiles("m", 1, "onnx", file, config=config)) as manager:
        (state,) = states(manager, "m").values()
        if text == "READY":
            assert state == "READY"
            assert manager.registry.servable("m").leases == 0
        else:
            assert state.startswith("m version 1: model_warmup 'w': ")
            assert text in state


async def test_no_metric_counts_it(tmp_path: Path) -> None:
    write(tmp_path / "m", 'example = {"x": [[1, 2]]}')
    async with testing.serve(tmp_path / "m") as running:
        server = running.server
        served = server.manager.registry.servable("m")
        assert sum(served.model.runs.values()) == 3  # type: ignore[attr-defined]  # The class above.
        calls = [stats for endpoint in server.telemetry.endpoints() for stats in endpoint.calls()]
        assert calls == []
