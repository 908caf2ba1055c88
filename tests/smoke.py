"""Serves models with the installed Triglot, and calls each over each protocol: `python -I tests/smoke.py`.

Needs only what `pip install triglot` installs. The servers turn warnings into errors, and log none: those of one
process run on the standard library's event loop, whose code differs from Python to Python, those of two on uvloop.
Prints the row of the table in docs/compatibility.md.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import grpc
import numpy as np

import triglot
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import predict_pb2, tensor_pb2

SECONDS = 60
VALUES, EXPECTED = [1.0, 2.0, 5.0], [2.5, 3.0, 4.5]
LISTENING = re.compile(r"gRPC on 127\.0\.0\.1:(\d+) and REST on 127\.0\.0\.1:(\d+)")

NATIVE = """
import triglot

class HalfPlusTwo(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    execution = "{execution}"

    def infer(self, inputs):
        return {{"y": inputs["x"] * 0.5 + 2}}
"""
TRITON = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        x = [pb_utils.get_input_tensor_by_name(request, "x").as_numpy() for request in requests]
        y = [pb_utils.Tensor("y", value * np.float32(0.5) + np.float32(2)) for value in x]
        return [pb_utils.InferenceResponse(output_tensors=[tensor]) for tensor in y]
"""
TRITON_CONFIG = """
backend: "python"
input { name: "x" data_type: TYPE_FP32 dims: [ -1 ] }
output { name: "y" data_type: TYPE_FP32 dims: [ -1 ] }
"""
FILES = {
    "thread/model.py": NATIVE.format(execution="thread"),
    "process/model.py": NATIVE.format(execution="process"),
    "triton_python/config.pbtxt": TRITON_CONFIG,
    "triton_python/1/model.py": TRITON,
}
MODELS = ("thread", "process", "triton_python")
SERVERS = (
    ("--event-loop", "asyncio", "--grpc-transport", "h2", "--http-transport", "h1"),
    ("--event-loop", "asyncio", "--grpc-transport", "aio", "--http-transport", "aiohttp"),
    ("--workers", "2"),
)
LIBRARIES = ("aiohttp", "grpcio", "numpy", "onnxruntime", "orjson", "protobuf", "uvloop")


def rpc(channel: grpc.Channel, method: str, request: Any, response: Any) -> Any:
    """Call a unary method; returns its response."""
    call = channel.unary_unary(
        method, request_serializer=type(request).SerializeToString, response_deserializer=response.FromString
    )
    return call(request, timeout=SECONDS)


def post(port: int, path: str, body: object) -> Any:
    """Post JSON; returns the JSON of the response. Raise `AssertionError` for any other status than 200."""
    connection = HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    try:
        connection.request("POST", path, json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        text = response.read()
        assert response.status == 200, text
        return json.loads(text)
    finally:
        connection.close()


def kserve_grpc(channel: grpc.Channel, model: str) -> list[float]:
    request = inference_pb2.ModelInferRequest(model_name=model)
    request.inputs.add(name="x", datatype="FP32", shape=[len(VALUES)])
    request.raw_input_contents.append(np.array(VALUES, "<f4").tobytes())
    method = "/inference.GRPCInferenceService/ModelInfer"
    response = rpc(channel, method, request, inference_pb2.ModelInferResponse)
    values: list[float] = np.frombuffer(response.raw_output_contents[0], "<f4").tolist()
    return values


def tfserving_grpc(channel: grpc.Channel, model: str) -> list[float]:
    request = predict_pb2.PredictRequest()
    request.model_spec.name = model
    tensor = request.inputs["x"]
    tensor.dtype = tensor_pb2.DT_FLOAT
    tensor.tensor_shape.dim.add(size=len(VALUES))
    tensor.float_val.extend(VALUES)
    method = "/tensorflow.serving.PredictionService/Predict"
    return list(rpc(channel, method, request, predict_pb2.PredictResponse).outputs["y"].float_val)


def grps_grpc(channel: grpc.Channel, model: str) -> list[float]:
    tensor = grps_pb2.GenericTensor(name="x", dtype=grps_pb2.DT_FLOAT32, shape=[len(VALUES)], flat_float32=VALUES)
    request = grps_pb2.GrpsMessage(model=model, gtensors=grps_pb2.GenericTensorData(tensors=[tensor]))
    response = rpc(channel, "/grps.protos.v1.GrpsService/Predict", request, grps_pb2.GrpsMessage)
    assert response.status.status == grps_pb2.Status.SUCCESS, response
    return list(response.gtensors.tensors[0].flat_float32)


def kserve_rest(port: int, model: str) -> Any:
    tensor = {"name": "x", "datatype": "FP32", "shape": [len(VALUES)], "data": VALUES}
    return post(port, f"/v2/models/{model}/infer", {"inputs": [tensor]})["outputs"][0]["data"]


def tfserving_rest(port: int, model: str) -> Any:
    return post(port, f"/v1/models/{model}:predict", {"inputs": VALUES})["outputs"]


def ai_platform(port: int, model: str) -> Any:
    return post(port, f"/v1/projects/some/models/{model}:predict", {"instances": VALUES})["predictions"]


def grps_rest(port: int, model: str) -> Any:
    tensor = {"name": "x", "dtype": "DT_FLOAT32", "shape": [len(VALUES)], "flat_float32": VALUES}
    message = {"model": model, "gtensors": {"tensors": [tensor]}}
    return post(port, "/grps/v1/infer/predict", message)["gtensors"]["tensors"][0]["flat_float32"]


OVER_GRPC: tuple[Callable[[grpc.Channel, str], list[float]], ...] = (kserve_grpc, tfserving_grpc, grps_grpc)
OVER_REST: tuple[Callable[[int, str], Any], ...] = (kserve_rest, tfserving_rest, ai_platform, grps_rest)


def check(found: object, call: Callable[..., object], model: str) -> None:
    """Compare a response. Raise `AssertionError`."""
    assert found == EXPECTED, f"{call.__name__}, model {model}: expected {EXPECTED}, got {found}"


def call_all(grpc_port: int, rest_port: int) -> int:
    """Call each model over each protocol; returns the number of calls."""
    with grpc.insecure_channel(f"127.0.0.1:{grpc_port}", [("grpc.enable_http_proxy", 0)]) as channel:
        for model in MODELS:
            for over_grpc in OVER_GRPC:
                check(over_grpc(channel, model), over_grpc, model)
            for over_rest in OVER_REST:
                check(over_rest(rest_port, model), over_rest, model)
    return len(MODELS) * (len(OVER_GRPC) + len(OVER_REST))


def read_log(log: Any, workers: int) -> tuple[str, str, str]:
    """Read until each worker serves; returns what was read, and the ports of gRPC and REST.

    Raise `AssertionError` if the server ends first.
    """
    read, found = "", []
    for line in log:
        read += line
        found += LISTENING.findall(line)
        if len(found) == workers:
            return read, *found[0]
    raise AssertionError(f"the server ended:\n{read}")


def serve_and_call(folder: Path, options: tuple[str, ...]) -> int:
    """Start a server, call its models and stop it; returns the number of calls. Raise `AssertionError`."""
    ports = ("--grpc-port", "0", "--rest-port", "0", "--drain-delay", "0")
    command = [sys.executable, "-I", "-W", "error", "-m", "triglot", "serve", str(folder), *ports, *options]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as server:
        try:
            workers = int(options[-1]) if "--workers" in options else 1
            log, grpc_port, rest_port = read_log(server.stderr, workers)
            assert re.search(r"process +1 +python .* 1 process ", log), log
            calls = call_all(int(grpc_port), int(rest_port))
            server.send_signal(signal.SIGTERM)
            _, rest_of_log = server.communicate(timeout=SECONDS)
            assert server.returncode == 0, log + rest_of_log
            assert "Traceback" not in rest_of_log, rest_of_log
            return calls
        finally:
            server.kill()


def row(calls: int) -> str:
    """Return the row of the table."""
    installed = {library.metadata["Name"]: library.version for library in importlib.metadata.distributions()}
    versions = [f"{name} {installed[name]}" for name in LIBRARIES if name in installed]
    python = f"{platform.python_version()}, {' '.join(platform.libc_ver())}, {platform.machine()}"
    return f"| {python} | {', '.join(versions)} | {calls} calls succeeded |"


def main() -> None:
    """Check the installation."""
    assert triglot.__file__.startswith(sys.prefix), f"{triglot.__file__} is not of {sys.prefix}"
    with tempfile.TemporaryDirectory() as name:
        for path, text in FILES.items():
            file = Path(name, path)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        print(row(sum(serve_and_call(Path(name), options) for options in SERVERS)))


if __name__ == "__main__":
    main()
