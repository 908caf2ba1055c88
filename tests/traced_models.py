"""A server that traces its requests, a client of it, and a reader of its trace files (spec 3.11)."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import numpy as np

import triglot
from tests.served_models import Function, serving, twice
from triglot.pb.kserve import inference_pb2 as pb

PHASES = ["QUEUE_START", "COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]
ALL_STAMPS = ["REQUEST_START", *PHASES, "REQUEST_END"]
Record = dict[str, Any]


class Client:
    """A client over REST (`session`) and gRPC (`channel`)."""

    def __init__(self, server: triglot.Server, session: aiohttp.ClientSession, channel: grpc.aio.Channel) -> None:
        self.server = server
        self.session = session
        self.channel = channel

    async def post(self, path: str, body: object) -> tuple[int, Any]:
        async with self.session.post(path, json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def infer(self, model: str, *x: int, status: int = 200, **more: Any) -> None:
        """Send a request with INT32 input `x` over KServe's REST interface, and expect this `status`."""
        tensor = {"name": "x", "datatype": "INT32", "shape": [len(x)], "data": list(x)}
        found, answer = await self.post(f"/v2/models/{model}/infer", {"inputs": [tensor], **more})
        assert found == status, answer

    async def set(self, model: str = "", **settings: Any) -> Mapping[str, Any]:
        path = f"/v2/models/{model}/trace/setting" if model else "/v2/trace/setting"
        status, answer = await self.post(path, settings)
        assert status == 200, answer
        return answer  # type: ignore[no-any-return]  # JSON

    async def stream(self, model: str, *x: int) -> int:
        """Send a request over ModelStreamInfer; returns the number of responses."""
        call = self.channel.stream_stream("/inference.GRPCInferenceService/ModelStreamInfer")
        message = pb.ModelInferRequest(
            model_name=model,
            inputs=[pb.ModelInferRequest.InferInputTensor(name="x", datatype="INT32", shape=[len(x)])],
            raw_input_contents=[np.array(x, "<i4").tobytes()],
        )
        return len([answer async for answer in call(iter([message.SerializeToString()]))])


@asynccontextmanager
async def served(file: Path, models: Mapping[str, triglot.Model], **options: Any) -> AsyncIterator[Client]:
    """Run a server that traces every request, unless the options differ; yields a client of it."""
    usual = {"trace_file": str(file), "trace_level": "TIMESTAMPS", "trace_rate": 1}
    async with (
        serving(models, **usual | options) as it,
        aiohttp.ClientSession(f"http://127.0.0.1:{it.server.rest_port}") as session,
        grpc.aio.insecure_channel(f"127.0.0.1:{it.server.grpc_port}") as channel,
    ):
        yield Client(it.server, session, channel)


class Traces:
    """The traces in a trace file. `heads` are the first records of the traces."""

    def __init__(self, file: Path) -> None:
        records: list[Record] = json.loads(file.read_text())
        self.heads = [record for record in records if "model_name" in record]
        self._records = records

    @property
    def models(self) -> list[str]:
        return [head["model_name"] for head in self.heads]

    def names(self, number: int) -> list[str]:
        return [stamp["name"] for stamp in self.stamps(number)]

    def stamps(self, number: int) -> list[Record]:
        """Return the timestamps of a trace, in the order of the file."""
        (stamps,) = [record["timestamps"] for record in self._of(number) if "timestamps" in record]
        return list(stamps)

    def tensors(self, number: int) -> list[tuple[str, Record]]:
        return [(record["activity"], record["tensor"]) for record in self._of(number) if "tensor" in record]

    def _of(self, number: int) -> list[Record]:
        return [record for record in self._records if record["id"] == number]


def one_model() -> dict[str, triglot.Model]:
    return {"twice": Function(twice)}
