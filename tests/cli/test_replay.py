"""`triglot replay`: recorded requests are answered as they were, or it says what is different."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import trustme

from tests.access.access_files import client, write
from tests.process import FREE_PORTS, Triglot, run_triglot, write_model
from triglot.core.tensor import DATATYPES, Array, object_array
from triglot.core.types import OutputTensor
from triglot.pb.tfserving import model_pb2
from triglot.pb.tfserving import prediction_log_pb2 as pb
from triglot.protocols.tfserving.codec import encode_predict_request
from triglot.protocols.tfserving.tensor import tensor_message
from triglot.protocols.tfserving.tfrecord import framed

ECHO = """
import triglot

class Echo(triglot.Model):
    inputs = [triglot.TensorSpec("x", "{datatype}", [-1])]
    outputs = [triglot.TensorSpec("y", "{datatype}", [-1])]

    def infer(self, inputs):
        return {{"y": inputs["x"]}}
"""
HALF = """
import triglot

class Half(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1]), triglot.TensorSpec("z", "BYTES", [])]

    def infer(self, inputs):
        return {"y": inputs["x"] / 2, "z": b"same"}
"""
NEXT = HALF.replace("/ 2", "/ 2 + 0.001")
VALUES: Mapping[str, list[Any]] = {
    "BOOL": [True, False],
    "FP16": [1.5, -0.0, np.nan, np.inf],
    "BF16": [1.5, -0.0, np.nan, -np.inf],
    "FP32": [0.1, np.nan, -np.inf, 1e-45],
    "FP64": [0.1, np.nan, 5e-324],
    "COMPLEX64": [1 + 2j, complex(np.nan, 1)],
    "COMPLEX128": [0.1 + 2j],
    **{name: [1, 127] for name in ("QINT8", "QUINT8", "QINT16", "QUINT16", "QINT32")},
    "BYTES": [b"", b"\xff\0", "ü".encode()],
}


def values_of(datatype: str) -> Array:
    if datatype == "BYTES":
        return object_array(VALUES[datatype], (len(VALUES[datatype]),))
    dtype = DATATYPES[datatype].dtype
    if datatype in VALUES:
        return np.array(VALUES[datatype]).astype(dtype)
    return np.array([np.iinfo(dtype).min, 0, np.iinfo(dtype).max], dtype)


def log(
    model: str, outputs: Mapping[str, tuple[str, Array]], x: Array, datatype: str = "FP32"
) -> pb.PredictionLog:
    """A recorded Predict of one input, `x`."""
    message = pb.PredictionLog()
    request = encode_predict_request(model_pb2.ModelSpec(name=model), [OutputTensor("x", datatype, x)], ())
    message.predict_log.request.ParseFromString(request)
    message.predict_log.response.SetInParent()
    for name, (kind, array) in outputs.items():
        message.predict_log.response.outputs[name].CopyFrom(tensor_message(array, kind))
    return message


def half(*values: float, y: list[float] | None = None, model: str = "half") -> pb.PredictionLog:
    """A record of the model of this name, as it answers unless `y` was recorded."""
    x = np.array(values, np.float32)
    array = x / 2 if y is None else np.array(y, np.float32)
    return log(model, {"y": ("FP32", array), "z": ("BYTES", object_array([b"same"], ()))}, x)


def record(file: Path, *logs: pb.PredictionLog) -> Path:
    file.write_bytes(b"".join(framed(line.SerializeToString()) for line in logs))
    return file


@dataclass(frozen=True)
class Served:
    """A server of models, one for each datatype and `half`, of which there is a next version."""

    port: int

    def replay(self, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
        return run_triglot("replay", "--to", f"127.0.0.1:{self.port}", *arguments)

    def lines(self, *arguments: str | Path) -> list[str]:
        """What it prints when not all is equal."""
        completed = self.replay(*arguments)
        assert (completed.returncode, completed.stderr) == (1, "")
        return completed.stdout.splitlines()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("models")
    for datatype in DATATYPES:
        write_model(folder / datatype.lower(), ECHO.format(datatype=datatype))
    write_model(folder / "half" / "1", HALF)
    write_model(folder / "next" / "1", HALF)
    write_model(folder / "next" / "2", NEXT)
    with Triglot(folder, *FREE_PORTS) as server:
        yield Served(server.ports()[0])


# --- equal ---


@pytest.mark.parametrize("tensor_content", [False, True])
def test_answers_of_every_datatype_recorded_and_replayed(tmp_path: Path, tensor_content: bool) -> None:
    """As the server records them, against a fresh server that answers in one form, or the other."""
    models, records = tmp_path / "models", tmp_path / "records"
    records.mkdir()
    sent = []
    for datatype in DATATYPES:
        write_model(models / datatype.lower(), ECHO.format(datatype=datatype))
        x = values_of(datatype)
        sent.append(log(datatype.lower(), {"y": (datatype, x)}, x, datatype))
        empty = x[:0]
        sent.append(log(datatype.lower(), {"y": (datatype, empty)}, empty, datatype))
    file = record(tmp_path / "sent", *sent)
    with Triglot(models, *FREE_PORTS, "--drain-delay", "0", "--request-log", records / "r") as server:
        assert Served(server.ports()[0]).replay(file).returncode == 0
        server.stop()
    flags = ["--tensor-content"] if tensor_content else []
    with Triglot(models, *FREE_PORTS, *flags) as server:
        completed = Served(server.ports()[0]).replay("--json", records / "r-00001.tfrecord")
    expected = {"records": len(sent), "equal": len(sent), "different": 0, "failed": 0, "differences": []}
    assert (completed.returncode, json.loads(completed.stdout)) == (0, expected)


def test_the_table(served: Served, tmp_path: Path) -> None:
    files = record(tmp_path / "one", half(1), half(2)), record(tmp_path / "two", half(3))
    completed = served.replay(*files)
    assert (completed.returncode, completed.stderr) == (0, "")
    assert completed.stdout == "records  equal  different  failed\n      3      3          0       0\n"


def test_another_model_and_version(served: Served, tmp_path: Path) -> None:
    file = record(tmp_path / "r", half(1, model="whatever"))
    assert served.replay(file, "--model", "next", "--model-version", "1").returncode == 0
    assert served.lines(file)[-1].endswith(
        "record 0 failed: Servable not found for request: Latest(whatever) (NOT_FOUND)"
    )


# --- different ---


def test_the_next_version_differs(served: Served, tmp_path: Path) -> None:
    file = record(tmp_path / "r", half(4, 0), half(1))
    assert served.lines(file, "--model", "next") == [
        "records  equal  different  failed",
        "      2      0          2       0",
        "",
        f"{file} record 0, output y: expected 2.0 at [0], got 2.001 (2 of 2 elements differ)",
        f"{file} record 1, output y: expected 0.5 at [0], got 0.501",
    ]


def test_a_tolerance(served: Served, tmp_path: Path) -> None:
    file = record(tmp_path / "r", half(4, 0, float("nan")))
    assert served.replay(file, "--model", "next", "--tolerance", "0.01").returncode == 0
    assert served.replay(file, "--model", "next", "--tolerance", "0.00001").returncode == 1
    for wrong in ("-1", "nan", "inf"):
        completed = served.replay(file, f"--tolerance={wrong}")
        assert (completed.returncode, completed.stderr) == (
            2,
            f"triglot: --tolerance: expected a number from 0, got {wrong}\n",
        )


@pytest.mark.parametrize(
    ("datatype", "recorded", "sent", "difference"),
    [
        ("INT8", [1, 2], [1, 3], "expected 2 at [1], got 3 (1 of 2 elements differ)"),
        ("BOOL", [True], [False], "expected True at [0], got False"),
        ("BF16", [1.5], [1.25], "expected 1.5 at [0], got 1.25"),
        ("COMPLEX64", [1j], [2j], "expected 1j at [0], got 2j"),
        ("FP32", [1.0], [1.0, 1.0], "expected FP32 [1], got FP32 [2]"),
        ("FP32", [0.0], [float("nan")], "expected 0.0 at [0], got nan"),
        ("BYTES", [b"a"], [b"\xff" + b"b" * 300], 'expected "a" at [0], got "�' + "b" * 199 + "…"),
    ],
)
def test_values_that_differ(
    served: Served, tmp_path: Path, datatype: str, recorded: list[Any], sent: list[Any], difference: str
) -> None:
    def array(values: list[Any]) -> Array:
        if datatype == "BYTES":
            return object_array(values, (len(values),))
        return np.array(values).astype(DATATYPES[datatype].dtype)

    logged = log(datatype.lower(), {"y": (datatype, array(recorded))}, array(sent), datatype)
    difference = difference.replace("�", "\\ufffd").replace("b" * 199, "b" * 193)
    assert served.lines(record(tmp_path / "r", logged))[-1].endswith(f" record 0, output y: {difference}")


def test_added_or_missing_outputs(served: Served, tmp_path: Path) -> None:
    x = np.array([1, 2], np.float32)
    y, z = ("FP32", x / 2), ("BYTES", object_array([b"same"], ()))
    file = record(
        tmp_path / "r",
        log("half", {"y": y}, x),
        log("half", {"y": y, "z": z, "more": y}, x),
        log("half", {"y": ("FP64", np.array([0.5, 1])), "z": z}, x),
    )
    assert [line.partition(", ")[2] for line in served.lines(file)[-3:]] == [
        "output z: expected none, got BYTES []",
        "output more: expected FP32 [2], got none",
        "output y: expected FP64 [2], got FP32 [2]",
    ]


def test_only_the_first_differences_are_printed(served: Served, tmp_path: Path) -> None:
    file = record(tmp_path / "r", *[half(1, y=[0.25])] * 13)
    lines = served.lines(file)
    assert (len(lines), lines[-1]) == (3 + 10 + 1, "and 3 more")
    results = json.loads(served.replay(file, "--json").stdout)
    assert (results["different"], len(results["differences"])) == (13, 10)
    assert results["differences"][0] == {
        "file": str(file),
        "record": 0,
        "output": "y",
        "expected": "0.25 at [0]",
        "got": "0.5",
    }


# --- failed ---


def test_records_that_cannot_be_compared(served: Served, tmp_path: Path) -> None:
    without = half(1)
    without.predict_log.ClearField("response")
    streamed = pb.PredictionLog(predict_streamed_log={})
    file = record(tmp_path / "r", without, pb.PredictionLog(), streamed, half(1))
    assert [line.partition(" failed: ")[2] for line in served.lines(file)[-3:]] == [
        "no answer is recorded",
        "a record of nothing cannot be sent, only predict_log, classify_log, regress_log, multi_inference_log",
        "a predict_streamed_log cannot be sent, only predict_log, classify_log, regress_log, multi_inference_log",
    ]
    assert served.lines(file)[1].split() == ["4", "1", "0", "3"]


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (None, "No such file or directory"),
        (b"text", "expected a TFRecord file of PredictionLog: truncated record at 0"),
        (framed(b"\xff"), "expected a TFRecord file of PredictionLog: the request is not a valid "),
        (framed(b"")[:-1], "expected a TFRecord file of PredictionLog: truncated record at 12"),
    ],
)
def test_files_that_cannot_be_read(served: Served, tmp_path: Path, data: bytes | None, text: str) -> None:
    file = tmp_path / "r"
    if data is not None:
        file.write_bytes(data)
    completed = served.replay(file)
    assert (completed.returncode, completed.stdout) == (2, "")
    assert completed.stderr.startswith(f"triglot: {file}: {text}")


def test_no_server_for_records(tmp_path: Path) -> None:
    completed = run_triglot("replay", "--to", "127.0.0.1:1", record(tmp_path / "r", half(1)))
    assert (completed.returncode, completed.stdout) == (1, "")
    assert completed.stderr.startswith("triglot: no gRPC server answers at 127.0.0.1:1: ")
    assert completed.stderr.endswith("or check --to and --tls\n")


def test_a_server_with_tls_and_access_control(tmp_path: Path) -> None:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    certificate = authority.issue_cert("localhost")
    certificate.private_key_pem.write_to_path(tmp_path / "key.pem")
    certificate.cert_chain_pems[0].write_to_path(tmp_path / "cert.pem")
    write_model(tmp_path / "half", HALF)
    write(tmp_path / "access.toml", client("tester", ["of-tester"], ["infer"]))
    (tmp_path / "token").write_text("of-tester\n")
    flags = ("--tls-certificate", tmp_path / "cert.pem", "--tls-key", tmp_path / "key.pem")
    file = record(tmp_path / "r", half(1))
    with Triglot(tmp_path / "half", *FREE_PORTS, *flags, "--access", tmp_path / "access.toml") as server:
        to = ("replay", file, "--to", f"localhost:{server.ports()[0]}", "--tls-ca", tmp_path / "ca.pem")
        completed = run_triglot(*to, "--token-file", tmp_path / "token")
        assert completed.returncode == 0, completed.stdout + completed.stderr
        assert "set TRIGLOT_TOKEN or --token-file (UNAUTHENTICATED)" in run_triglot(*to).stdout
