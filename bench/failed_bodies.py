"""Measures whether failed requests leave their bodies in the server's memory when the garbage collector is off.

From the repository's root: `python -m bench.failed_bodies --help`. Each protocol and transport has a server of its
own, which collects no garbage and is sent large requests that fail. Its resident size is read before them, after a
few of them have warmed it up, and at the end when it has been idle.
"""

import argparse
import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import grpc.aio

from bench import report, servers
from bench.other_results import WRONG
from bench.tally import BenchError
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import predict_pb2, tensor_pb2

REQUESTS = 100
MIB = 1024 * 1024
SIZE = 64
"""Size of a request in MiB."""
ALLOWED = 64 * MIB
REST_SECONDS = 40
"""Seconds within which a server returns the memory of large requests to the system."""
WARM_UP = 3
MODEL = """
import gc
import triglot

gc.disable()


class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        raise triglot.InvalidArgument("never")
"""


@dataclass(frozen=True, slots=True)
class Way:
    """A route, and `make`, which returns a request body of this many bytes. gRPC methods have no `headers`."""

    name: str
    path: str
    make: Callable[[int], bytes]
    headers: Sequence[tuple[str, str]] = ()


def _kserve(size: int) -> bytes:
    message = inference_pb2.ModelInferRequest(model_name="fails", raw_input_contents=[bytes(size)])
    message.inputs.add(name="x", datatype="FP32", shape=[size // 4])
    return message.SerializeToString()


def _tfserving(size: int) -> bytes:
    message = predict_pb2.PredictRequest(model_spec={"name": "fails"})
    tensor = message.inputs["x"]
    tensor.dtype, tensor.tensor_content = tensor_pb2.DT_FLOAT, bytes(size)
    tensor.tensor_shape.dim.add(size=size // 4)
    return message.SerializeToString()


def _grps(size: int) -> bytes:
    message = grps_pb2.GrpsMessage(model="fails-1")
    tensor = message.gtensors.tensors.add(name="no", dtype=grps_pb2.DT_FLOAT32, shape=[size // 4])
    tensor.flat_float32.extend([0.0] * (size // 4))
    return message.SerializeToString()


def _text(before: str, after: str) -> Callable[[int], bytes]:
    """Return a maker of JSON with a list of numbers, just within JSON's limits, so that all of it is parsed."""
    number = "0.5000000,"
    room = len(before) + len(number) + len(after)
    return lambda size: f"{before}{number * ((size - room) // len(number))}0.5{after}".encode()


def _binary(size: int) -> bytes:
    return HEAD.encode() + bytes(SIZE * MIB)


HEAD = json.dumps(
    {
        "inputs": [
            {
                "name": "x",
                "datatype": "FP32",
                "shape": [SIZE * MIB // 4],
                "parameters": {"binary_data_size": SIZE * MIB},
            }
        ]
    }
)
JSON = ("content-type", "application/json")
GRPC = (
    Way("KServe ModelInfer", "/inference.GRPCInferenceService/ModelInfer", _kserve),
    Way("TF Serving Predict", "/tensorflow.serving.PredictionService/Predict", _tfserving),
    Way("grps Predict", "/grps.protos.v1.GrpsService/Predict", _grps),
)
REST = (
    Way(
        "KServe REST, binary",
        "/v2/models/fails/infer",
        _binary,
        (("inference-header-content-length", str(len(HEAD))),),
    ),
    Way("TF Serving REST, no JSON", "/v1/models/fails:predict", _text('{"inputs":{"x":[', "]"), (JSON,)),
    Way("AI Platform, no JSON", "/v1/projects/p/models/fails:predict", _text('{"instances":[', "]"), (JSON,)),
    Way("grps JSON, no JSON", "/grps/v1/infer/predict", _text('{"model":"fails-1","ndarray":[', "]"), (JSON,)),
)


async def _over_grpc(port: int, way: Way, body: bytes, count: int) -> None:
    options = [("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel:
        for _ in range(count):
            with suppress(grpc.aio.AioRpcError):
                await channel.unary_unary(way.path)(body)


async def _over_rest(port: int, way: Way, body: bytes, count: int) -> None:
    async with aiohttp.ClientSession() as session:
        for _ in range(count):
            url = f"http://127.0.0.1:{port}{way.path}"
            async with session.post(url, data=body, headers=dict(way.headers)) as response:
                answer = await response.read()
                if response.status == 200:
                    raise BenchError(f"{way.name}: expected an error, got {answer[:200]!r}")


def measure(way: Way, transport: str, requests: int) -> str:
    """Run a server and send it requests; returns a line about the memory that they left."""
    body = way.make(SIZE * MIB)
    with tempfile.TemporaryDirectory(prefix="triglot-bench-") as name:
        models = Path(name) / "models"
        (models / "fails").mkdir(parents=True)
        (models / "fails" / "model.py").write_text(MODEL)
        flags = ["--grpc-transport", "aio" if transport == "aio" else "h2", "--log-level", "error"]
        with servers.serving(models, None, flags) as (server, grpc_port, rest_port):
            send, port = (_over_rest, rest_port) if way in REST else (_over_grpc, grpc_port)
            before = _resident(server)
            asyncio.run(send(port, way, body, WARM_UP))
            warm = _rested(server, before)
            asyncio.run(send(port, way, body, requests))
            most = _resident(server)
            after = _rested(server, before)
    verdict = "as it should be" if after - before < ALLOWED else WRONG
    sizes = " → ".join(f"{size / MIB:.0f}" for size in (before, warm, most, after))
    return f"  {way.name:>24} over {transport}: {requests} requests, {sizes} MiB, {verdict}"


def _resident(server: servers.Server) -> int:
    resident = server.resident_bytes()
    if resident is None:
        raise BenchError("this platform does not say how much memory another process has")
    return resident


def _rested(server: servers.Server, before: int) -> int:
    """Return the resident size in bytes once memory was returned to the system, or after `REST_SECONDS`."""
    deadline = time.monotonic() + REST_SECONDS
    while (size := _resident(server)) - before >= ALLOWED and time.monotonic() < deadline:
        time.sleep(1)  # No event signals that another process has returned memory.
    return size


def main(words: Sequence[str] | None = None) -> int:
    """Measure and print; returns 1 if a server keeps memory of failed requests, else 0."""
    parser = argparse.ArgumentParser(prog="python -m bench.failed_bodies", description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=REQUESTS, help="of each kind (default: %(default)s)")
    arguments = parser.parse_args(words)
    sizes = "before, warm, after the last, at rest"
    text = f"requests of {SIZE} MiB; {sizes}; less than {ALLOWED // MIB} MiB more wanted"
    print(*report.machine(), text, sep="\n", flush=True)
    right = True
    cases = [(way, transport) for transport in ("h2", "aio") for way in GRPC] + [(way, "HTTP/1.1") for way in REST]
    for way, transport in cases:
        try:
            line = measure(way, transport, arguments.requests)
        except BenchError as error:
            print(error, file=sys.stderr)
            return 1
        right &= WRONG not in line
        print(line, flush=True)
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
