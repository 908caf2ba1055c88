"""A server where the system's calls that macOS lacks are missing, in all of its processes."""

from __future__ import annotations

import os
from pathlib import Path

import grpc
import pytest

from tests.process import FREE_PORTS, IDENTITY, Triglot, write_model
from tests.protocol_clients.channel import SERVICE
from tests.protocol_clients.rest import Rest
from triglot.pb.kserve import inference_pb2 as pb

MISSING = """
import builtins, mmap, os
names = "eventfd memfd_create sched_yield sched_getaffinity sched_setaffinity posix_fallocate pidfd_open"
for name in names.split():
    delattr(os, name)
del mmap.MADV_REMOVE

def opened(file, *arguments, open=builtins.open, **options):
    if str(file).startswith("/proc/"):
        raise FileNotFoundError(2, "No such file or directory", str(file))
    return open(file, *arguments, **options)

builtins.open = opened
"""


@pytest.mark.parametrize("workers", ["1", "2"])
@pytest.mark.parametrize("execution", ["thread", "process"])
def test_calls_and_large_tensors(tmp_path: Path, execution: str, workers: str) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(MISSING)
    checked = "import os\nassert not hasattr(os, 'eventfd')\n"
    model = f"{checked}{IDENTITY.replace('[1]', '[-1]')}    execution = {execution!r}\n"
    write_model(tmp_path / "models" / "m", model)
    path = os.pathsep.join(filter(None, (str(site), os.environ.get("PYTHONPATH"))))
    options = (*FREE_PORTS, "--workers", workers)
    with Triglot(tmp_path / "models", *options, environment={"PYTHONPATH": path}) as server:
        grpc_port, rest_port = server.ports()
        body = {"inputs": [{"name": "x", "datatype": "INT32", "shape": [2], "data": [7, 8]}]}
        status, answer = Rest(rest_port).post("/v2/models/m/infer", body)
        assert (status, answer["outputs"][0]["data"]) == (200, [7, 8])
        status, answer = Rest(rest_port).post("/v1/models/m:predict", {"inputs": {"x": [9]}})
        assert (status, answer) == (200, {"outputs": [9]})
        content = bytes(range(256)) * 4096
        tensor = pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[len(content) // 4])
        request = pb.ModelInferRequest(model_name="m", inputs=[tensor], raw_input_contents=[content])
        with grpc.insecure_channel(f"127.0.0.1:{grpc_port}") as channel:
            infer = channel.unary_unary(f"{SERVICE}ModelInfer", None, pb.ModelInferResponse.FromString)
            assert infer(request.SerializeToString(), timeout=30).raw_output_contents == [content]
