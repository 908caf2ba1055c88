"""What a closed model leaves in the process: no module, no object of its own, and no way to its files."""

from __future__ import annotations

import gc
import importlib.util
import io
import json
import logging
import pickle
import sys
import tarfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.process import SECONDS
from triglot import backends, testing
from triglot.backends.child_modules import ROOT
from triglot.core.errors import ModelLoadError
from triglot.core.tensor import object_array

VERSIONS = 50
HEAD = "import triglot\nfrom . import helper\nfrom .package import inner\n"
CLASS = "class Mine(triglot.Model):\n    def infer(self, inputs):\n        return helper.VALUE + inner.VALUE\n"
PLAIN = HEAD + CLASS
# What keeps a model alive as long as its module is there.
CACHED = f"""{HEAD}import functools
{CLASS}
    @functools.lru_cache
    def double(self, value):
        return 2 * value

    def load(self, folder):
        self.double(2)
"""
NAMED = f"""{HEAD}MODELS = []
{CLASS}
    def __init__(self):
        MODELS.append(self)
"""
CLOSES = f"""{HEAD}{CLASS}
    def close(self):
        from . import late
        late.CLOSED.append(self)
"""
FAILS_TO_CLOSE = f"{PLAIN}\n    def close(self):\n        raise OSError('no')\n"


def write(folder: Path, text: str) -> Path:
    """A model's file, with neighbours that it can import."""
    (folder / "package").mkdir(parents=True, exist_ok=True)
    (folder / "helper.py").write_text("VALUE = 1")
    (folder / "late.py").write_text("CLOSED = []")
    (folder / "package" / "inner.py").write_text("VALUE = 2")
    (folder / "model.py").write_text(text)
    return folder / "model.py"


def collect() -> None:
    """Until nothing is left to free: what a round frees may have held a cycle that gc could not see."""
    while gc.collect():
        pass


def known() -> set[str]:
    """The modules of this process, who finds them, and the folders whose content Python remembers."""
    collect()
    return {*sys.modules, *map(repr, sys.meta_path), *sys.path_importer_cache}


@pytest.fixture
def unchanged() -> Iterator[Callable[[object], None]]:
    """Checks at the end that this process knows nothing more, and that what the test named is gone."""
    for backend in ("predictor", "python"):
        importlib.import_module(f"triglot.backends.{backend}")
    before, objects = known(), []

    def watch(thing: object) -> None:
        objects.append(weakref.ref(thing))

    # Errors that are logged keep what they went through.
    logging.disable(logging.CRITICAL)
    yield watch
    logging.disable(logging.NOTSET)
    assert known() - before == set()
    assert objects
    assert [thing() for thing in objects if thing() is not None] == []


# --- the python backend ---


@pytest.mark.parametrize("text", [PLAIN, CACHED, NAMED, CLOSES, FAILS_TO_CLOSE])
def test_versions_of_a_python_model(tmp_path: Path, unchanged: Callable[[object], None], text: str) -> None:
    for version in range(VERSIONS):
        model = backends.load("python", write(tmp_path / str(version), text))
        assert model.infer({}) == 3
        module = sys.modules[type(model).__module__]
        for thing in (model, type(model), module, sys.modules[f"{module.__name__}.helper"]):
            unchanged(thing)
        with suppress(OSError):
            model.close()


def test_python_model_without_close(tmp_path: Path, unchanged: Callable[[object], None]) -> None:
    model = backends.load("python", write(tmp_path, PLAIN))
    unchanged(model)
    unchanged(sys.modules[type(model).__module__])


@pytest.mark.parametrize(
    "text",
    [
        f"{HEAD}1 / 0\n",
        f"{HEAD}from . import no_such_module\n",
        HEAD,
        f"{PLAIN}\n    def __init__(self):\n        1 / 0\n",
        f"{PLAIN}\n    def load(self, folder):\n        raise SystemExit\n",
        f"{HEAD}def f(:\n",
    ],
)
def test_a_python_model_that_does_not_load(tmp_path: Path, unchanged: Callable[[object], None], text: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        backends.load("python", write(tmp_path, text))
    unchanged(caught.value)
    del caught


def test_only_the_model_itself_forgets(tmp_path: Path, unchanged: Callable[[object], None]) -> None:
    """A further instance of its class may come and go before."""
    text = f"{PLAIN}\n    def load(self, folder):\n        Mine().close()\n        from . import late\n"
    model = backends.load("python", write(tmp_path, text))
    unchanged(model)
    assert f"{type(model).__module__}.late" in sys.modules
    model.close()
    assert type(model).__module__ not in sys.modules
    model.close()


RUNS_ON = f"""{HEAD}import threading
{CLASS}
    def load(self, folder):
        self.closed, self.found = threading.Event(), []
        self.thread = threading.Thread(target=self.run)
        self.thread.start()

    def run(self):
        self.closed.wait({SECONDS})
        self.found.append(helper.VALUE + inner.VALUE)
        try:
            from . import late
        except ModuleNotFoundError as error:
            self.found.append(error.name)
"""


def test_code_that_runs_on_after_the_end(tmp_path: Path, unchanged: Callable[[object], None]) -> None:
    """It has what it has imported, and learns that there is no more."""
    model: Any = backends.load("python", write(tmp_path, RUNS_ON))
    unchanged(model)
    model.close()
    model.closed.set()
    model.thread.join(SECONDS)
    assert model.found == [3, type(model).__module__]


async def test_a_server_of_a_python_model(tmp_path: Path) -> None:
    def own() -> dict[str, ModuleType]:
        return {name: module for name, module in sys.modules.items() if str(tmp_path) in str(module)}

    write(tmp_path / "m" / "1", CLOSES)
    async with testing.serve(tmp_path):
        held = [weakref.ref(module) for module in own().values()]
        assert len(held) >= 3
    assert own() == {}
    collect()
    assert [module() for module in held] == [None] * len(held)


# --- the predictor backend ---

PREDICTOR = """
import centering

class Predictor:
    @classmethod
    def from_path(cls, model_dir):
        return cls()

    def predict(self, instances):
        self.last = centering.Centerer()
        return instances
"""


def write_predictor(folder: Path) -> Path:
    """One whose modules are in a package."""
    folder.mkdir()
    with tarfile.open(folder / "code-0.1.tar.gz", "w:gz") as archive:
        for name, text in {"predictor.py": PREDICTOR, "centering.py": "class Centerer: ..."}.items():
            member = tarfile.TarInfo(f"code-0.1/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))
    file = folder / "predictor.toml"
    file.write_text('prediction_class = "predictor.Predictor"\npackages = ["code-0.1.tar.gz"]\n')
    return file


def test_versions_of_a_predictor(tmp_path: Path, unchanged: Callable[[object], None]) -> None:
    before = set(sys.modules)
    for version in range(VERSIONS):
        model = backends.load("predictor", write_predictor(tmp_path / str(version)))
        inputs = {"instances": object_array([b"1"], [1]), "parameters": object_array([b"{}"], [1])}
        assert json.loads(model.infer(inputs)["predictions"][0]) == [1]
        unchanged(model)
        of_it = [name for name in sys.modules.keys() - before if name.startswith(f"{ROOT}.")]
        assert sorted(name.split(".")[2:] for name in of_it) == [[], ["centering"], ["predictor"]]
        for name in of_it:
            unchanged(sys.modules[name])
        model.close()


# --- the sklearn backend ---


@pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="scikit-learn is not installed")
def test_versions_of_an_estimator(tmp_path: Path) -> None:
    linear_model = importlib.import_module("sklearn.linear_model")
    file = tmp_path / "model.pkl"
    file.write_bytes(pickle.dumps(linear_model.LinearRegression().fit([[1.0], [2.0]], [1.0, 2.0])))
    backends.load("sklearn", file).close()
    before = known()  # scikit-learn has imported whatever it needs.
    estimators = []
    for _ in range(VERSIONS):
        model: Any = backends.load("sklearn", file)
        estimators.append(weakref.ref(model._methods["predict"].__self__))
        model.close()
    del model
    assert known() - before == set()
    assert [estimator() for estimator in estimators] == [None] * VERSIONS
