"""Models that report each point that a request reaches and wait there for an order, and a server of the reports.

A model connects to a Unix socket once for each point, so models on a thread, on the event loop and in a process of
their own are controlled in the same way, and no test depends on timing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from tests.process import SECONDS, write_model

SOCKET = "checkpoints"
TEXT = """
import asyncio
import os
import socket

import triglot
from triglot.model.scheduling import DynamicBatching, SequenceBatching


MOST = 8  # Elements that are looked at: as many as there may be requests in a batch.


class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "BYTES", [-1])]
    outputs = [triglot.TensorSpec("y", "BYTES", [-1])]
{attributes}
    def load(self, folder):
        self.checkpoints = str(folder.parent / "checkpoints")

    def at(self, point, inputs, call):
        with socket.socket(socket.AF_UNIX) as line:
            line.connect(self.checkpoints)
            line.sendall(said(point, inputs, call))
            obey(line.recv(16))

    async def at_async(self, point, inputs, call):
        reader, writer = await asyncio.open_unix_connection(self.checkpoints)
        try:
            writer.write(said(point, inputs, call))
            obey(await reader.read(16))
        finally:
            writer.close()

{infer}

def said(point, inputs, call):
    names = b"+".join(bytes(x) for x in inputs["x"].reshape(-1)[:MOST])
    return b"%s|%s|%d\\n" % (point.encode(), names, call is not None and call.cancelled)


def obey(order):
    if order == b"fail":
        raise RuntimeError("told to fail")
    if order == b"exit":
        os._exit(3)
"""
ONE = """
    def infer(self, inputs, call):
        self.at("running", inputs, call)
        return {"y": inputs["x"]}
"""
ONE_ON_LOOP = """
    async def infer(self, inputs, call):
        await self.at_async("running", inputs, call)
        return {"y": inputs["x"]}
"""
JOINED = """
    def infer(self, inputs):
        self.at("running", inputs, None)
        return {"y": inputs["x"]}
"""
JOINED_ON_LOOP = """
    async def infer(self, inputs):
        await self.at_async("running", inputs, None)
        return {"y": inputs["x"]}
"""
MANY = """
    def infer(self, inputs, call):
        try:
            for number in (1, 2):
                self.at(f"yield {number}", inputs, call)
                yield {"y": inputs["x"]}
            self.at("end", inputs, call)
        finally:
            self.at("closed", inputs, call)
"""
MANY_ON_LOOP = """
    async def infer(self, inputs, call):
        try:
            for number in (1, 2):
                await self.at_async(f"yield {number}", inputs, call)
                yield {"y": inputs["x"]}
            await self.at_async("end", inputs, call)
        finally:
            await self.at_async("closed", inputs, call)
"""
PUSHED = """
    def infer(self, inputs, call):
        for number in (1, 2):
            self.at(f"yield {number}", inputs, call)
            call.respond({"y": inputs["x"]})
        self.at("end", inputs, call)
"""
NESTED = """
    def infer(self, inputs, call):
        return {"y": call.infer("step_1", inputs)["y"]}
"""
NESTED_ON_LOOP = """
    async def infer(self, inputs, call):
        return {"y": (await call.infer("step_1", inputs))["y"]}
"""
STEPS = """
import triglot


class Model(triglot.Ensemble):
    inputs = [triglot.TensorSpec("x", "BYTES", [-1])]
    outputs = [triglot.TensorSpec("y", "BYTES", [-1])]
    steps = [
        triglot.Step("step_1", inputs={"x": "x"}, outputs={"y": "between"}),
        triglot.Step("step_2", inputs={"x": "between"}, outputs={"y": "y"}),
    ]
"""
PROCESS = '    execution = "process"\n'
BATCHED = "    max_batch_size = 8\n    dynamic_batching = DynamicBatching()\n"
GROWING = "    max_batch_size = 8\n    dynamic_batching = DynamicBatching(max_queue_delay=0.25)\n"
SEQUENCE = "    sequence_batching = SequenceBatching(max_idle=30)\n"


def _text(infer: str, attributes: str = "") -> str:
    return TEXT.replace("{attributes}", attributes).replace("{infer}", infer)


MODELS = {
    "unary_thread": _text(ONE),
    "unary_loop": _text(ONE_ON_LOOP),
    "unary_process": _text(ONE, PROCESS),
    "decoupled_thread": _text(MANY),
    "decoupled_loop": _text(MANY_ON_LOOP),
    "decoupled_process": _text(MANY, PROCESS),
    "pushed_thread": _text(PUSHED),
    "pushed_process": _text(PUSHED, PROCESS),
    "batched_thread": _text(JOINED, BATCHED),
    "batched_loop": _text(JOINED_ON_LOOP, BATCHED),
    "batched_process": _text(JOINED, BATCHED + PROCESS),
    "growing_thread": _text(JOINED, GROWING),
    "growing_loop": _text(JOINED_ON_LOOP, GROWING),
    "sequence_thread": _text(ONE, SEQUENCE),
    "sequence_process": _text(ONE, SEQUENCE + PROCESS),
    "nested_thread": _text(NESTED),
    "nested_loop": _text(NESTED_ON_LOOP),
    "ensemble_loop": STEPS,
    "step_1": _text(ONE.replace("running", "step 1")),
    "step_2": _text(ONE.replace("running", "step 2")),
}
"""Source of each model; the name has the kind of its calls, and what runs it."""
CALLS = {
    "nested_thread": ("step_1",),
    "nested_loop": ("step_1",),
    "ensemble_loop": ("step_1", "step_2"),
}
"""The other models that a model calls."""


def write_models(folder: Path, names: Sequence[str]) -> None:
    """Write FOLDER/NAME/model.py for each of these `MODELS`, and for those that they call."""
    called = {other for name in names for other in CALLS.get(name, ())}
    for name in {*names, *called}:
        write_model(folder / name, MODELS[name])


class Visit:
    """A model's execution that has reached a point and waits there.

    `names` are the texts of its requests. `left`: whether `Call.cancelled` was true for the model.
    """

    def __init__(self, names: list[str], left: bool, writer: asyncio.StreamWriter) -> None:
        self.names = names
        self.left = left
        self._writer = writer

    def go(self, order: str = "go") -> None:
        """Let the model continue, or order it to raise an error ("fail") or to exit its process ("exit")."""
        self._writer.write(order.encode())
        self._writer.close()


class Checkpoints:
    """Receives the reports of models; only requests that are to be held wait. A request is named by its text."""

    def __init__(self) -> None:
        self.visited: set[str] = set()
        """The names of requests that have reached any point."""
        self._held: dict[tuple[str, str], asyncio.Future[Visit]] = {}
        self._open: set[asyncio.StreamWriter] = set()

    def hold(self, name: str, point: str) -> asyncio.Future[Visit]:
        """Hold the request of this name when it reaches this point; returns a future that is done then."""
        future: asyncio.Future[Visit] = asyncio.get_running_loop().create_future()
        self._held[name, point] = future
        return future

    async def arrived(self, visit: asyncio.Future[Visit]) -> Visit:
        """Wait until the request has reached its point."""
        async with asyncio.timeout(SECONDS):
            return await asyncio.shield(visit)

    def clear(self) -> None:
        """Let all held requests continue, and hold no others."""
        for future in self._held.values():
            if future.done():
                future.result().go()
            else:
                future.cancel()
        self._held.clear()

    async def receive(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle one connection: the report of one model at one point."""
        point, joined, left = (await reader.readline()).decode().strip().split("|")
        names = joined.split("+")
        self.visited |= set(names)
        visit = Visit(names, left == "1", writer)
        for name in names:
            future = self._held.pop((name, point), None)
            if future is not None and not future.done():
                future.set_result(visit)
                return
        visit.go()


@asynccontextmanager
async def checkpoints_in(folder: Path) -> AsyncIterator[Checkpoints]:
    """Run the checkpoints of the models in this folder."""
    checkpoints = Checkpoints()
    server = await asyncio.start_unix_server(checkpoints.receive, folder / SOCKET)
    try:
        yield checkpoints
    finally:
        checkpoints.clear()
        server.close()
