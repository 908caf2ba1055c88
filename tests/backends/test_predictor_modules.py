"""Where a predictor's modules come from, and that no other model or package meets them."""

from __future__ import annotations

import gc
import gzip
import io
import json
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest

import triglot
from triglot import backends
from triglot.backends.child_modules import ROOT, SPAWNED
from triglot.core.errors import Internal, ModelLoadError
from triglot.core.tensor import object_array

TOML = 'prediction_class = "predictor.Predictor"\n'
Load = Callable[..., triglot.Model]


def predictor(value: str, imports: str = "", from_path: str = "pass", late: str = "pass") -> str:
    """A predictor that answers with an expression. `late` is run by `predict`, `from_path` while it loads."""
    return f"""{imports}
class Predictor:
    @classmethod
    def from_path(cls, model_dir):
        self = cls()
        {from_path}
        return self

    def predict(self, instances):
        {late}
        return {value}
"""


@pytest.fixture
def load() -> Iterator[Load]:
    """Writes the files of a model, given by their names, and loads it; closed at the end of the test."""
    with ExitStack() as opened:

        def load_files(folder: Path, files: dict[str, str], toml: str = TOML) -> triglot.Model:
            for name, text in {**files, "predictor.toml": toml}.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                (folder / name).write_text(text)
            return opened.enter_context(closing(backends.load("predictor", folder / "predictor.toml")))

        yield load_files


def run(model: triglot.Model) -> Any:
    inputs = {"instances": object_array([b"1"], [1]), "parameters": object_array([b"{}"], [1])}
    return json.loads(model.infer(inputs)["predictions"][0])


def sdist(file: Path, files: dict[str, str]) -> None:
    """A source distribution of these files."""
    file.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(file, "w:gz") as archive:
        for name, text in {**files, "setup.py": "raise AssertionError('run')"}.items():
            add(archive, f"{file.name.removesuffix('.tar.gz')}/{name}", text)


def add(archive: tarfile.TarFile, name: str, text: str) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(text)
    archive.addfile(member, io.BytesIO(text.encode()))


def footprint() -> tuple[list[str], list[str], list[object]]:
    """What imports leave behind, or should not."""
    gc.collect()  # Models of other tests may be garbage.
    mine = [name for name in sys.modules if name in OWN_NAMES or name.startswith(f"{ROOT}.")]
    return mine, [entry for entry in sys.path if entry != SPAWNED], list(sys.meta_path)


OWN_NAMES = {"predictor", "helper", "package", "package.inner", "pickled", "late"}


# --- imports ---

EVERY_WAY = """
import helper, package, package.inner
import package.inner as inner
from helper import NUMBER
from package import inner as again, FROM_INNER
from package.inner import NUMBER as nested
seen = [helper.NUMBER, NUMBER, package.inner.NUMBER, inner.NUMBER, again.NUMBER, FROM_INNER, nested]
"""


def test_every_way_to_import(tmp_path: Path, load: Load) -> None:
    late = EVERY_WAY.strip().replace("\n", "; ")
    files = {
        "predictor.py": predictor("[early, seen]", EVERY_WAY + "early = seen", late=late),
        "helper.py": "NUMBER = 1",
        "package/__init__.py": "from .inner import NUMBER as FROM_INNER",
        "package/inner.py": "import helper\nfrom .deep.below import PARENT\nNUMBER = helper.NUMBER + 1",
        "package/deep/below.py": "from .. import __name__ as PARENT",
    }
    assert run(load(tmp_path, files)) == [[1, 1, 2, 2, 2, 2, 2]] * 2


def test_models_with_modules_of_the_same_names(tmp_path: Path, load: Load) -> None:
    models = [
        load(
            tmp_path / str(number),
            {
                "predictor.py": predictor(
                    "[helper.NUMBER, NUMBER]", "import helper", late="from late import NUMBER"
                ),
                "helper.py": f"NUMBER = {number}",
                "late.py": "import helper\nNUMBER = helper.NUMBER * 10",
            },
        )
        for number in (1, 2)
    ]
    assert [run(model) for model in models] == [[1, 10], [2, 20]]
    assert run(models[0]) == [1, 10]


def test_one_folder_loaded_twice(tmp_path: Path, load: Load) -> None:
    counting = predictor("helper.CALLS", "import helper", late="helper.CALLS.append(1)")
    files = {"predictor.py": counting, "helper.py": "CALLS = []"}
    models = [load(tmp_path, files) for _ in range(2)]
    assert [run(models[0]), run(models[0]), run(models[1])] == [[1], [1, 1], [1]]


def test_nothing_is_left_behind(tmp_path: Path, load: Load) -> None:
    before = footprint()
    files = {"predictor.py": predictor("helper.NUMBER", "import helper"), "helper.py": "NUMBER = 1"}
    model = load(tmp_path, files)
    modules, path, _ = footprint()
    assert sorted(name.split(".")[2:] for name in {*modules} - {*before[0]}) == [[], ["helper"], ["predictor"]]
    assert path == before[1]
    assert run(model) == 1
    model.close()
    assert footprint() == before


@pytest.mark.parametrize("text", ["1 / 0", "class Predictor: ...", "import helper\nhelper.absent"])
def test_nothing_is_left_behind_by_a_model_that_does_not_load(tmp_path: Path, load: Load, text: str) -> None:
    before = footprint()
    with pytest.raises(ModelLoadError):
        load(tmp_path, {"predictor.py": text, "helper.py": ""})
    assert footprint() == before


def test_names_of_packages(tmp_path: Path, load: Load) -> None:
    """The model's modules are its own alone, and the standard library is everybody's."""
    files = {
        "predictor.py": predictor("[orjson.NAME, json.dumps(1)]", "import orjson, json, numpy.testing"),
        "orjson.py": "NAME = 'mine'",
        "json.py": "raise AssertionError('imported')",
    }
    assert run(load(tmp_path, files)) == ["mine", "1"]
    assert not hasattr(sys.modules["orjson"], "NAME")


def test_a_class_of_an_installed_package(tmp_path: Path, load: Load) -> None:
    with pytest.raises(ModelLoadError, match=r"fractions\.Fraction has no class method from_path\(model_dir\)"):
        load(tmp_path, {}, 'prediction_class = "fractions.Fraction"')


# --- pickles, which name modules ---

PICKLED = "class Pickled:\n    number = {}\n"
READ = """
import importlib, pickle, threading

def read():
    return pickle.loads(b"cpickled\\nPickled\\n.")

def read_by_another():
    found = []
    thread = threading.Thread(target=lambda: found.append(importlib.import_module("pickled").Pickled))
    thread.start()
    thread.join()
    return found[0]
"""


def test_pickles_are_read_while_the_model_loads(tmp_path: Path, load: Load) -> None:
    value = "[one.number for one in self.read] + [self.read[0] is pickled.Pickled is self.read[1]]"
    models = [
        load(
            tmp_path / str(number),
            {
                "predictor.py": predictor(
                    value, READ, from_path="self.read = [read(), read_by_another()]", late="import pickled"
                ),
                "pickled.py": PICKLED.format(number),
            },
        )
        for number in (1, 2)
    ]
    assert [run(model) for model in models] == [[1, 1, True], [2, 2, True]]
    assert "pickled" not in sys.modules


def test_pickles_of_packages(tmp_path: Path, load: Load) -> None:
    read = 'self.read = pickle.loads(b"cpackage.inner\\nPickled\\n.")'
    files = {
        "predictor.py": predictor("self.read.number, self.read.parent", "import pickle", from_path=read),
        "package/__init__.py": "NAME = 'mine'",
        "package/inner.py": PICKLED.format(3) + "    from . import NAME as parent\n",
    }
    assert run(load(tmp_path, files)) == [3, "mine"]


def test_a_pickle_that_is_read_too_late(tmp_path: Path, load: Load) -> None:
    model = load(tmp_path, {"predictor.py": predictor("read()", READ), "pickled.py": PICKLED.format(1)})
    with pytest.raises(Internal, match="No module named 'pickled'"):
        run(model)


# --- folders and packages ---


def test_folders_of_modules(tmp_path: Path, load: Load) -> None:
    files = {
        "src/package/__init__.py": "",
        "src/package/inner.py": predictor("helper.NUMBER", "import helper"),
        "more/modules/helper.py": "NUMBER = 4",
    }
    toml = 'prediction_class = "package.inner.Predictor"\npath = ["src", "more/modules"]'
    assert run(load(tmp_path, files, toml)) == 4


def test_the_models_own_folder_is_meant_by_default_only(tmp_path: Path, load: Load) -> None:
    with pytest.raises(ModelLoadError, match="no module 'predictor'; the model has helper"):
        load(tmp_path, {"predictor.py": predictor("1"), "src/helper.py": ""}, TOML + 'path = ["src"]')


@pytest.mark.parametrize("layout", ["", "src/"])
def test_source_distributions(tmp_path: Path, load: Load, layout: str) -> None:
    sdist(tmp_path / "code-0.1.tar.gz", {f"{layout}predictor.py": predictor("package.NUMBER", "import package")})
    helpers = {
        f"{layout}package/__init__.py": "from .inner import NUMBER",
        f"{layout}package/inner.py": "NUMBER = 5",
    }
    sdist(tmp_path / "dist" / "helpers-2.0.tar.gz", helpers)
    toml = TOML + 'packages = ["code-0.1.tar.gz", "dist/helpers-2.0.tar.gz"]'
    assert run(load(tmp_path, {}, toml)) == 5


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that temporary folders are made in."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_unpacked_packages_are_private_and_removed(tmp_path: Path, load: Load, temporary: Path) -> None:
    sdist(tmp_path / "model" / "code-0.1.tar.gz", {"predictor.py": predictor("__file__")})
    model = load(tmp_path / "model", {}, TOML + 'packages = ["code-0.1.tar.gz"]')
    (unpacked,) = temporary.iterdir()
    assert unpacked.stat().st_mode & 0o077 == 0
    assert Path(run(model)).is_relative_to(unpacked)
    model.close()
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("packages", ['["code-0.1.tar.gz"]', '["code-0.1.tar.gz", "absent.tar.gz"]'])
def test_they_are_removed_when_the_model_does_not_load(
    tmp_path: Path, load: Load, temporary: Path, packages: str
) -> None:
    sdist(tmp_path / "model" / "code-0.1.tar.gz", {"predictor.py": "1 / 0"})
    with pytest.raises(ModelLoadError):
        load(tmp_path / "model", {}, f"{TOML}packages = {packages}")
    assert list(temporary.iterdir()) == []


@pytest.mark.parametrize("name", ["../escaped.py", "code-0.1/../../escaped.py"])
def test_a_package_that_wants_out(tmp_path: Path, load: Load, temporary: Path, name: str) -> None:
    file = tmp_path / "model" / "code-0.1.tar.gz"
    file.parent.mkdir()
    with tarfile.open(file, "w:gz") as archive:
        add(archive, name, "")
    with pytest.raises(ModelLoadError, match=r"packages: cannot unpack code-0\.1\.tar\.gz: "):
        load(tmp_path / "model", {}, TOML + 'packages = ["code-0.1.tar.gz"]')
    assert not list(tmp_path.rglob("escaped.py"))


def test_a_damaged_package(tmp_path: Path, load: Load, temporary: Path) -> None:
    file = tmp_path / "model" / "code-0.1.tar.gz"
    sdist(file, {"code.py": "VALUE = 1"})
    # Nothing but the sum at its end tells of it.
    file.write_bytes(
        gzip.compress(gzip.decompress(file.read_bytes()).replace(b"= 1", b"= 7"), 0)[:-8] + file.read_bytes()[-8:]
    )
    with pytest.raises(ModelLoadError, match=r"packages: cannot unpack code-0\.1\.tar\.gz: CRC check failed"):
        load(tmp_path / "model", {}, TOML + 'packages = ["code-0.1.tar.gz"]')
    assert list(temporary.iterdir()) == []
