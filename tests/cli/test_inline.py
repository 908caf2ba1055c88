"""`triglot.serve` and `triglot.running`: servers of objects, classes and paths in a program of the user's."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from tests.process import LISTENING, start_python, write_model
from triglot.testing import KServeGrpc, KServeRest
from triglot.testing.process import Lines

SCRIPT = """
import sys

import triglot

class Double(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"] * 2}

triglot.serve(Double, grpc_port=0, rest_port=0, **dict(word.split("=") for word in sys.argv[1:]))
print("after it")
"""


class TwoTimes(triglot.Model):
    inputs = (triglot.TensorSpec("x", "INT32", [-1]),)
    outputs = (triglot.TensorSpec("y", "INT32", [-1]),)
    loads = closes = 0

    def load(self, folder: Path) -> None:
        assert folder == Path(__file__).parent
        self.loads += 1

    def infer(self, inputs: Any) -> Any:
        return {"y": inputs["x"] * np.int32(2)}

    def close(self) -> None:
        self.closes += 1


def infer(url: str, model: str, values: list[int]) -> Any:
    return KServeRest(url).infer(model, {"x": np.array(values, np.int32)})["y"].tolist()


def test_a_server_for_a_block(tmp_path: Path) -> None:
    write_model(tmp_path / "own")
    model = TwoTimes()
    with triglot.running(model, {"named": TwoTimes, "by_path": str(tmp_path / "own")}) as server:
        assert infer(server.url, "two_times", [1, 2]) == [2, 4]
        assert infer(server.url, "named", [3]) == [6]
        assert infer(server.url, "by_path", [7]) == [7]
        with KServeGrpc(server.grpc_address) as client:
            assert client.infer("two_times", {"x": np.array([3], np.int32)})["y"] == 6
        assert (model.loads, model.closes) == (1, 0)
    assert model.closes == 1
    with pytest.raises(RuntimeError, match="inside of its `with` block"):
        _ = server.rest_port
    with server:
        assert infer(server.url, "two_times", [5]) == [10]
    assert model.closes == 2


async def test_a_server_on_the_running_loop() -> None:
    async with triglot.running(TwoTimes) as server:
        assert await asyncio.to_thread(infer, server.url, "two_times", [4]) == [8]
        with pytest.raises(RuntimeError, match=r"use `with triglot\.running"):
            triglot.serve(TwoTimes)


class InProcess(TwoTimes):
    execution = "process"


class Broken(TwoTimes):
    def load(self, folder: Path) -> None:
        raise OSError("no weights")


@pytest.mark.parametrize(("model", "text"), [(InProcess, "expected 'thread'"), (Broken, "no weights")])
def test_a_model_that_does_not_load(model: type[triglot.Model], text: str) -> None:
    with pytest.raises(triglot.ModelLoadError) as raised, triglot.running(model):
        pass
    assert text in str(raised.value.__cause__)


@pytest.mark.parametrize(
    ("arguments", "options", "error", "text"),
    [
        ([3], {}, TypeError, "expected a triglot.Model, its class, a path, or a dict of these by name, got 3"),
        ([int], {}, TypeError, "got <class 'int'>"),
        ([{"a b": TwoTimes}], {}, ValueError, "'a b' is not a valid model name"),
        ([TwoTimes], {"rest_prt": 1}, triglot.ConfigError, "did you mean 'rest_port'"),
        ([TwoTimes], {"rest_port": "1"}, triglot.ConfigError, "expected"),
    ],
)
def test_what_is_no_model_or_option(
    arguments: list[Any], options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=text):
        triglot.running(*arguments, **options)


def test_a_script_serves_until_a_signal(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    process = start_python([str(tmp_path / "script.py")])
    assert process.stdout is not None
    assert process.stderr is not None
    stdout, stderr = Lines(process.stdout), Lines(process.stderr)
    try:
        _, rest_port = stderr.wait_for(LISTENING).groups()
        rest = KServeRest(f"http://127.0.0.1:{rest_port}")
        assert rest.post("/v1/models/double:predict", {"instances": [1.0, 2.0]}) == {"predictions": [2.0, 4.0]}
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0, stderr.text()
    finally:
        process.kill()
        process.wait()
        printed = stdout.close()
        stderr.close()
    assert printed.endswith("after it\n")


def test_a_script_whose_server_cannot_start(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        SCRIPT.replace("def infer", "def load(self, folder):\n        raise OSError\n\n    def infer")
    )
    process = start_python([str(tmp_path / "script.py")])
    printed, error = process.communicate(timeout=60)
    assert process.returncode == 1, error
    assert "after it" not in printed
    assert "double version 1 could not be loaded" in error
