"""Shared memory of the clients, blocking and asyncio, with servers that are processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

import triglot
from tests.client.test_client import KINDS, PREDICT, Kind
from tests.process import write_model
from tests.waiting import wait_until
from triglot.client import Retries
from triglot.core.errors import Code
from triglot.core.tensor import DATATYPES
from triglot.testing import GatedModel, serve

ECHO = """
import numpy as np

import triglot
from triglot.core.tensor import DATATYPES

class Echo(triglot.Model):
    inputs = [triglot.TensorSpec(name.lower(), name, None, optional=True) for name in (
        "BOOL", "INT8", "INT64", "UINT16", "FP16", "FP32", "FP64", "BF16", "BYTES",
    )]
    outputs = [triglot.TensorSpec(spec.name, spec.datatype, None) for spec in inputs]

    def infer(self, inputs):
        empty = {spec.name: np.empty(0, DATATYPES[spec.datatype].dtype) for spec in self.outputs}
        return {**empty, **inputs}
"""
COUNT = """
import triglot

class Count(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        for number in range(3):
            yield {"y": inputs["x"] + number}
"""
FOLDER = Path("/dev/shm")
LARGE = 2**20


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_model(folder / "echo", ECHO)
    write_model(folder / "count", COUNT)
    return folder


@pytest.fixture(scope="module")
def address(models: Path) -> Iterator[str]:
    with serve(models, process=True, shared_memory_prefix="/triglot_client_") as server:
        yield server.grpc_address


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert not list(FOLDER.glob(f"*_{os.getpid()}_*"))


@KINDS
def test_every_datatype_in_and_out(address: str, kind: Kind) -> None:
    random = np.random.default_rng(3)
    with kind(address) as client, client.shared_memory(2**16) as memory:
        for name in ("BOOL", "INT8", "INT64", "UINT16", "FP16", "FP32", "FP64", "BF16"):
            dtype = DATATYPES[name].dtype
            x, y = memory.array((3, 2), dtype), memory.array((3, 2), dtype)
            assert not x.astype(bool).any()
            x[:] = random.integers(0, 2, (3, 2)).astype(dtype)
            outputs = client.infer("echo", {name.lower(): x}, outputs={name.lower(): y})
            assert list(outputs) == [name.lower()]
            assert outputs[name.lower()] is y
            assert y.tolist() == x.tolist()


@KINDS
def test_large_arrays_with_others(address: str, kind: Kind) -> None:
    """Of a call, some tensors are in shared memory, and others are sent."""
    with kind(address) as client, client.shared_memory(8 * LARGE) as memory:
        x, y = memory.array((LARGE,), np.float32), memory.array((LARGE,), np.float32)
        x[:] = np.arange(LARGE)
        sent = np.arange(5, dtype=np.int64)
        outputs = client.infer(
            "echo",
            {"fp32": x, "int64": sent, "bytes": [b"a"]},
            outputs={"bytes": None, "fp32": y, "int64": None},
        )
        assert outputs["int64"].tolist() == sent.tolist()
        assert outputs["bytes"].tolist() == [b"a"]
        assert np.array_equal(y, x)
        # A part that is contiguous is sent by reference, another one by value, and both are right.
        for part in (x[8:20], x[1:3].reshape(2, 1), x[::1000], x[:0]):
            assert client.infer("echo", {"fp32": part})["fp32"].tolist() == part.tolist()
        outputs = client.infer("echo", {"fp32": x[:6].reshape(3, 2)}, outputs={"fp32": y})
        assert outputs["fp32"].tolist() == [[0.0, 1.0], [2.0, 3.0], [4.0, 5.0]]
        assert np.shares_memory(outputs["fp32"], y)
    with kind(address) as client:  # After the end of the block, it is an array as any other.
        assert client.infer("echo", {"fp32": x[8:20]})["fp32"].tolist() == x[8:20].tolist()


@KINDS
def test_a_stream(address: str, kind: Kind) -> None:
    with kind(address) as client, client.shared_memory(1024) as memory:
        x, y = memory.array(2, np.float32), memory.array(2, np.float32)
        x[:] = [1, 2]
        found = [outputs["y"].tolist() for outputs in client.stream("count", {"x": x})]
        assert found == [[1.0, 2.0], [2.0, 3.0], [3.0, 4.0]]
        with pytest.raises(TypeError, match="responses would overwrite each other"):
            client.stream("count", {"x": x}, outputs={"y": y})


@KINDS
def test_a_server_that_was_restarted(models: Path, kind: Kind) -> None:
    """A call or a stream registers the region again; so does one of a server that was absent at first."""
    options: dict[str, Any] = {"process": True, "shared_memory_prefix": "/"}
    retries = Retries(attempts=9)
    with ExitStack() as stack:
        with serve(models, **options) as server:
            port, first = server.grpc_port, server.grpc_address
            client = stack.enter_context(kind(first, retries=retries))
            memory = stack.enter_context(client.shared_memory(1024))
            x, y = memory.array(2, np.float32), memory.array(2, np.float32)
            x[:] = [1, 2]
            assert client.infer("echo", {"fp32": x}, outputs={"fp32": y})["fp32"].tolist() == [1.0, 2.0]
        other = stack.enter_context(kind(first, retries=retries))
        later = stack.enter_context(other.shared_memory(1024))
        stack.enter_context(serve(models, grpc_port=port, **options))
        assert client.infer("echo", {"fp32": x[:1]}, outputs={"fp32": y})["fp32"].tolist() == [1.0]
        forget(first)
        assert [outputs["y"].tolist() for outputs in client.stream("count", {"x": x})][2] == [3.0, 4.0]
        z = later.array(2, np.float32)
        z[:] = 7
        assert other.infer("echo", {"fp32": z})["fp32"].tolist() == [7.0, 7.0]


@KINDS
def test_a_server_that_cannot_open_it(address: str, kind: Kind) -> None:
    """As one on another machine, whose /dev/shm does not have it."""
    with kind(address) as client, client.shared_memory(1024) as memory:
        x = memory.array(1, np.float32)
        (FOLDER / memory.name).unlink()
        forget(address)
        with pytest.raises(triglot.InvalidArgument, match=f"^{address}: .*; expected a server of this machine"):
            client.infer("echo", {"fp32": x})


def forget(address: str) -> None:
    """Unregister all regions."""
    with grpc.insecure_channel(address) as channel:
        channel.unary_unary("/inference.GRPCInferenceService/SystemSharedMemoryUnregister")(b"")


@KINDS
def test_an_output_is_written_by_one_server(kind: Kind) -> None:
    """A call that writes to shared memory is not sent to a second server while the first one works."""
    slow, quick = GatedModel("infer"), GatedModel()
    options: dict[str, Any] = {"shared_memory_prefix": "/"}
    with serve({"m": slow}, **options) as first, serve({"m": quick}, **options) as second:
        addresses = [first.grpc_address, second.grpc_address]
        retries = Retries(hedge_after=0.001)
        try:
            with kind(addresses, timeout=1, retries=retries) as client, client.shared_memory(1024) as memory:
                x, y = memory.array(1, np.float32), memory.array(1, np.float32)
                late = 0
                for _ in range(2):
                    try:
                        client.infer("m", {"x": x}, outputs={"y": y})
                    except triglot.DeadlineExceeded:
                        late += 1
                assert late == 1
        finally:
            slow.open_point("infer")


@KINDS
def test_what_is_refused(address: str, models: Path, kind: Kind) -> None:
    with kind(address) as client:
        with client.shared_memory(4096) as memory:
            x = memory.array(1000, np.float32)
            with pytest.raises(ValueError, match=r"at most 64 bytes, left of 4096, got 68 for float32 \[17\]"):
                memory.array(17, np.float32)
            with pytest.raises(TypeError, match="expected a dtype of numbers"):
                memory.array(1, object)
            with pytest.raises(ValueError, match="negative dimensions"):
                memory.array([2, -3], np.float32)
            assert memory.array((), np.float32).shape == ()
            assert memory.array([2, 0], np.float32).shape == (2, 0)
            with pytest.raises(
                ValueError, match="output 'fp32': expected a contiguous array of the client's shared"
            ):
                client.infer("echo", {"fp32": x}, outputs={"fp32": np.zeros(1000, np.float32)})
            with pytest.raises(triglot.Internal, match=r"for output 'fp32' \(40 bytes\) should be at least 4000"):
                client.infer("echo", {"fp32": x}, outputs={"fp32": x[:10]})
        with pytest.raises(ValueError, match="the shared memory is closed"):
            memory.array(1, np.float32)
        with pytest.raises(ValueError, match="output 'fp32': expected a contiguous array of the client's shared"):
            client.infer("echo", {"fp32": x}, outputs={"fp32": x})
        with (
            pytest.raises(triglot.InvalidArgument, match="expected one that begins with '/triglot_client_'"),
            client.shared_memory(1, prefix="/mine_"),
        ):
            pass
        for size, prefix, error in ((0, "/a", "at least 1 byte"), (1, "a", "expected / and a name, got 'a'")):
            with pytest.raises(ValueError, match=error), client.shared_memory(size, prefix=prefix):
                pass
        with pytest.raises(MemoryError, match="/dev/shm has no room for"), client.shared_memory(2**50):
            pass
    with (
        kind(address, protocol=PREDICT) as client,
        pytest.raises(TypeError, match="TensorFlow Serving has no shared memory"),
        client.shared_memory(1),
    ):
        pass
    with (
        serve(models, process=True) as without,
        kind([address, without.grpc_address]) as client,
        pytest.raises(
            triglot.ServingError, match=f"{without.grpc_address}: .* option shared_memory_prefix"
        ) as raised,
        client.shared_memory(1),
    ):
        pass
    assert raised.value.code is Code.UNIMPLEMENTED


LEFT = """
import os, signal, sys
from pathlib import Path
from triglot.client import Client, SharedMemory

ended = SharedMemory(8, "/triglot_client_")
if os.fork() == 0:
    sys.exit()  # It leaves the memory to the process that made it.
assert os.wait()[1] == 0
assert (Path("/dev/shm") / ended.name).exists()
client = Client(sys.argv[1])
memory = client.shared_memory(4096)
x = memory.__enter__().array(8, "f4")
print(x.size, flush=True)
if sys.argv[2] == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
client.infer("echo", {"fp32": x})
"""


@pytest.mark.parametrize("end", ["exit", "kill"])
def test_a_process_that_ends_without_closing(address: str, end: str) -> None:
    command = [sys.executable, "-c", LEFT, address, end]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    output, errors = process.communicate()
    assert output == "8\n"
    if end == "exit":
        assert (process.returncode, errors) == (0, "")
    else:
        assert process.returncode == -signal.SIGKILL
    wait_until(lambda: not list(FOLDER.glob(f"*_{process.pid}_*")))
