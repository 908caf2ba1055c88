"""The TensorFlow backend where TensorFlow is not installed."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from triglot import backends
from triglot.core.errors import MissingDependency

pytestmark = pytest.mark.skipif(find_spec("tensorflow") is not None, reason="TensorFlow is installed")


def test_the_error_says_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "saved_model.pb"
    file.touch()
    for _ in range(2):
        with pytest.raises(MissingDependency) as caught:
            backends.load("tensorflow", file)
        assert str(caught.value) == (
            f"{file}: the tensorflow backend needs tensorflow, which is not installed; run: pip install tensorflow"
        )
    assert "triglot.backends.tensorflow" not in sys.modules
