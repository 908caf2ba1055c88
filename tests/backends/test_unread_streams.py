"""Clients that do not read their streams: others of the same model are answered, and what is kept is bounded.

In Triton, `InferenceResponseSender.send` waits for no client (checked on tritonserver 2.51, which keeps all
responses).
"""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from tests.backends.triton_served import GrpcClient, ints, reply, request, serving, write_model
from triglot.pb.kserve import inference_pb2 as pb

KEPT = 2**20
WANTED = 400
"""Responses of 64 KiB that a client asks for and does not read: more than the server and the sockets keep."""
CONFIG = """
input [ { name: "N" data_type: TYPE_INT32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_UINT8 dims: [ -1 ] } ]
model_transaction_policy { decoupled: true }
"""
PROCESS = 'parameters { key: "execution" value { string_value: "process" } }\n'
SEQUENCES = "sequence_batching { max_sequence_idle_microseconds: 60000000 }\n"
HEAD = """
import asyncio
import queue

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL


def count(request):
    return pb_utils.get_input_tensor_by_name(request, "N").as_numpy().item()


def response(size=65536):
    return pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.zeros(size, np.uint8))])


class TritonPythonModel:
    left = 0
    \"\"\"Senders that have seen that their client left, or does not read.\"\"\"

"""
IN_EXECUTE = """
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if count(request) < 0:
                sender.send(response(type(self).left), FINAL)
                continue
            try:
                for _ in range(count(request)):
                    sender.send(response())
            except pb_utils.TritonModelException as error:
                assert "max_unread_bytes" in str(error)
            type(self).left += sender.is_cancelled() and request.is_cancelled()
            sender.send(flags=FINAL)
"""
# As vLLM's backend: one thread sends what all requests have generated.
RESPONSE_THREAD = """
    def initialize(self, args):
        self.responses = queue.Queue()
        self.thread = threading.Thread(target=self.send_all)
        self.thread.start()

    def send_all(self):
        while (item := self.responses.get()) is not None:
            sender, last = item
            sender.send(response(), FINAL if last else 0)
            type(self).left += bool(last and sender.is_cancelled())

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            if count(request) < 0:
                sender.send(response(type(self).left), FINAL)
            for number in range(count(request)):
                self.responses.put((sender, number == count(request) - 1))

    def finalize(self):
        self.responses.put(None)
        self.thread.join()
"""
THREAD_EACH = """
    def execute(self, requests):
        for request in requests:
            threading.Thread(target=self.send, args=(request.get_response_sender(), count(request))).start()

    def send(self, sender, number):
        if number < 0:
            sender.send(response(type(self).left), FINAL)
            return
        for _ in range(number):
            sender.send(response())
        type(self).left += sender.is_cancelled()
        sender.send(flags=FINAL)
"""
COROUTINE = IN_EXECUTE.replace("def execute", "async def execute").replace(
    "sender.send(response())", "sender.send(response()); await asyncio.sleep(0)"
)
TRITON = {
    "in execute": (HEAD + IN_EXECUTE, CONFIG),
    "response thread": (HEAD + RESPONSE_THREAD, CONFIG),
    "thread each": (HEAD + THREAD_EACH, CONFIG),
    "coroutine": (HEAD + COROUTINE, CONFIG),
    "sequences": (HEAD + IN_EXECUTE, CONFIG + SEQUENCES),
}
OWN = """
import numpy as np

import triglot


class Zeros(triglot.Model):
    inputs = [triglot.TensorSpec("N", "INT32", [1])]
    outputs = [triglot.TensorSpec("Y", "UINT8", [-1])]
    execution = "EXECUTION"
    left = 0

    def infer(self, inputs, call):
        wanted = inputs["N"].item()
        if wanted < 0:
            yield {"Y": np.zeros(self.left, np.uint8)}
        sent = 0
        try:
            while sent < wanted:
                sent += 1
                yield {"Y": np.zeros(65536, np.uint8)}
        finally:
            self.left += sent < wanted and call.cancelled
"""


def asking(number: int, sequence: int = 1) -> pb.ModelInferRequest:
    flags = {"sequence_id": sequence, "sequence_start": True, "sequence_end": True}
    return request("m", {"N": ints(number)}, id=str(number), parameters=flags)


async def sizes(grpc_client: GrpcClient, number: int) -> list[int]:
    """The size of each response to another client's request."""
    found = []
    async for message in grpc_client.stream([asking(number, sequence=2)]):
        assert not message.error_message
        found.append(sum(output.size for output in reply(message.infer_response).outputs.values()))
    return found


@asynccontextmanager
async def stalled(grpc_client: GrpcClient, **options: Any) -> AsyncIterator[Any]:
    """A call whose first response was read, on a connection of its own."""
    narrow = [("grpc.http2.bdp_probe", 0), ("grpc.use_local_subchannel_pool", 1)]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{grpc_client.server.grpc_port}", options=narrow) as channel:
        call = GrpcClient(grpc_client.server, channel).open_stream(**options)
        await call.write(asking(WANTED))
        assert not (await call.read()).error_message
        yield call
        call.cancel()


async def check_others(grpc_client: GrpcClient) -> None:
    """Others are answered, and the model learns of the client that reads nothing."""
    assert await sizes(grpc_client, 3) == [65536] * 3
    while await sizes(grpc_client, -1) != [1]:  # noqa: ASYNC110 - the model's code may be at its last response.
        await asyncio.sleep(0.01)
    assert await sizes(grpc_client, 3) == [65536] * 3


def write(folder: Path, model: str, execution: str) -> None:
    if model == "generator":
        (folder / "m").mkdir()
        (folder / "m" / "model.py").write_text(OWN.replace("EXECUTION", execution))
    else:
        code, config = TRITON[model]
        write_model(folder, "m", code, config + (PROCESS if execution == "process" else ""))


@pytest.mark.parametrize("model", [*TRITON, "generator"])
@pytest.mark.parametrize(("execution", "transport"), [("thread", "h2"), ("thread", "aio"), ("process", "h2")])
async def test_unread_stream_stalls_no_other_call(
    tmp_path: Path, model: str, execution: str, transport: str
) -> None:
    write(tmp_path, model, execution)
    async with (
        serving(tmp_path, grpc_transport=transport, max_unread_bytes=KEPT) as grpc_client,
        stalled(grpc_client) as call,
    ):
        await check_others(grpc_client)
        found = [await call.read()]
        while not found[-1].error_message:
            found.append(await call.read())
        assert "max_unread_bytes" in found[-1].error_message
        assert len(found) < WANTED
        # The stream goes on.
        await call.write(asking(2))
        assert [(await call.read()).infer_response.id for _ in range(2)] == ["2", "2"]


@pytest.mark.parametrize("model", ["in execute", "response thread", "generator"])
async def test_the_status_of_a_call_whose_client_does_not_read_is_resource_exhausted(
    tmp_path: Path, model: str
) -> None:
    write(tmp_path, model, "thread")
    ends = {"metadata": (("triton_grpc_error", "true"),)}
    async with serving(tmp_path, max_unread_bytes=KEPT) as grpc_client, stalled(grpc_client, **ends) as call:
        await check_others(grpc_client)
        with suppress(grpc.aio.AioRpcError):
            while await call.read() is not grpc.aio.EOF:
                pass
        assert await call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "max_unread_bytes" in await call.details()


@pytest.mark.parametrize("model", ["in execute", "response thread", "generator"])
@pytest.mark.parametrize("transport", ["h1", "aiohttp"])
async def test_stalled_event_stream_stalls_no_other_call(tmp_path: Path, model: str, transport: str) -> None:
    write(tmp_path, model, "thread")
    body = json.dumps({"N": WANTED}).encode()
    async with serving(tmp_path, http_transport=transport, max_unread_bytes=KEPT) as grpc_client:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            await loop.sock_connect(client, ("127.0.0.1", grpc_client.server.rest_port))
            head = f"POST /v2/models/m/generate_stream HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}"
            await loop.sock_sendall(client, f"{head}\r\n\r\n".encode() + body)
            assert (await loop.sock_recv(client, 100)).startswith(b"HTTP/1.1 200")
            await check_others(grpc_client)
            received = b""
            while b"max_unread_bytes" not in received[-4096:]:
                received += (more := await loop.sock_recv(client, 2**20))
                assert more
        assert b'data: {"error"' in received[-4096:]


async def test_a_client_that_reads_slowly_gets_all_that_is_kept(tmp_path: Path) -> None:
    write(tmp_path, "response thread", "thread")
    async with serving(tmp_path, max_unread_bytes=WANTED * 2**17) as grpc_client, stalled(grpc_client) as call:
        assert await sizes(grpc_client, 3) == [65536] * 3
        for _ in range(1, WANTED):
            assert not (await call.read()).error_message
