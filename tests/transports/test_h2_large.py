"""Large tensors over our HTTP/2: how much memory a call takes, which says how often it was copied.

Strategy: Python counts the memory that it and numpy take. A client that has all of its own memory beforehand
adds nothing, so the most that was in use during a call is the server's: a request once, in which the model's array
lies, and an answer once, where the model made it.
"""

from __future__ import annotations

import asyncio
import socket
import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import uvloop
from hpack import Encoder

import triglot
from tests.scheduling.scripted_models import Inputs, idle
from tests.transports.h2_peers import SECONDS, Client, greeting, message, request_fields
from tests.transports.layout_calls import PROTOCOLS
from tests.transports.live import live, request
from tests.waiting import until
from triglot import Model, TensorSpec
from triglot.core.operation import EVERYTHING
from triglot.pb.grps import grps_pb2
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import predict_pb2
from triglot.transports.http2.core import frames
from triglot.transports.http2.core.frames import Setting
from triglot.transports.http2.server import H2Server

COUNT = 2 * 1024 * 1024
SIZE = 4 * COUNT
SENT = np.arange(COUNT, dtype=np.float32)
LARGEST = 2**31 - 1


class Same(Model):
    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: Inputs) -> dict[str, Any]:
        return {"y": inputs["x"]}


class Negative(Same):
    def infer(self, inputs: Inputs) -> dict[str, Any]:
        return {"y": -inputs["x"]}


@dataclass
class Plain:
    """One call from a socket that blocks, without memory of its own but for `answer`."""

    body: bytes
    path: str
    answer: bytearray = field(default_factory=lambda: bytearray(SIZE + 1024))
    size: int = 0
    ahead: int = 0
    """What the server had made room for when little of the message was there."""

    def run(self, port: int) -> None:
        with socket.create_connection(("127.0.0.1", port), SECONDS) as self._socket:
            settings = greeting(initial_window_size=LARGEST, max_frame_size=frames.LARGEST_MAX_FRAME)
            block = Encoder().encode(request_fields(self.path))
            head = frames.head(len(block), frames.HEADERS, frames.END_HEADERS, 1) + block
            room = frames.window_update(0, LARGEST - frames.DEFAULT_WINDOW)
            self._room = {0: frames.DEFAULT_WINDOW, 1: 0}
            self._socket.sendall(settings + room + head)
            self._has_ended = False
            self._send(memoryview(self.body))
            while not self._has_ended:
                self._read()

    def _send(self, body: memoryview) -> None:
        first, rest = 100_000, frames.SMALLEST_MAX_FRAME
        self._send_frame(body[:first], last=False)
        while self._room[1] < len(body) - first:
            self._read()
        self.ahead = self._room[1]
        for at in range(first, len(body), rest):
            self._send_frame(body[at : at + rest], last=at + rest >= len(body))

    def _send_frame(self, data: memoryview, *, last: bool) -> None:
        while min(self._room.values()) < len(data):
            self._read()
        for number in self._room:
            self._room[number] -= len(data)
        self._socket.sendall(frames.head(len(data), frames.DATA, frames.END_STREAM if last else 0, 1))
        self._socket.sendall(data)

    def _read(self) -> None:
        head = self._exactly(bytearray(frames.HEAD_BYTES))
        length, kind, flags, number = int.from_bytes(head[:3]), head[3], head[4], head[8]
        if kind == frames.DATA:
            self._exactly(memoryview(self.answer)[self.size : self.size + length])
            self.size += length
            return
        payload = self._exactly(bytearray(length))
        if kind == frames.WINDOW_UPDATE:
            self._room[number] += int.from_bytes(payload)
        elif kind == frames.SETTINGS and not flags:
            settings = dict(frames.read_settings(memoryview(payload)))
            self._room[1] += settings[Setting.INITIAL_WINDOW_SIZE]
        self._has_ended = bool(kind == frames.HEADERS and flags & frames.END_STREAM)

    def _exactly(self, into: bytearray | memoryview) -> bytearray | memoryview:
        at = 0
        while at < len(into):
            count = self._socket.recv_into(memoryview(into)[at:])
            assert count, "the server has closed the connection"
            at += count
        return into

    @property
    def message(self) -> bytes:
        return bytes(self.answer[5 : self.size])


def most_memory(model: Model, client: Plain, folder: Path, **options: Any) -> int:
    """The most memory that was in use during the second of two calls, beyond what was before."""
    (folder / "m").mkdir()
    (folder / "m" / "model.py").touch()

    async def run() -> int:
        config = triglot.Config(grpc_port=0, rest_port=-1, grpc_transport="h2", **options)
        async with triglot.Server([folder], config, load=lambda *_: model) as server:
            server.metadata()
            warm = Plain(client.body, client.path)
            await asyncio.to_thread(warm.run, server.grpc_port)
            assert warm.size > SIZE, warm.answer[:200]
            # Nothing of the call before is left once its thread waits, and the loop has had a turn.
            servable = server.dataplane.servable(EVERYTHING, "m")
            await until(lambda: idle(servable) == 1)
            assert isinstance(server._grpc, H2Server)
            buffers = server._grpc.buffers
            await until(lambda: not buffers.lent)
            await asyncio.sleep(0)
            tracemalloc.start()
            try:
                await asyncio.to_thread(client.run, server.grpc_port)
                return tracemalloc.get_traced_memory()[1]
            finally:
                tracemalloc.stop()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def kserve_answer(data: bytes) -> bytes:
    return inference_pb2.ModelInferResponse.FromString(data).raw_output_contents[0]


def tfserving_answer(data: bytes) -> bytes:
    return predict_pb2.PredictResponse.FromString(data).outputs["y"].tensor_content


def grps_answer(data: bytes) -> bytes:
    floats = grps_pb2.GrpsMessage.FromString(data).gtensors.tensors[0].flat_float32
    return np.array(floats, np.float32).tobytes()


ANSWERED = {"kserve": kserve_answer, "tfserving": tfserving_answer, "grps": grps_answer}
"""What reads the values of a response."""


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize(("model", "sign", "times"), [(Same(), 1, 0), (Negative(), -1, 1)], ids=["same", "new"])
def test_nothing_large_is_copied(tmp_path: Path, protocol: str, model: Model, sign: int, times: int) -> None:
    path, encode = PROTOCOLS[protocol]
    client = Plain(message(encode("m", SENT)), path)
    used = most_memory(model, client, tmp_path, tensor_content=True)
    assert ANSWERED[protocol](client.message) == (sign * SENT).tobytes()
    # What the call before was received to is used again; only what the model makes is new.
    assert used <= (times + 0.2) * SIZE
    assert client.ahead >= len(client.body) - 100_000


FILLED = 512 * 1024
"""Bytes of an answer that its client has no room for at first."""


class Fills(Model):
    """Fills its output with the first number of its input; `answer` says in what it is returned."""

    inputs = [TensorSpec("x", "FP32", [-1])]
    outputs = [TensorSpec("y", "FP32", [-1])]

    def __init__(self, answer: Callable[[Any], Any]) -> None:
        self.memory = np.zeros(FILLED // 4, np.float32)
        self.kept = {"y": self.memory}
        self.answer = answer

    def infer(self, inputs: Inputs) -> dict[str, Any]:
        self.memory[:] = inputs["x"][0]
        answer: dict[str, Any] = self.answer(self)
        return answer


class FillsOnLoop(Fills):
    async def infer(self, inputs: Inputs) -> dict[str, Any]:  # type: ignore[override]  # Either is a model's.
        return super().infer(inputs)


def read_only(model: Any) -> dict[str, Any]:
    view = model.memory[:]
    view.flags.writeable = False
    return {"y": view}


ANSWERS: dict[str, Callable[[Any], Any]] = {
    "its array": lambda model: {"y": model.memory},
    "a view": lambda model: {"y": model.memory[:]},
    "a view of a view": lambda model: {"y": model.memory[:].reshape(2, -1).reshape(-1)},
    "a view for reading": read_only,
    "over a memoryview": lambda model: {"y": np.frombuffer(memoryview(model.memory), np.float32)},
    "the same dict": lambda model: model.kept,
}


@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("kind", [Fills, FillsOnLoop])
async def test_a_model_may_fill_the_same_array_again(kind: type[Fills], answer: str) -> None:
    async with live({"m": kind(ANSWERS[answer])}, grpc_transport="h2") as server:
        clients = []
        for value in (1.0, 2.0):
            client = Client(*await asyncio.open_connection("127.0.0.1", server.server.grpc_port))
            await client.greet()
            body = message(request("m", np.array([value], np.float32).tobytes()))
            path = "/inference.GRPCInferenceService/ModelInfer"
            await client.send(
                client.headers(1, path), frames.head(len(body), frames.DATA, frames.END_STREAM, 1), body
            )
            clients.append((value, client, (await client.next(frames.DATA)).payload))
        for value, client, begun in clients:
            await client.send(*(frames.window_update(number, FILLED) for number in (0, 1)))
            data = bytearray(begun)
            while len(data) < FILLED:
                data += (await client.next(frames.DATA)).payload
            filled = inference_pb2.ModelInferResponse.FromString(bytes(data[5:])).raw_output_contents[0]
            assert np.unique(np.frombuffer(filled, np.float32)).tolist() == [value]
            await client.close()
