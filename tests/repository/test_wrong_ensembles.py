"""Ensembles whose class says what cannot be: the error names the file and the key."""

from __future__ import annotations

from pathlib import Path

import pytest

from triglot import Config, ModelLoadError, Server

HEAD = """
import triglot

class E(triglot.Ensemble):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    steps = [triglot.Step("m", {"x": "x"}, {"y": "y"})]
    """
STEP = 'steps = [triglot.Step("m", {"x": "x"}, {"y": "y"}, version=%s)]'
MODEL = """
import triglot

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"]}
"""
NAMES = "expected names by name, got"


@pytest.mark.parametrize(
    ("declaration", "message"),
    [
        (
            'steps = triglot.Step("m", {"x": "x"}, {"y": "y"})',
            "steps: expected a list of Step, got Step(model='m'",
        ),
        ("steps = None", "steps: expected a list of Step, got None"),
        ("steps = 'm'", "steps: expected a list of Step, got 'm'"),
        ("steps = {}", "steps: expected a list of Step, got {}"),
        ("steps = ['m']", "steps[0]: expected Step, got 'm'"),
        ('steps = [triglot.Step(1, {"x": "x"}, {"y": "y"})]', "steps[0].model: "),
        ('steps = [triglot.Step("m", ["x"], {"y": "y"})]', f"steps[0].inputs: {NAMES} ['x']"),
        ('steps = [triglot.Step("m", "x", {"y": "y"})]', f"steps[0].inputs: {NAMES} 'x'"),
        ('steps = [triglot.Step("m", {"x": 1}, {"y": "y"})]', f"steps[0].inputs: {NAMES} {{'x': 1}}"),
        ('steps = [triglot.Step("m", {1: "x"}, {"y": "y"})]', f"steps[0].inputs: {NAMES} {{1: 'x'}}"),
        ('steps = [triglot.Step("m", {"x": "x"}, None)]', f"steps[0].outputs: {NAMES} None"),
        (STEP % "'1'", "steps[0].version: expected an integer, got '1'"),
        (STEP % "-1", "steps[0].version: expected at least 0, got -1"),
        (STEP % "True", "steps[0].version: expected an integer, got True"),
        ("max_inflight_requests = -1", "max_inflight_requests: expected at least 0, got -1"),
        ("max_inflight_requests = '2'", "max_inflight_requests: expected an integer, got '2'"),
        ("max_inflight_requests = False", "max_inflight_requests: expected an integer, got False"),
    ],
)
async def test_what_a_class_cannot_say(tmp_path: Path, declaration: str, message: str) -> None:
    (tmp_path / "m.py").write_text(MODEL)
    file = tmp_path / "e.py"
    file.write_text(f"{HEAD}{declaration}\n")
    with pytest.raises(ModelLoadError) as caught:
        async with Server([tmp_path / "m.py", file], Config(grpc_port=0, rest_port=0)):
            pass
    assert str(caught.value.__cause__).startswith(f"{file}: {message}")
