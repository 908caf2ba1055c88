"""Servers, gates, the check without a server, and the plugin of `triglot.testing`."""

from __future__ import annotations

import asyncio
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from tests.process import IDENTITY, outcome, start_python, write_model
from triglot import testing


class Double(triglot.Model):
    """Doubles its input; what it has loaded is closed."""

    inputs = (triglot.TensorSpec("x", "FP32", [-1]),)
    outputs = (triglot.TensorSpec("y", "FP32", [-1]),)
    closes = 0

    def infer(self, inputs: Any) -> Any:
        if inputs["x"].size > 3:
            raise triglot.InvalidArgument("x: expected at most 3 elements")
        return {"y": inputs["x"] * 2}

    def close(self) -> None:
        self.closes += 1


class Words(triglot.Model):
    """Yields the words of a text."""

    inputs = (triglot.TensorSpec("text", "BYTES", [1]),)
    outputs = (triglot.TensorSpec("word", "BYTES", [1]),)

    def infer(self, inputs: Any) -> Any:
        for word in inputs["text"][0].split():
            yield {"word": [word]}


def test_a_process(tmp_path: Path) -> None:
    write_model(tmp_path / "identity")
    with testing.serve({"own": tmp_path / "identity"}, process=True, strict_readiness=False) as server:
        for make in testing.CLIENTS.values():
            with make(server) as client:
                assert client.infer("own", {"x": np.array([7], np.int32)})["y"].tolist() == [7]
        process = server.process
    assert not process.runs
    with pytest.raises(RuntimeError, match="inside of its `with` block"):
        _ = server.process
    with server:
        server.process.signal(signal.SIGKILL)
        assert server.process.wait() == -signal.SIGKILL


async def test_a_process_of_a_coroutine(tmp_path: Path) -> None:
    write_model(tmp_path / "identity")
    async with testing.serve(tmp_path, process=True) as server:
        with testing.KServeGrpc(server) as client:
            outputs = await asyncio.to_thread(client.infer, "identity", {"x": np.array([7], np.int32)})
        assert outputs["y"].tolist() == [7]


def test_a_process_that_does_not_start(tmp_path: Path) -> None:
    write_model(tmp_path / "broken", "import missing_module\n" + IDENTITY)
    with pytest.raises(ChildProcessError, match="missing_module"), testing.serve(tmp_path, process=True):
        pass
    with pytest.raises(TypeError, match="expected the path of a model"):
        testing.serve(Double, process=True)
    with pytest.raises(triglot.ConfigError, match="did you mean 'grace'"):
        testing.serve(tmp_path, process=True, grase=1)


def test_a_model_waits_at_points() -> None:
    model = testing.GatedModel("load", "infer", instances=2)
    with ThreadPoolExecutor() as pool:
        entering = pool.submit(testing.serve(model).__enter__)
        model.wait_until_at("load")
        assert not entering.done()
        model.open_point("load")
        with testing.KServeGrpc(entering.result()) as client:
            calls = [pool.submit(client.infer, "gated_model", {"x": np.array([n], np.float32)}) for n in range(3)]
            model.wait_until_at("infer", 2)
            model.open_point("infer")
            assert [call.result()["y"].tolist() for call in calls] == [[0], [1], [2]]
            model.close_point("infer")
            last = pool.submit(client.infer, "gated_model", {"x": np.array([3], np.float32)})
            model.wait_until_at("infer", 2)
            assert not last.done()
            model.open_point("infer")
            assert last.result()["y"].tolist() == [3]
        entering.result().__exit__(None, None, None)


def test_a_model_serves() -> None:
    model = Double()
    responses = testing.assert_serves(model, {"x": [1, 2.5]}, {"y": [2, 5]})
    assert [response["y"].dtype for response in responses] == [np.float32]
    assert model.closes == 1
    testing.assert_serves({"words": Words()}, {"text": ["to be"]}, {"word": ["to"]}, {"word": [b"be"]})


def test_a_model_does_not_serve(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="Mismatched elements"):
        testing.assert_serves(Double, {"x": [1]}, {"y": [2.1]})
    with pytest.raises(AssertionError, match="expected output 'z', got y"):
        testing.assert_serves(Double, {"x": [1]}, {"z": [2]})
    with pytest.raises(AssertionError, match="expected 1 responses, got 2"):
        testing.assert_serves(Words, {"text": ["to be"]}, {"word": ["to"]})
    with pytest.raises(triglot.InvalidArgument, match="at most 3 elements"):
        testing.assert_serves(Double, {"x": [1, 2, 3, 4]})
    with pytest.raises(triglot.InvalidArgument, match="FP64"):
        testing.assert_serves(Double, {"x": np.array([1.0])})
    with pytest.raises(triglot.InvalidArgument, match="'z'"):
        testing.assert_serves(Double, {"z": [1]})
    write_model(tmp_path / "broken", "import missing_module\n" + IDENTITY)
    with pytest.raises(triglot.ModelLoadError, match="missing_module"):
        testing.assert_serves(tmp_path / "broken", {"x": [1]})
    for name in ("a", "b"):
        write_model(tmp_path / "two" / name)
    with pytest.raises(ValueError, match="name: expected one of a, b, got ''"):
        testing.assert_serves(tmp_path / "two", {"x": [1]})
    testing.assert_serves(tmp_path / "two", {"x": [1]}, {"y": [1]}, name="b")


@pytest.mark.parametrize("asked", [True, False])
def test_the_plugin_is_off_unless_asked_for(asked: bool, tmp_path: Path) -> None:
    write_model(tmp_path / "identity")
    (tmp_path / "test_model.py").write_text(
        """
import numpy as np
from triglot.testing import KServeRest

def test_identity(serve_models):
    with KServeRest(serve_models("identity")) as client:
        assert client.infer("identity", {"x": np.array([7], np.int32)})["y"].tolist() == [7]
"""
    )
    flags = ["-p", "triglot.testing.plugin"] if asked else []
    done = outcome(start_python(["-m", "pytest", "-q", "-p", "no:cacheprovider", *flags], folder=tmp_path))
    assert ("1 passed" if asked else "fixture 'serve_models' not found") in done.stdout, done.stdout
