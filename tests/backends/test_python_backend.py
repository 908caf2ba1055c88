"""Models written in Python: how their file is found and imported, and which class is served."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.backends.python_files import DATACLASS, HEAD, load, load_error, model_of, run
from tests.process import write_model
from triglot import backends

# --- imports ---


def test_neighbours_do_not_shadow_packages(tmp_path: Path) -> None:
    for name in ("json", "numpy", "triglot", "model"):
        (tmp_path / f"{name}.py").write_text("raise AssertionError('imported by the name of a package')")
    modules = set(sys.modules)
    model = load(tmp_path, model_of("[json.dumps(1), numpy.ones(1).tolist()]", "import json, numpy, triglot\n"))
    assert run(model) == ["1", [1.0]]
    assert not [folder for folder in sys.path if str(tmp_path) in folder]
    added = [name for name in set(sys.modules) - modules if str(tmp_path) in str(sys.modules[name])]
    assert added == [type(model).__module__]
    assert "model" not in sys.modules


def test_neighbours_are_imported_relatively(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("VALUE = 3")
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("from .inner.deep import DEEP")
    (tmp_path / "package" / "inner" / "deep.py").write_text("from ...neighbour import VALUE\nDEEP = VALUE + 1")
    imports = "from . import neighbour\nfrom .neighbour import VALUE\nfrom .package import DEEP\n"
    assert run(load(tmp_path, imports + model_of("[neighbour.VALUE, VALUE, DEEP]"))) == [3, 3, 4]
    late = (
        model_of("self.late()")
        + "    def late(self):\n        from . import neighbour\n        return neighbour.VALUE\n"
    )
    assert run(load(tmp_path, late)) == 3
    assert "No module named 'neighbour'" in load_error(tmp_path, "import neighbour\n" + model_of("1"))


def test_models_with_files_of_the_same_names(tmp_path: Path) -> None:
    models = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "helper.py").write_text(f"VALUE = {number}")
        models.append(load(folder, "from .helper import VALUE\n" + model_of("VALUE")))
    assert [run(model) for model in models] == [1, 2]
    assert type(models[0]).__module__ != type(models[1]).__module__
    # The same file twice: two models that share nothing.
    again = load(tmp_path / "1", "from .helper import VALUE\n" + model_of("VALUE"))
    assert type(again) is not type(models[0])


@pytest.mark.parametrize("file", ["my-model.py", "my.model.py", "json.py", "1.py"])
def test_a_file_may_have_any_name(tmp_path: Path, file: str) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 3")
    assert run(load(tmp_path, "from .helper import VALUE\n" + model_of("VALUE"), file)) == 3


def test_a_model_may_be_a_dataclass(tmp_path: Path) -> None:
    assert run(load(tmp_path, DATACLASS)) == 3


@pytest.mark.parametrize("cached", ["model.py", "helper.py", "package/inner.py"])
def test_a_file_that_was_changed_within_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cached: str
) -> None:
    """Python would take the code that it has compiled before: the file has the same size and time."""
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "package").mkdir()
    files = {
        "model.py": "from . import helper\nfrom .package import inner\nA = 1\n"
        + model_of("[A, helper.A, inner.A]"),
        "helper.py": "A = 1",
        "package/inner.py": "A = 1",
    }
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert run(backends.load("python", tmp_path / "model.py")) == [1, 1, 1]
    file = tmp_path / cached
    time = file.stat().st_mtime_ns
    file.write_text(file.read_text().replace("A = 1", "A = 2"))
    os.utime(file, ns=(time, time))
    assert run(backends.load("python", tmp_path / "model.py")) == [1 + (name == cached) for name in files]


def test_nothing_is_written_to_the_model_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    (tmp_path / "helper.py").write_text("VALUE = 3")
    load(tmp_path, "from .helper import VALUE\n" + model_of("VALUE"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["helper.py", "model.py"]


# --- the class ---

CLASS = "class {}({}):\n    def infer(self, inputs):\n        return type(self).__name__\n"


@pytest.mark.parametrize(
    "classes",
    [
        [("Mine", "triglot.Model")],
        [("Other", "triglot.Model"), ("Model", "triglot.Model")],
        [("Base", "triglot.Model"), ("Model", "Base")],
        [("Helper", "object"), ("Mine", "triglot.Model")],
    ],
)
def test_the_class_that_is_served(tmp_path: Path, classes: list[tuple[str, str]]) -> None:
    text = HEAD + "".join(CLASS.format(name, base) for name, base in classes)
    assert run(load(tmp_path, text)) == classes[-1][0]


def test_imported_and_abstract_classes_are_not_served(tmp_path: Path) -> None:
    (tmp_path / "base.py").write_text(HEAD + CLASS.format("Imported", "triglot.Model"))
    text = (
        HEAD
        + "from triglot import Model\nfrom .base import Imported\n"
        + "class Abstract(triglot.Model):\n    inputs = [X]\n"
        + CLASS.format("Mine", "Abstract")
    )
    assert run(load(tmp_path, text)) == "Mine"


def test_a_second_name_is_not_a_second_class(tmp_path: Path) -> None:
    assert run(load(tmp_path, HEAD + CLASS.format("Mine", "triglot.Model") + "Model = Mine\n")) == "Mine"


def test_several_classes(tmp_path: Path) -> None:
    text = HEAD + CLASS.format("One", "triglot.Model") + CLASS.format("Two", "triglot.Model")
    assert "more than one model class (One, Two); name the one to serve Model" in load_error(tmp_path, text)


@pytest.mark.parametrize(
    "text", ["", HEAD, "class Model:\n    def infer(self, inputs): ...\n", HEAD + "M = triglot.Model"]
)
def test_no_class(tmp_path: Path, text: str) -> None:
    assert load_error(tmp_path, text).endswith("found no subclass of triglot.Model with an infer()")


TRITON_MODEL = "class TritonPythonModel:\n    def execute(self, requests): ...\n"


def test_triglot_class_wins_over_a_triton_class(tmp_path: Path) -> None:
    assert run(backends.load("python", write_model(tmp_path, model_of("1") + TRITON_MODEL))) == 1
