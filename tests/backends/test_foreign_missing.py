"""MLServer's and KServe's model classes where their packages are not installed, and their tests where they are."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.environment_tests import check_tests
from triglot import backends
from triglot.backends.foreign_classes import CLASSES
from triglot.core.errors import MissingDependency, ModelLoadError

FOLDER = Path(__file__).parent
without = {
    name: pytest.mark.skipif(find_spec(name) is not None, reason="this environment has it") for name in CLASSES
}


@without["kserve"]
def test_the_error_says_what_to_install(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("import kserve\n\nclass Mine(kserve.Model):\n    pass\n")
    with pytest.raises(MissingDependency) as caught:
        backends.load("python", file)
    text = "the model needs kserve, which is not installed; run: pip install kserve"
    assert str(caught.value) == f"{file}: {text}"


@without["mlserver"]
@pytest.mark.parametrize("line", ["from mlserver import MLServer", "from mlserver.grpc import servicers"])
def test_what_only_the_package_has(tmp_path: Path, line: str) -> None:
    file = tmp_path / "model.py"
    file.write_text(f"from mlserver import MLModel\n{line}\n\nclass Mine(MLModel):\n    pass\n")
    with pytest.raises(MissingDependency, match=r"mlserver, which is not installed; run: pip install mlserver"):
        backends.load("python", file)


def test_a_file_that_only_names_them(tmp_path: Path) -> None:
    file = tmp_path / "model.py"
    file.write_text("# Not for mlserver, nor kserve.\nimport helper\nfrom triglot import Model\n\nMine = 3\n")
    (tmp_path / "helper.py").write_text("")
    with pytest.raises(ModelLoadError, match=r"found no subclass of triglot\.Model"):
        backends.load("python", file)
    file.write_text(
        "# Not for mlserver.\nimport helper\nfrom triglot import Model\n\n"
        "class Mine(Model):\n    def infer(self, inputs):\n        return inputs\n"
    )
    assert backends.load("python", file).infer({"x": 1}) == {"x": 1}


@pytest.mark.long
@pytest.mark.newest
@pytest.mark.parametrize(
    ("name", "files"),
    [
        pytest.param(
            "mlserver",
            ("test_mlserver.py", "test_mlserver_documented.py", "test_mlserver_stock.py"),
            marks=without["mlserver"],
        ),
        pytest.param("kserve", ("test_kserve_model.py",), marks=without["kserve"]),
    ],
)
def test_they_hold_with_the_packages(name: str, files: Sequence[str]) -> None:
    check_tests(name, *(FOLDER / file for file in files))
