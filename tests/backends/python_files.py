"""Models written to a file, and loaded without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import triglot
from triglot import backends
from triglot.core.errors import ModelLoadError

HEAD = """
import triglot

X = triglot.TensorSpec("x", "INT32", [1])
Y = triglot.TensorSpec("y", "INT32", [1])

"""
DATACLASS = """
from __future__ import annotations
from dataclasses import dataclass
import triglot

@dataclass
class Mine(triglot.Model):
    value: int = 3

    def infer(self, inputs):
        return self.value
"""


def load(folder: Path, text: str, file: str = "model.py") -> triglot.Model:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / file).write_text(text)
    return backends.load("python", folder / file)


def load_error(folder: Path, text: str) -> str:
    with pytest.raises(ModelLoadError) as caught:
        load(folder, text)
    message = str(caught.value)
    assert message.startswith(f"{folder / 'model.py'}:")
    return message


def run(model: triglot.Model) -> Any:
    return model.infer({"x": np.array([7], np.int32)})


def model_of(value: str, head: str = HEAD) -> str:
    """A model that answers with the value of an expression, whatever it is asked."""
    return f"{head}class Mine(triglot.Model):\n    def infer(self, inputs):\n        return {value}\n"
