"""What a killed worker held is given back: open calls of clients, sequences, shared memory, trace files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.access.access_files import anonymous, client, write
from tests.access.signed_tokens import Signer, issuer, keyset
from tests.process import FREE_PORTS, SECONDS, Triglot, write_model
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import infer
from tests.waiting import wait_until
from tests.workers.shared_ports import SERVES, TRANSPORTS, Workers, kill
from triglot.pb.kserve import inference_pb2 as pb

HELD = """
import asyncio
import triglot

class Held(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]
    instances = 8

    def load(self, folder):
        self.folder = folder

    async def infer(self, inputs):
        if number := inputs["x"][0]:
            (self.folder / str(number)).touch()
            await asyncio.sleep(3600)
        return {"y": inputs["x"]}
"""
MOST = 3
"""Calls that each client may have open."""
SIGNER = Signer(algorithm="ES256")
TOKENS: dict[str, Callable[[], str]] = {
    "a client": lambda: "held",
    "clients without credentials": str,
    "a subject of an issuer": SIGNER.token,
}
"""How each gets its token: when it calls, as a long run of tests outlives one."""


class Served:
    """A server of two workers with an access file, called with the same token."""

    def __init__(self, server: Triglot, token: str) -> None:
        self.server, self.port = server, server.ports()[0]
        self._metadata = [("authorization", f"Bearer {token}")] if token else []

    def pids(self) -> list[int]:
        """Of all workers so far."""
        return [int(pid) for _, pid in SERVES.findall(self.server.stderr.text())]

    def call(self, channel: grpc.Channel, value: int) -> Any:
        """A call on this connection, which belongs to one worker; a value other than 0 does not end."""
        request = pb.ModelInferRequest(model_name="held", raw_input_contents=[value.to_bytes(4, "little")])
        request.inputs.add(name="x", datatype="INT32", shape=[1])
        method = rpc(channel, "ModelInfer", pb.ModelInferResponse)
        return method.future(request, metadata=self._metadata, timeout=SECONDS)

    def code(self) -> grpc.StatusCode:
        """How a call on a connection of its own ends."""
        with grpc_channel(self.port) as channel:
            code: grpc.StatusCode = self.call(channel, 0).code()
            return code


@contextmanager
def served(folder: Path, token: str, transport: str) -> Iterator[Served]:
    write_model(folder / "models" / "held", HELD)
    (folder / "keys.json").write_bytes(keyset(SIGNER))
    rules = (
        client("held", ["held"], ["infer"], concurrent=MOST),
        anonymous(["infer"], concurrent=MOST),
        issuer("signer", folder / "keys.json", concurrent=MOST),
    )
    access = write(folder / "access.toml", *rules)
    options = ("--workers", "2", "--access", access, "--grpc-transport", transport)
    with Triglot(folder / "models", *FREE_PORTS, *options) as server:
        here = Served(server, token)
        wait_until(lambda: len(here.pids()) == 2)
        yield here


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("who", TOKENS)
def test_calls_that_were_open_in_killed_workers_count_no_more(tmp_path: Path, who: str, transport: str) -> None:
    with served(tmp_path, TOKENS[who](), transport) as here:
        own = [("grpc.use_local_subchannel_pool", 1)]  # A connection each.
        channels = [grpc.insecure_channel(f"127.0.0.1:{here.port}", own) for _ in range(MOST)]
        open_calls = []
        for number, channel in enumerate(channels, 1):
            open_calls.append(here.call(channel, number))
            wait_until((tmp_path / "models" / "held" / str(number)).exists)
        assert here.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        for pid in here.pids():
            kill(pid)
        assert {call.code() for call in open_calls} == {grpc.StatusCode.UNAVAILABLE}
        wait_until(lambda: len(here.pids()) == 4)
        wait_until(lambda: [here.code() for _ in range(5)] == [grpc.StatusCode.OK] * 5)
        for channel in channels:
            channel.close()


SUMS = """
import os
import triglot

class Sums(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]
    sequence_batching = triglot.SequenceBatching(max_idle=3600)

    def infer(self, inputs):
        return {"y": inputs["x"] * 0 + os.getpid()}
"""


def in_sequence(channel: grpc.Channel, **flags: bool) -> int:
    """The process of the model that answers."""
    request = pb.ModelInferRequest(model_name="sums", raw_input_contents=[bytes(4)])
    request.inputs.add(name="x", datatype="INT32", shape=[1])
    request.parameters["sequence_id"].int64_param = 7
    for name, value in flags.items():
        request.parameters[name].bool_param = value
    answer = rpc(channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS)
    return int.from_bytes(answer.raw_output_contents[0], "little")


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sequences_regions_processes_and_traces_of_a_killed_worker(tmp_path: Path, transport: str) -> None:
    write_model(
        tmp_path / "models" / "sums", SUMS.replace("    sequence", '    execution = "process"\n    sequence')
    )
    memory = SharedMemory(create=True, size=4096)
    traces = ("--trace-file", str(tmp_path / "trace.json"), "--trace-level", "TIMESTAMPS", "--trace-rate", "1")
    options = (*traces, "--shared-memory-prefix", "/", "--grpc-transport", transport)
    with Workers(tmp_path / "models", *options) as workers:
        first, _ = workers.pids()
        with workers.at(first) as channel:
            region = pb.SystemSharedMemoryRegisterRequest(name="r", key=memory.name, byte_size=4096)
            rpc(channel, "SystemSharedMemoryRegister", pb.SystemSharedMemoryRegisterResponse)(
                region, timeout=SECONDS
            )
            process = in_sequence(channel, sequence_start=True)
            for _ in range(20):
                assert infer(channel, "who") == first
            kill(first)
        workers.wait_for_serving(3)
        wait_until(lambda: not Path(f"/proc/{process}").exists())
        with workers.at(workers.pids()[0]) as channel:
            with pytest.raises(grpc.RpcError, match="must specify the START"):
                in_sequence(channel)
            assert in_sequence(channel, sequence_start=True) != process
            status = rpc(channel, "SystemSharedMemoryStatus", pb.SystemSharedMemoryStatusResponse)
            assert list(status(pb.SystemSharedMemoryStatusRequest(), timeout=SECONDS).regions) == ["r"]
        workers.stop()
    files = sorted(tmp_path.glob("trace*"))
    assert all(re.fullmatch(r"trace-worker\d\.json", file.name) for file in files), files
    assert all(json.loads(file.read_text()) for file in files)
    memory.close()
    memory.unlink()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_worker_that_starts_reads_no_half_of_an_access_file(tmp_path: Path, transport: str) -> None:
    """It gets the one that is in force in the others, also where that was replaced after the start."""
    with served(tmp_path, "", transport) as here:
        rules = anonymous(["infer"], models='["held"]')
        write(tmp_path / "access.toml", rules, client("c", ["c"], ["infer"]))
        wait_until(lambda: here.server.stderr.text().count("takes all rights from: held, signer") == 2)
        (tmp_path / "access.toml").write_text(rules)  # In place: client "c" is missing.
        wait_until(lambda: here.server.stderr.text().count("was changed in place") == 2)
        for pid in here.pids():
            kill(pid)
        wait_until(lambda: len(here.pids()) == 4)
        assert here.code() is grpc.StatusCode.OK
        with_c = Served(here.server, "c")
        assert {with_c.code() for _ in range(6)} == {grpc.StatusCode.OK}
        write(tmp_path / "access.toml", rules, client("d", ["d"], ["infer"]))
        wait_until(lambda: {with_c.code() for _ in range(6)} == {grpc.StatusCode.UNAUTHENTICATED})
