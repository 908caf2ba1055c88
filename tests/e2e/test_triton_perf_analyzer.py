"""Triton's own load client, perf_analyzer, measures models here; and what it asks for, asked without it.

The program is the one that PERF_ANALYZER says (a command), or else the one of its package, which needs glibc 2.38.
"""

from __future__ import annotations

import http.client
import os
import platform
import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests import environments
from tests.e2e.server_process import ServerProcess
from tests.process import SECONDS, clean_environment
from tests.protocol_clients.channel import SERVICE
from tests.protocol_clients.rest import Rest
from triglot.pb.kserve import inference_pb2 as pb

pytest.importorskip("onnxruntime")

MODELS = Path(__file__).resolve().parents[1] / "models_triton"
OLDEST_GLIBC = (2, 38)
# As short as it can be: windows of some requests, and whatever they say is stable.
SHORT = ("--measurement-mode", "count_windows", "--measurement-request-count", "20", "-s", "100000", "-r", "10")
RUN_SECONDS = 120
SERVER_SIDE = re.compile(
    r"Server: *\n +Inference count: (\d+)\n +Execution count: (\d+)\n(?:.*\n)*? +Avg request latency: \d+ usec"
)
RUNS = {
    "http": "-m simple",
    "grpc": "-m simple -i grpc",
    "two concurrencies of batches over http": "-m simple -b 4 --concurrency-range 1:2",
    "batches over grpc": "-m simple -b 8 -i grpc",
    "many in flight": "-m simple -i grpc --async --concurrency-range 8",
    "streaming": "-m simple -i grpc --streaming",
    "shared memory over http": "-m simple --shared-memory system",
    "shared memory over grpc": "-m simple -i grpc --shared-memory system",
    "shared memory on a stream": "-m simple -i grpc --streaming --shared-memory system",
    "text": "-m simple_identity --shape INPUT0:2",
    "sequences over grpc": "-m simple_sequence -i grpc --streaming --concurrency-range 2",
    "sequences over http": "-m accumulator --async --concurrency-range 2",
    "dynamic batching": "-m batched_add_one -i grpc --async --shape INPUT0:4 --concurrency-range 8",
    "an ensemble": "-m ensemble_twice -i grpc",
    "a decoupled model": "-m repeat_int32 -i grpc --streaming --shape IN:3 --shape DELAY:3 --input-data zero",
    "an optional input": "-m optional_bias",
    "a request rate": "-m identity_fp32 -i grpc --shape INPUT0:16 --request-rate-range 100",
}


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """With every model of the repository."""
    flags = ("--shared-memory-prefix", "/", "--server-name", "triton")
    with ServerProcess(str(MODELS), *flags) as process:
        yield process


@pytest.fixture(scope="module")
def program() -> list[str]:
    """The command of perf_analyzer."""
    if command := os.environ.get("PERF_ANALYZER"):
        return shlex.split(command)
    name, version = platform.libc_ver()
    if name != "glibc" or tuple(map(int, version.split("."))) < OLDEST_GLIBC:
        pytest.skip(
            f"perf_analyzer's wheel needs glibc 2.38, and here is {name} {version}; PERF_ANALYZER may say one"
        )
    return [str(environments.python("perf_analyzer").with_name("perf_analyzer"))]


@pytest.mark.newest  # The program is the same with every library of the server's, and it takes its time.
@pytest.mark.parametrize("arguments", RUNS.values(), ids=RUNS)
def test_a_run(arguments: str, program: list[str], server: ServerProcess) -> None:
    words = arguments.split()
    address = server.grpc_address if "grpc" in words else server.rest_address
    done = subprocess.run(
        [*program, *words, "-u", address, *SHORT, "-v"],
        capture_output=True,
        text=True,
        errors="replace",  # It prints texts of its own making.
        timeout=RUN_SECONDS,
        env=clean_environment(),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    counts = [tuple(map(int, pair)) for pair in SERVER_SIDE.findall(done.stdout)]
    assert len(counts) >= (2 if "1:2" in words else 1), done.stdout
    rows = int(words[words.index("-b") + 1]) if "-b" in words else 1
    assert all(0 < executions <= inferences // rows for inferences, executions in counts), done.stdout
    assert len(re.findall(r"Request count: [1-9]", done.stdout)) == len(counts), done.stdout


# --- the same questions, asked by any client (spec 4.6) ---


def ask(server: ServerProcess, method: str, request: Any, reply: Any) -> Any:
    with grpc.insecure_channel(server.grpc_address) as channel:
        call = channel.unary_unary(f"{SERVICE}{method}")
        return reply.FromString(call(request.SerializeToString(), timeout=SECONDS))


def rest(server: ServerProcess) -> Rest:
    return Rest(int(server.rest_address.rpartition(":")[2]))


@pytest.mark.parametrize("model", ["simple", "ensemble_twice", "repeat_int32", "accumulator", "batched_add_one"])
def test_its_first_questions_over_grpc(model: str, server: ServerProcess) -> None:
    metadata = ask(server, "ModelMetadata", pb.ModelMetadataRequest(name=model), pb.ModelMetadataResponse)
    assert [int(version) for version in metadata.versions] == [1]
    config = ask(server, "ModelConfig", pb.ModelConfigRequest(name=model), pb.ModelConfigResponse).config
    assert config.HasField("dynamic_batching") == (model == "batched_add_one")
    assert config.HasField("sequence_batching") == (model == "accumulator")
    assert config.HasField("ensemble_scheduling") == (model == "ensemble_twice")
    assert config.model_transaction_policy.decoupled == (model == "repeat_int32")
    for step in config.ensemble_scheduling.step:
        name = ask(server, "ModelConfig", pb.ModelConfigRequest(name=step.model_name), pb.ModelConfigResponse)
        assert name.config.name == step.model_name
    about = ask(server, "ServerMetadata", pb.ServerMetadataRequest(), pb.ServerMetadataResponse)
    assert "statistics" in about.extensions
    for kind in ("System", "Cuda"):
        request = getattr(pb, f"{kind}SharedMemoryUnregisterRequest")()
        ask(server, f"{kind}SharedMemoryUnregister", request, getattr(pb, f"{kind}SharedMemoryUnregisterResponse"))
    stats = ask(server, "ModelStatistics", pb.ModelStatisticsRequest(name=model), pb.ModelStatisticsResponse)
    assert [(stats.name, int(stats.version)) for stats in stats.model_stats] == [(model, 1)]


def test_its_first_questions_over_rest(server: ServerProcess) -> None:
    web = rest(server)
    assert web.get("/v2/models/simple")[1]["versions"] == ["1"]
    _, config = web.get("/v2/models/simple/config")
    assert (config["max_batch_size"], "dynamic_batching" in config) == (8, False)
    assert "statistics" in web.get("/v2")[1]["extensions"]
    for kind in ("system", "cuda"):
        assert post_empty(server, f"/v2/{kind}sharedmemory/unregister") == 200
    status, stats = web.get("/v2/models/simple/stats")
    (model_stats,) = stats["model_stats"]
    assert (status, int(model_stats["version"])) == (200, 1)
    keys = (
        "success",
        "fail",
        "queue",
        "compute_input",
        "compute_infer",
        "compute_output",
        "cache_hit",
        "cache_miss",
    )
    assert set(model_stats["inference_stats"]) == set(keys)
    assert all(type(value) is int for each in model_stats["inference_stats"].values() for value in each.values())
    assert set(model_stats) >= {"name", "last_inference", "inference_count", "execution_count"}
    assert set(model_stats) >= {"batch_stats", "response_stats", "memory_usage"}


def post_empty(server: ServerProcess, path: str) -> int:
    host, _, port = server.rest_address.rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=SECONDS)
    try:
        connection.request("POST", path)
        return connection.getresponse().status
    finally:
        connection.close()


def test_its_window_sees_what_has_happened(server: ServerProcess) -> None:
    """It looks for a version whose count of queued requests has grown."""
    web = rest(server)

    def counts() -> tuple[int, ...]:
        (stats,) = web.get("/v2/models/simple/stats")[1]["model_stats"]
        inference = stats["inference_stats"]
        return (
            stats["inference_count"],
            stats["execution_count"],
            *(inference[name]["count"] for name in ("success", "queue", "compute_infer")),
        )

    before = counts()
    tensor = {"shape": [2, 16], "datatype": "INT32", "data": [1] * 32}
    body = {"inputs": [{"name": f"INPUT{at}", **tensor} for at in (0, 1)], "id": "7"}
    for _ in range(3):
        status, answer = web.post("/v2/models/simple/infer", body)
        assert (status, answer["id"]) == (200, "7")
    assert [new - old for old, new in zip(before, counts(), strict=True)] == [6, 3, 3, 3, 3]
