"""A server in this process of models that lie somewhere else, and a client of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import triglot
from tests.protocol_clients.rest import Rest
from triglot.repository.config.settings import ModelSettings
from triglot.repository.scan.source import NamedPath

SAYS = """
import triglot


class Says(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("y", "INT32", [-1])]

    def load(self, folder):
        self.value = int((folder / "value.txt").read_text())

    def infer(self, inputs):
        return {"y": inputs["x"] * 0 + self.value}
"""
"""A model that answers the number in the file value.txt."""
POLL: Mapping[str, Any] = {"model_control_mode": "poll", "poll_interval": 0.05}


@asynccontextmanager
async def serving(
    *paths: str | NamedPath, models: Sequence[ModelSettings] | None = None, **options: Any
) -> AsyncIterator[Served]:
    config = triglot.Config(**{"grpc_port": 0, "rest_port": 0, "grace": 1.0} | options)
    async with triglot.Server(paths, config, models=models) as server:
        yield Served(server)


class Served:
    """A running server, and a client of it."""

    def __init__(self, server: triglot.Server) -> None:
        self.server = server
        self._rest = Rest(server.rest_port)

    async def value(self, model: str, version: int = 0) -> int | str:
        """What the model answers; the error, if it is one."""
        path = f"{model}/versions/{version}" if version else model
        _, answer = await asyncio.to_thread(self._rest.infer, path)
        found: int | str = answer["outputs"][0]["data"][0] if "outputs" in answer else answer["error"]
        return found

    async def post(self, path: str, body: object = None) -> tuple[int, Any]:
        return await asyncio.to_thread(self._rest.post, path, body or {})

    async def index(self) -> dict[str, str]:
        """The state of each model and version, and why."""
        _, models = await self.post("/v2/repository/index")
        return {
            f"{model['name']}/{model.get('version', '')}": " ".join(
                (model.get("state", ""), model.get("reason", ""))
            ).strip()
            for model in models
        }
