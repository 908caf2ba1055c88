"""The ONNX backend with the classifier that comes with the server."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from triglot import backends
from triglot.core.errors import ModelLoadError
from triglot.run import DEMO

onnxruntime = pytest.importorskip("onnxruntime")

FILE = DEMO / "digits" / "1" / "model.onnx"


def test_it_answers_as_onnxruntime_does() -> None:
    model = backends.load("onnx", FILE)
    session = onnxruntime.InferenceSession(str(FILE), providers=["CPUExecutionProvider"])
    images = np.random.default_rng(1).random((2, 1, 8, 8), dtype="f4")
    (expected,) = session.run(None, {"image": images})
    unaligned = np.frombuffer(b"-" + images.tobytes(), "f4", offset=1).reshape(images.shape)
    for view in (images, unaligned):
        np.testing.assert_array_equal(model.infer({"image": view})["probabilities"], expected)


def test_a_half_of_it_cannot_be_loaded(tmp_path: Path) -> None:
    content = FILE.read_bytes()
    file = tmp_path / "model.onnx"
    file.write_bytes(content[: len(content) // 2])
    with pytest.raises(ModelLoadError, match=str(file)):
        backends.load("onnx", file)
