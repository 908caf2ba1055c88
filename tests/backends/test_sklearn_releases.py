"""Files that another release of a library wrote: what the errors and warnings of their models say."""

# ruff: noqa: E402 — without the libraries there is nothing to import.

from __future__ import annotations

import bz2
import gzip
import lzma
import os
import pickle
import re
import subprocess
import sys
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.process import FREE_PORTS, Triglot
from tests.protocol_clients.rest import Rest
from tests.test_parts import package_without
from triglot import backends
from triglot.backends.pickles import content_of
from triglot.core.errors import ModelLoadError

sklearn = pytest.importorskip("sklearn", reason="the ml environment has it")
xgboost = pytest.importorskip("xgboost", reason="the ml environment has it")

import joblib
from sklearn.ensemble import BaggingClassifier, ExtraTreesClassifier, RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.tree import DecisionTreeClassifier

from tests.backends.estimators import LABELS, WORDS, X
from triglot.backends.boosters.xgboost import check_release, written_by

OTHER = re.sub(r"\d", "0", sklearn.__version__)


def other_release(folder: Path, estimator: object, *, compress: int = 0) -> Path:
    """A file that says that another release of scikit-learn pickled it."""
    pickled = pickle.dumps(estimator).replace(sklearn.__version__.encode(), OTHER.encode())
    file = folder / "model.joblib"
    file.write_bytes(zlib.compress(pickled, compress) if compress else pickled)
    return file


def without(name: str, estimator: object) -> object:
    delattr(estimator, name)
    return estimator


@pytest.mark.parametrize("compress", [0, 3])
def test_an_error_names_both_releases(tmp_path: Path, compress: int, caplog: pytest.LogCaptureFixture) -> None:
    estimator = make_pipeline(StandardScaler().fit(X), without("coef_", LogisticRegression().fit(X, LABELS)))
    file = other_release(tmp_path, estimator, compress=compress)
    with pytest.raises(ModelLoadError) as caught:
        backends.load("sklearn", file)
    assert str(caught.value).startswith(f"{file}: Pipeline accepts neither numbers nor")
    assert str(caught.value).endswith(
        f"; the file was pickled with scikit-learn {OTHER}, and {sklearn.__version__} is installed; "
        f"run: pip install scikit-learn=={OTHER}"
    )
    assert f"from version {OTHER} when using version {sklearn.__version__}" in caplog.text


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"csklearn._gone\nLost\n", "the pickled object needs the module sklearn._gone, which is not installed"),
        (b"csklearn.base\nLost\n", "AttributeError: "),
    ],
)
def test_an_object_that_the_release_lost(tmp_path: Path, name: bytes, text: str) -> None:
    """scikit-learn itself warns only of objects that it could restore."""
    file = other_release(tmp_path, LogisticRegression().fit(X, LABELS))
    file.write_bytes(name + file.read_bytes())
    with pytest.raises(ModelLoadError) as caught:
        backends.load("sklearn", file)
    assert text in str(caught.value)
    assert f"scikit-learn {OTHER}, and {sklearn.__version__} is installed" in str(caught.value)


def test_an_error_of_the_installed_release_names_no_other(tmp_path: Path) -> None:
    estimator = without("coef_", LogisticRegression().fit(X, LABELS))
    joblib.dump(estimator, tmp_path / "model.joblib")
    with pytest.raises(ModelLoadError) as caught:
        backends.load("sklearn", tmp_path / "model.joblib")
    assert "pip install" not in str(caught.value)


@pytest.mark.parametrize("compress", [bytes, zlib.compress, gzip.compress, bz2.compress, lzma.compress])
def test_the_content_of_a_file(tmp_path: Path, compress: Callable[[bytes], bytes]) -> None:
    (tmp_path / "file").write_bytes(compress(b"content" * 9))
    assert content_of(tmp_path / "file") == b"content" * 9
    (tmp_path / "half").write_bytes(compress(b"content" * 9)[:12])
    assert content_of(tmp_path / "half") == compress(b"content" * 9)[:12]


# --- trees that count ---


def with_counts(estimator: object) -> object:
    """The estimator with counts in its trees, as scikit-learn before 1.4 has them."""
    for tree in [estimator, *getattr(estimator, "estimators_", ())]:
        if hasattr(tree, "tree_"):
            tree.tree_.value[:] *= tree.tree_.weighted_n_node_samples[:, np.newaxis, np.newaxis]
    return estimator


@pytest.mark.parametrize(
    "estimator",
    [
        RandomForestClassifier(3),
        ExtraTreesClassifier(3),
        DecisionTreeClassifier(),
        BaggingClassifier(DecisionTreeClassifier(), 3),
    ],
    ids=lambda estimator: type(estimator).__name__,
)
@pytest.mark.parametrize("labels", [LABELS, WORDS])
def test_trees_that_count_warn(tmp_path: Path, estimator: object, labels: object) -> None:
    fitted = estimator.fit(X, labels)  # type: ignore[attr-defined]  # It has no types.
    joblib.dump(fitted, tmp_path / "model.joblib")
    assert not backends.load("sklearn", tmp_path / "model.joblib").warnings
    model = backends.load("sklearn", other_release(tmp_path, with_counts(fitted)))
    assert model.warnings == [
        "predict_proba returns counts, not probabilities, and labels may be wrong: the trees were pickled with "
        f"scikit-learn {OTHER}, and scikit-learn {sklearn.__version__} expects fractions in them; train the model "
        f"again, or run: pip install scikit-learn=={OTHER}"
    ]


def test_clients_get_the_release_error(tmp_path: Path) -> None:
    """RepositoryIndex has the reasons of models that failed to load and that warn; calls get the former."""
    for name, estimator in (
        ("counting", with_counts(DecisionTreeClassifier().fit(X, LABELS))),
        ("broken", without("coef_", LogisticRegression().fit(X, LABELS))),
    ):
        (tmp_path / name).mkdir()
        other_release(tmp_path / name, estimator)
    with Triglot(tmp_path, *FREE_PORTS, "--drain-delay", "0", "--no-exit-on-load-error") as server:
        rest = Rest(server.ports()[1])
        _, index = rest.post("/v2/repository/index", {})
        models = {model["name"]: (model["state"], model["reason"]) for model in index}
        assert models["counting"][0] == "READY"
        assert f"were pickled with scikit-learn {OTHER}" in models["counting"][1]
        assert models["broken"][0] == "UNAVAILABLE"
        why = f"the file was pickled with scikit-learn {OTHER}, and {sklearn.__version__} is installed"
        assert why in models["broken"][1]
        inputs = [{"name": "x", "datatype": "FP64", "shape": [1, 3], "data": [0, 0, 0]}]
        for path, body in (
            ("/v2/models/broken/infer", {"inputs": inputs}),
            ("/v1/models/broken:predict", {"instances": [[0, 0, 0]]}),
        ):
            _, answer = rest.post(path, body)
            assert why in answer["error"]
        server.stop()


# --- XGBoost ---

JSON_END = b'}},"version":[%d,%d,%d]}'
UBJSON_END = b"}}L\0\0\0\0\0\0\0\x07version[#L\0\0\0\0\0\0\0\x03i%ci%ci%c}"
REFUSED = [(3, 1, 0), (3, 2, 0), (4, 0, 1), (3, 10, 0)]
TAKEN = [(1, 7, 6), (2, 0, 3), (2, 1, 4), (3, 0, 5)]


@pytest.mark.parametrize("end", [JSON_END, UBJSON_END], ids=["json", "ubjson"])
@pytest.mark.parametrize("written", REFUSED)
def test_older_releases_refuse_files_whose_intercept_is_a_vector(
    end: bytes, written: tuple[int, ...], tmp_path: Path
) -> None:
    for installed in ("2.0.3", "2.1.4", "3.0.5"):
        with pytest.raises(ModelLoadError) as caught:
            check_release(tmp_path, b"{..." + end % written, installed)
        release = ".".join(map(str, written))
        assert str(caught.value) == (
            f"{tmp_path}: it was written by xgboost {release}, and xgboost {installed} would return wrong values "
            f"for it; run: pip install 'xgboost>={release}'"
        )
    check_release(tmp_path, b"{..." + end % written, "3.1.0")


@pytest.mark.parametrize("end", [JSON_END, UBJSON_END], ids=["json", "ubjson"])
@pytest.mark.parametrize("written", TAKEN)
def test_files_that_older_releases_read(end: bytes, written: tuple[int, ...], tmp_path: Path) -> None:
    assert written_by(b"{..." + end % written) == written
    for installed in ("2.0.3", "3.0.5", "3.2.0"):
        check_release(tmp_path, b"{..." + end % written, installed)


@pytest.mark.parametrize("name", ["model.json", "model.ubj", "model.pkl", "model.joblib", "compressed.joblib"])
def test_a_files_release_is_found(tmp_path: Path, name: str) -> None:
    estimator = xgboost.XGBRegressor(n_estimators=2, n_jobs=1).fit(X, LABELS)
    file = tmp_path / name
    if name.endswith(".pkl"):
        file.write_bytes(pickle.dumps(estimator))
    elif name.endswith(".joblib"):
        joblib.dump(estimator, file, compress=3 if name.startswith("compressed") else 0)
    else:
        estimator.save_model(file)
    assert ".".join(map(str, written_by(content_of(file)))) == xgboost.__version__


@pytest.mark.parametrize("content", [b"", b"binf", b'{"version":"[3,2,0]"}', b'{"version":[3,2]}'])
def test_a_file_without_a_release_is_left_to_xgboost(content: bytes, tmp_path: Path) -> None:
    assert written_by(content) == ()
    check_release(tmp_path, content, "2.0.3")


def test_pickled_models_need_no_backend_of_xgboost(tmp_path: Path) -> None:
    """Nor does an estimator of scikit-learn where a model has imported xgboost."""
    regressor = xgboost.XGBRegressor(n_estimators=2, n_jobs=1).fit(X, LABELS)
    files = []
    for number, found in enumerate((regressor, regressor.get_booster(), LogisticRegression().fit(X, LABELS))):
        files.append(tmp_path / f"{number}.joblib")
        joblib.dump(found, files[-1])
    code = (
        "import sys, xgboost; from pathlib import Path; from triglot import backends\n"
        "print([backends.load('sklearn', Path(file)).platform for file in sys.argv[1:]])"
    )
    environment = os.environ | package_without("backends/xgboost", tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", code, *files],
        env=environment,
        check=True,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout == "['xgboost', 'xgboost', 'sklearn']\n"
