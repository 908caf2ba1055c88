"""Annotations of a model's code are never evaluated: their names may exist for type checkers only."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from tests.process import run_triglot
from triglot.model.model import signature_of

# Since Python 3.14 the code that follows needs no import from __future__.
LAZY = "" if sys.version_info >= (3, 14) else "from __future__ import annotations\n"
HEAD = f"""{LAZY}
from typing import TYPE_CHECKING

import triglot

if TYPE_CHECKING:
    import missing_library as missing


class Annotated(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1, 1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1, 1])]
    example = {{"x": [[1.0], [2.0]]}}
    execution = EXECUTION
    size: missing.Size = 3

    def load(self, folder: missing.Folder) -> None: ...

"""
MODELS = {
    "call": "def infer(self, inputs: missing.Inputs, call: missing.Call) -> missing.Y: return {'y': inputs['x']}",
    "async": "async def infer(self, inputs: missing.Inputs) -> missing.Outputs: return {'y': inputs['x']}",
    "stream": "def infer(self, inputs: missing.Inputs) -> missing.Outputs: yield {'y': inputs['x']}",
    "list": """max_batch_size = 4
    dynamic_batching = triglot.DynamicBatching()
    def infer(self, inputs: missing.Inputs) -> missing.Outputs: return {'y': inputs['x']}
    def infer_batch(self, inputs: missing.Batch, calls: missing.Calls) -> missing.Outputs:
        return [{'y': each['x']} for each in inputs]
""",
}


@pytest.mark.parametrize("execution", ["thread", "process"])
@pytest.mark.parametrize("kind", MODELS)
def test_model_is_loaded_and_runs(tmp_path: Path, kind: str, execution: str) -> None:
    file = tmp_path / "annotated" / "model.py"
    file.parent.mkdir()
    file.write_text(HEAD.replace("EXECUTION", repr(execution)) + f"    {MODELS[kind]}\n")
    checked = run_triglot("check", tmp_path)
    assert checked.returncode == 0, checked.stderr + checked.stdout


def test_predictor_is_loaded(tmp_path: Path) -> None:
    folder = tmp_path / "predictor"
    folder.mkdir()
    (folder / "predictor.toml").write_text('prediction_class = "mine.Mine"\n')
    (folder / "mine.py").write_text(f"""{LAZY}
class Mine:
    @classmethod
    def from_path(cls, model_dir: missing.Path) -> missing.Mine:
        return cls()

    def predict(self, instances: missing.Instances, **kwargs: missing.Any) -> missing.Predictions:
        return instances
""")
    checked = run_triglot("check", tmp_path)
    assert checked.returncode == 0, checked.stderr + checked.stdout


def test_signature_has_annotations_as_they_were_written() -> None:
    names: dict[str, Any] = {}
    code = f"{LAZY}def predict(payload: missing.Payload, more: dict[str, missing.T]): ..."
    exec(compile(code, "model.py", "exec", dont_inherit=True), names)
    annotations = [each.annotation for each in signature_of(names["predict"]).parameters.values()]
    assert annotations == ["missing.Payload", "dict[str, missing.T]"]
