"""Models in KServe's sample formats, as its storage initializer lays them out, and what they answer."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from tests import environments, saved_models
from tests.kept_files import kept_files
from tests.process import clean_environment

TESTS = Path(__file__).resolve().parents[1]
IRIS = [[5.1, 3.5, 1.4, 0.2], [6.7, 3.0, 5.2, 2.3]]
FLOWERS = "from sklearn.datasets import load_iris\nx, y = load_iris(return_X_y=True)\n"
SKLEARN = FLOWERS + "from sklearn.svm import SVC\nmodel = SVC(gamma=0.1).fit(x, y)\n"
XGBOOST = FLOWERS + (
    "import xgboost\nmodel = xgboost.train({'objective': 'multi:softmax', 'num_class': 3}, "
    "xgboost.DMatrix(x, y), 10)\n"
)
LIGHTGBM = FLOWERS + (
    "import lightgbm\nkept = y != 1\n"
    "parameters = {'learning_rate': 1, 'num_leaves': 2, 'min_data_in_bin': 1, 'verbose': -1}\n"
    "model = lightgbm.train(parameters, lightgbm.Dataset(x[kept], y[kept]), 1)\n"
)
CATBOOST = FLOWERS + (
    "import catboost\n"
    "model = catboost.CatBoostClassifier(iterations=5, verbose=0, allow_writing_files=False).fit(x, y)\n"
)
MLFLOW = SKLEARN + (
    "import os, mlflow.sklearn\nfrom mlflow.models import infer_signature\n"
    "mlflow.sklearn.save_model(model, 'm', signature=infer_signature(x, model.predict(x)))\n"
    "for name in os.listdir('m'):\n    os.rename(f'm/{name}', name)\nos.rmdir('m')\n"
)
TORCH = (
    "import sys, torch\n\nclass Model(torch.nn.Module):\n    def forward(self, x):\n        return x * 0.5 + 2\n\n"
)


@dataclass(frozen=True)
class Format:
    """`write` fills the folder that is mounted at /mnt/models; the server runs in `environment`.

    `name`: of the model that answers, where that is not the InferenceService's.
    """

    environment: str
    write: Callable[[Path], object]
    inputs: list[dict[str, Any]]
    outputs: dict[str, list[float]]
    name: str = ""


def _by(environment: str, code: str) -> Callable[[Path], object]:
    """Writes by code that runs in an environment, in the folder."""

    def run(folder: Path) -> None:
        command = [str(environments.python(environment)), "-W", "ignore", "-c", code]
        done = subprocess.run(
            command, cwd=folder, env=clean_environment(), capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    def write(folder: Path) -> None:
        prefix = environments.python(environment).parents[1]
        shutil.copytree(kept_files(prefix, "formats", code, run), folder, dirs_exist_ok=True)

    return write


def _flat(name: str, datatype: str, rows: list[list[float]]) -> list[dict[str, Any]]:
    return [{"name": name, "datatype": datatype, "shape": [len(rows), len(rows[0])], "data": [*chain(*rows)]}]


def _saved_model(name: str, at: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        written = saved_models.write(folder / "written", name)
        (version,) = (written / name).iterdir()
        shutil.copytree(version, folder / at, dirs_exist_ok=True)
        shutil.rmtree(written)

    return write


def _copied(source: str, at: str) -> Callable[[Path], object]:
    def write(folder: Path) -> None:
        target = folder / at
        target.parent.mkdir(parents=True, exist_ok=True)
        if (TESTS / source).is_dir():
            shutil.copytree(TESTS / source, target)
        else:
            shutil.copy(TESTS / source, target)

    return write


HOUSES = (
    "import pandas as pd\nfrom sklearn.compose import make_column_transformer\n"
    "from sklearn.linear_model import LinearRegression\nfrom sklearn.pipeline import make_pipeline\n"
    "from sklearn.preprocessing import OneHotEncoder\n"
    "x = pd.DataFrame({'MSZoning': ['RL', 'RM'] * 2, 'LotArea': [8450, 9600, 11250, 9550]})\n"
    "encode = make_column_transformer((OneHotEncoder(), ['MSZoning']), remainder='passthrough')\n"
    "model = make_pipeline(encode, LinearRegression()).fit(x, x.LotArea * 2.0)\n"
)
HOUSE = [
    {"name": "MSZoning", "datatype": "BYTES", "shape": [1], "data": ["RL"]},
    {"name": "LotArea", "datatype": "INT32", "shape": [1], "data": [8450]},
]
"""As in KServe's sample sklearn_mixed_v2.json: columns of text and of integers, with the content type pd."""
MLFLOW_HOUSES = HOUSES + (
    "import os, mlflow.sklearn\nfrom mlflow.models import infer_signature\n"
    "x['LotArea'] = x.LotArea.astype('int32')\n"
    "mlflow.sklearn.save_model(model, 'm', signature=infer_signature(x, model.predict(x)))\n"
    "for name in os.listdir('m'):\n    os.rename(f'm/{name}', name)\nos.rmdir('m')\n"
)
_IRIS_32, _IRIS_64 = _flat("x", "FP32", IRIS), _flat("x", "FP64", IRIS)
_X = _flat("x", "FP32", [[1.0], [2.0], [5.0]])
_X_LIST: list[dict[str, Any]] = [{"name": "x", "datatype": "FP32", "shape": [3], "data": [1, 2, 5]}]
_ROW = [float(at) for at in range(16)]
_ROWS = _flat("INPUT0", "FP32", [_ROW]) + _flat("INPUT1", "FP32", [_ROW])
_FOUR: list[dict[str, Any]] = [
    {"name": f"INPUT{at}", "datatype": "FP32", "shape": [4], "data": [1, 2, 3, 4]} for at in (0, 1)
]
_SUMS = {"OUTPUT0": [2 * value for value in _ROW], "OUTPUT1": [0.0] * 16}
_PREDICTED = {"predict": [0.0, 2.0]}
# XGBoost's other files, such as model.json, are loaded in tests/backends.
FORMATS = {
    "sklearn-joblib": Format(
        "ml", _by("ml", f"{SKLEARN}import joblib; joblib.dump(model, 'model.joblib')"), _IRIS_64, _PREDICTED
    ),
    # One file, as where storageUri names it.
    "sklearn-pickle": Format(
        "ml",
        _by("ml", f"{SKLEARN}import pickle; pickle.dump(model, open('iris.pkl', 'wb'))"),
        _IRIS_64,
        _PREDICTED,
    ),
    "xgboost-bst": Format("ml", _by("ml", f"{XGBOOST}model.save_model('model.bst')"), _IRIS_32, _PREDICTED),
    "lightgbm-bst": Format("ml", _by("ml", f"{LIGHTGBM}model.save_model('model.bst')"), _IRIS_64, _PREDICTED),
    "catboost": Format("ml", _by("ml", f"{CATBOOST}model.save_model('model.cbm')"), _IRIS_32, _PREDICTED),
    "mlflow": Format("mlflow", _by("mlflow", MLFLOW), _flat("input-0", "FP64", IRIS), {"output-1": [0.0, 2.0]}),
    "onnx": Format("dev", _copied("models_triton/auto_onnx/1/model.onnx", "model.onnx"), _ROWS, _SUMS),
    "tensorflow-1": Format("tensorflow", _saved_model("half_plus_two", "0001"), _X, {"y": [2.5, 3.0, 4.5]}),
    "tensorflow-2": Format("tensorflow", _saved_model("tf2_checked", "."), _X_LIST, {"y": [1.0, 2**0.5, 5**0.5]}),
    "pytorch": Format(
        "torch",
        _by("torch", f"{TORCH}torch.jit.trace(Model(), torch.zeros(3)).save('model.pt')"),
        _X_LIST,
        {"OUTPUT__0": [2.5, 3.0, 4.5]},
    ),
    # A repository: its models keep their names.
    "triton": Format(
        "dev",
        _copied("models_triton_python/add_sub", "add_sub"),
        _FOUR,
        {"OUTPUT0": [2.0, 4.0, 6.0, 8.0], "OUTPUT1": [0.0] * 4},
        name="add_sub",
    ),
}

_FIRST = {"name": "input-0", "datatype": "FP32", "shape": [2, 4], "data": [*chain(*IRIS)]}
IN_PLACE = {
    "sklearn": (
        "mlserver_sklearn.SKLearnModel",
        Format(
            "ml",
            _by("ml", f"{HOUSES}import joblib; joblib.dump(model, 'model.joblib')"),
            HOUSE,
            {"predict": [16900.0]},
        ),
    ),
    "xgboost": (
        "mlserver_xgboost.XGBoostModel",
        Format("ml", _by("ml", f"{XGBOOST}model.save_model('model.bst')"), [_FIRST], _PREDICTED),
    ),
    "lightgbm": (
        "mlserver_lightgbm.LightGBMModel",
        Format("ml", _by("ml", f"{LIGHTGBM}model.save_model('model.bst')"), [_FIRST], _PREDICTED),
    ),
    "catboost": (
        "mlserver_sklearn.SKLearnModel",
        Format("ml", _by("ml", f"{CATBOOST}model.save_model('model.cbm')"), [_FIRST], _PREDICTED),
    ),
    "mlflow": (
        "mlserver_mlflow.MLflowRuntime",
        Format("mlflow", _by("mlflow", MLFLOW_HOUSES), HOUSE, {"output-1": [16900.0]}),
    ),
}
"""By format, the class that KServe names in a label, and what an InferenceService of kserve-mlserver has."""
