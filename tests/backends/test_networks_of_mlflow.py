"""Networks of PyTorch and Keras that MLflow saves, in a real server, held against what MLflow's loader answers."""

from __future__ import annotations

import importlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
pytest.importorskip("mlflow", reason="the torch and tensorflow environments have it")

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # Of MLflow's own type hints, when it is imported.
    import mlflow.pyfunc

import pandas as pd
from mlflow.models import infer_signature
from mlflow.pyfunc import scoring_server

from tests.process import FREE_PORTS, SECONDS, Triglot
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.rest import Rest
from triglot.pb.kserve import inference_pb2 as pb

pytestmark = pytest.mark.filterwarnings("ignore")  # Of MLflow and the libraries, when they save and load.
ROWS = np.random.default_rng(1).random((4, 3)).astype("f4")
FRAME = pd.DataFrame(ROWS, columns=["a", "b", "c"])
Save = Callable[[Path], None]


def _torch(data: Any, **options: Any) -> Save:
    def save(path: Path) -> None:
        import mlflow.pytorch  # noqa: PLC0415 - the other environment lacks the library.
        import torch  # noqa: PLC0415 - as above.

        torch.manual_seed(1)
        network = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        signature = infer_signature(data, network(torch.from_numpy(ROWS)).detach().numpy())
        mlflow.pytorch.save_model(network, path, signature=signature, pip_requirements=[], **options)

    return save


def _keras(path: Path) -> None:
    import mlflow.tensorflow  # noqa: PLC0415 - the other environment lacks the library.

    keras: Any = importlib.import_module("keras")
    layers = [keras.Input((3,)), keras.layers.Dense(4, "relu"), keras.layers.Dense(2)]
    network = keras.Sequential(layers)
    signature = infer_signature(ROWS, network.predict(ROWS, verbose=0))
    mlflow.tensorflow.save_model(network, path, signature=signature, pip_requirements=[])


def _module(path: Path) -> None:
    import mlflow.tensorflow  # noqa: PLC0415 - the other environment lacks the library.
    import tensorflow as tf  # noqa: PLC0415 - as above.

    class Twice(tf.Module):  # type: ignore[misc]
        @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32)])  # type: ignore[untyped-decorator]
        def __call__(self, x: Any) -> Any:
            return x * 2

    mlflow.tensorflow.save_model(Twice(), path, signature=infer_signature(ROWS, ROWS), pip_requirements=[])


OF_TORCH: Mapping[str, tuple[Save, Any]] = {
    "exported": (_torch(ROWS, serialization_format="pt2", input_example=ROWS), ROWS),
    "pickled": (_torch(ROWS, serialization_format="pickle"), ROWS),
    "pickled_frame": (_torch(FRAME, serialization_format="pickle"), FRAME),
}
OF_TENSORFLOW: Mapping[str, tuple[Save, Any]] = {"keras": (_keras, ROWS), "module": (_module, ROWS)}
SAVED = OF_TORCH if find_spec("torch") else OF_TENSORFLOW


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for name, (save, _) in SAVED.items():
        save(folder / name)
    return folder


@pytest.fixture(scope="module")
def ports(folder: Path) -> Iterator[tuple[int, int]]:
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0") as server:
        yield server.ports()
        server.stop()
        log = server.stderr.text()
    assert "Traceback" not in log
    assert "MLflow is to load the model" not in log


def expected(folder: Path, name: str) -> Any:
    return np.asarray(mlflow.pyfunc.load_model(str(folder / name)).predict(SAVED[name][1]))


def columns(data: Any) -> dict[str, Any]:
    return {"any": data} if isinstance(data, np.ndarray) else {name: data[name].to_numpy() for name in data}


@pytest.mark.parametrize("name", SAVED)
def test_v2_over_rest(folder: Path, ports: tuple[int, int], name: str) -> None:
    inputs = [
        {"name": tensor, "datatype": "FP32", "shape": array.shape, "data": array.ravel().tolist()}
        for tensor, array in columns(SAVED[name][1]).items()
    ]
    status, answer = Rest(ports[1]).post(f"/v2/models/{name}/infer", {"inputs": inputs})
    assert status == 200, answer
    arrays = [np.array(output["data"], "f4").reshape(output["shape"]) for output in answer["outputs"]]
    np.testing.assert_array_equal(arrays[0] if len(arrays) == 1 else np.stack(arrays, 1), expected(folder, name))


@pytest.mark.parametrize("name", SAVED)
def test_v2_over_grpc(folder: Path, ports: tuple[int, int], name: str) -> None:
    request = pb.ModelInferRequest(model_name=name)
    for tensor, array in columns(SAVED[name][1]).items():
        request.inputs.add(name=tensor, datatype="FP32", shape=array.shape)
        request.raw_input_contents.append(array.tobytes())
    with grpc_channel(ports[0]) as channel:
        reply = rpc(channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS)
    arrays = [
        np.frombuffer(raw, "f4").reshape(tuple(output.shape))
        for output, raw in zip(reply.outputs, reply.raw_output_contents, strict=True)
    ]
    np.testing.assert_array_equal(arrays[0] if len(arrays) == 1 else np.stack(arrays, 1), expected(folder, name))


@pytest.mark.parametrize("name", SAVED)
def test_invocations(folder: Path, ports: tuple[int, int], name: str) -> None:
    data = SAVED[name][1]
    is_array = isinstance(data, np.ndarray)
    body = {"instances": data.tolist()} if is_array else {"dataframe_split": data.to_dict("split")}
    model = mlflow.pyfunc.load_model(str(folder / name))
    own = scoring_server.invocations(
        json.dumps(body), "application/json", model, model.metadata.get_input_schema()
    )
    status, answer = Rest(ports[1]).post(f"/invocations/{name}", body)
    assert (status, answer) == (own.status, json.loads(own.response))
