"""Models in MLflow's format in a real server, held against what MLflow's own loader answers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

pytest.importorskip("mlflow", reason="the mlflow environment has it")

import pandas as pd
from mlflow_models import SAVED, predict, save

from process import FREE_PORTS, SECONDS, Triglot
from protocol_clients.channel import grpc_channel, rpc
from protocol_clients.rest import Rest
from triglot.core.tensor import datatype_of, pack_bytes, unpack_bytes
from triglot.pb.kserve import inference_pb2 as pb

pytestmark = pytest.mark.filterwarnings("ignore")  # Of MLflow and the libraries, when they save and load.


@dataclass
class Served:
    """The server's two ports, and the repository."""

    rest: Rest
    channel: grpc.Channel
    folder: Path


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    save(folder)
    with Triglot(folder, *FREE_PORTS, "--drain-delay", "0") as server:
        grpc_port, rest_port = server.ports()
        with grpc_channel(grpc_port) as channel:
            yield Served(Rest(rest_port), channel, folder)
        server.stop()
        assert "Traceback" not in server.stderr.text()


def expected(served: Served, name: str) -> Any:
    """What MLflow answers."""
    return predict(served.folder / name, SAVED[name][1])


def arrays(name: str) -> dict[str, Any]:
    """The data to score as tensors: a column each of a frame, text as objects."""
    data = SAVED[name][1]
    if isinstance(data, np.ndarray):
        return {"any": data}
    if isinstance(data, dict):
        return data
    return {column: _column(data[column]) for column in data}


def _column(series: Any) -> Any:
    values = [
        json.dumps(value)
        if isinstance(value, list)
        else value.isoformat()
        if hasattr(value, "isoformat")
        else value
        for value in series.tolist()
    ]
    if all(isinstance(value, str | bytes) for value in values):
        return np.array([value if isinstance(value, bytes) else value.encode() for value in values], object)
    return series.to_numpy()


def assert_equal(outputs: Mapping[str, Any], wanted: Any) -> None:
    """Whether V2's outputs hold what MLflow answers: an array, a frame, a dict, or other JSON."""
    if isinstance(wanted, pd.DataFrame | dict):
        assert list(outputs) == list(wanted)
        for name, array in outputs.items():
            _assert_array(array, np.asarray(wanted[name]))
    elif isinstance(wanted, list):
        (array,) = outputs.values()
        assert json.loads(array.item()) == wanted
    else:
        (array,) = outputs.values()
        _assert_array(array, np.asarray(wanted))


def _assert_array(array: Any, wanted: Any) -> None:
    if wanted.dtype.kind == "M":
        wanted = np.array([pd.Timestamp(value).isoformat() for value in wanted])
    if wanted.dtype.kind in "OUST":
        array = np.array([value.decode() if isinstance(value, bytes) else value for value in array.ravel()])
        array = array.reshape(wanted.shape)
    else:
        assert array.dtype == wanted.dtype
    np.testing.assert_array_equal(array, wanted)


BY_REST = sorted(SAVED.keys() - {"python_kinds"})
"""Without the one whose binary column has bytes that are not UTF-8, which have no form in V2's JSON."""


@pytest.mark.parametrize("name", BY_REST)
def test_v2_over_rest(served: Served, name: str) -> None:
    inputs = [
        {
            "name": tensor,
            "datatype": datatype_of(array),
            "shape": array.shape,
            "data": [value.decode() if isinstance(value, bytes) else value for value in array.ravel().tolist()],
        }
        for tensor, array in arrays(name).items()
    ]
    status, answer = served.rest.post(f"/v2/models/{name}/infer", {"inputs": inputs})
    assert status == 200, answer
    outputs = {
        output["name"]: np.array(output["data"], _dtype(output["datatype"])).reshape(output["shape"])
        for output in answer["outputs"]
    }
    assert_equal(outputs, expected(served, name))


def _dtype(datatype: str) -> Any:
    return object if datatype == "BYTES" else datatype.lower().replace("fp", "float")


@pytest.mark.parametrize("name", SAVED)
def test_v2_over_grpc(served: Served, name: str) -> None:
    request = pb.ModelInferRequest(model_name=name)
    for tensor, array in arrays(name).items():
        request.inputs.add(name=tensor, datatype=datatype_of(array), shape=array.shape)
        raw = pack_bytes(array.ravel().tolist()) if array.dtype.hasobject else array.tobytes()
        request.raw_input_contents.append(raw)
    reply = rpc(served.channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS)
    outputs = {}
    for output, raw in zip(reply.outputs, reply.raw_output_contents, strict=True):
        count = int(np.prod(output.shape))
        data = (
            unpack_bytes(raw, count) if output.datatype == "BYTES" else np.frombuffer(raw, _dtype(output.datatype))
        )
        outputs[output.name] = np.array(data, _dtype(output.datatype)).reshape(tuple(output.shape))
    assert_equal(outputs, expected(served, name))
