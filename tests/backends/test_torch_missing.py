"""The torch backend where torch is not installed, and its tests where it is."""

from __future__ import annotations

import shutil
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from environment_tests import check_tests
from triglot import backends
from triglot.core.errors import MissingDependency

FOLDER = Path(__file__).parent
NAMES = ("test_torch_*.py", "test_grps_torch*.py", "test_triton_python_torch.py")
FILES = {file for name in NAMES for file in FOLDER.glob(name) if not file.stem.endswith("_missing")}
if shutil.which("g++") is None:  # Which AOTInductor compiles with.
    FILES -= {FOLDER / "test_torch_compiled.py"}

without_torch = pytest.mark.skipif(find_spec("torch") is not None, reason="this environment has torch")


@without_torch
@pytest.mark.parametrize("name", ["model.pt", "model.pt2"])
def test_the_error_says_what_to_install(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    for _ in range(2):
        with pytest.raises(MissingDependency) as caught:
            backends.load("torch", file)
        text = "the torch backend needs torch, which is not installed; run: pip install torch"
        assert str(caught.value) == f"{file}: {text}"
    assert not [module for module in sys.modules if module.startswith("triglot.backends.torch")]


@without_torch
# They have libraries of their own: another environment of these tests changes nothing.
@pytest.mark.newest
def test_they_hold_with_torch() -> None:
    check_tests("torch", *sorted(FILES))
