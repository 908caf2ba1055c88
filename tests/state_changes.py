"""A request for each REST route that runs inference or changes state, generated from the server's route table."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import aiohttp

import triglot
from tests.process import write_model
from triglot.core.operation import ADMINISTRATION, Operation
from triglot.protocols.protocol import Context
from triglot.protocols.registry import Rows, rows
from triglot.protocols.rows import Route

PREDICT, OWN_PREDICT = "/own/predict", "/own/grps"
TENSOR = {"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}
BODIES: dict[str, Any] = {
    "/logging": {"log_info": False},
    "/trace/setting": {"trace_level": ["TIMESTAMPS", "TENSORS"], "trace_rate": "1"},
    "/models/half/traffic": {"traffic": {"1": 100}},
    "/load": {},
    "/unload": {},
    "/unregister": {},
    "/infer": {"inputs": [TENSOR]},
    "/infer_stream": {"inputs": [TENSOR]},
    "/generate": {"x": 1.0},
    "/generate_stream": {"x": 1.0},
    ":predict": {"instances": [1.0]},
    ":rawPredict": {"instances": [1.0]},
    ":streamRawPredict": {"instances": [1.0]},
    PREDICT: {"instances": [1.0]},
    "/infer/predict": {"model": "half-1", "ndarray": [1.0]},
    "/invocations": {"instances": [1.0]},
    "/invocations/half": {"instances": [1.0]},
    OWN_PREDICT: {"model": "half-1", "ndarray": [1.0]},
    "/health/online": {},
    "/health/offline": {},
    "/predict": {"x": [1.0]},
}
"""JSON bodies, by the end of the path."""
REFUSED_ANYWAY = re.compile("cudasharedmemory|/v2/repository/named/|:classify|:regress")
"""Paths of requests that fail for every client: the server refuses them, or the model does not implement them."""
VARIABLE = re.compile(r"\{(\w+)(?::[^{}]*)?\}")
STATES = (
    *("/v2/logging", "/v2/trace/setting", "/v2/models/half/trace/setting", "/v2/systemsharedmemory/status"),
    *("/grps/v1/health/ready", "/v2/models/half/ready", "/v2/models/half/stats"),
    "/v2/models/half/traffic",
)


@dataclass(frozen=True)
class Change:
    """One request. `takes`: whether it succeeds for a client that is not a browser."""

    verb: str
    path: str
    body: bytes
    operation: Operation
    takes: bool

    def __str__(self) -> str:
        return f"{self.verb} {self.path}"


class ChangingServer:
    """A running server, and all requests that may change its state."""

    def __init__(self, server: triglot.Server, session: aiohttp.ClientSession, changes: list[Change]) -> None:
        self.server, self.session, self.changes = server, session, changes
        self.url = f"http://127.0.0.1:{server.rest_port}"

    async def state(self) -> dict[str, Any]:
        """Return status and text of each path in `STATES`: all state that the requests could change."""
        found = {}
        for path in STATES:
            async with self.session.get(self.url + path) as answer:
                found[path] = (answer.status, await answer.text())
        return found


@asynccontextmanager
async def changing_server(folder: Path, **options: Any) -> AsyncIterator[ChangingServer]:
    """Run a server of all protocols, with a model `half`, that permits clients every change of its state."""
    write_model(
        folder / "repository" / "half",
        "import triglot\n\n"
        "class Model(triglot.Model):\n"
        '    inputs = [triglot.TensorSpec("x", "FP32", [-1])]\n'
        '    outputs = [triglot.TensorSpec("y", "FP32", [-1])]\n\n'
        "    def infer(self, inputs):\n"
        '        return {"y": inputs["x"] * 0.5}\n',
    )
    given: dict[str, Any] = {
        "grpc_transport": "h2",
        "model_control_mode": "explicit",
        "load_model": "*",
        "grps_online": True,
        "shared_memory_prefix": "/",
        "trace_file": str(folder / "trace.json"),
        "predict_route": PREDICT,
        "grps_path": OWN_PREDICT,
    }
    config = triglot.Config(grpc_port=0, rest_port=0, drain_delay=0, grace=0, **given | options)
    server = triglot.Server([folder / "repository"], config)
    memory = SharedMemory(create=True, size=4096)
    try:
        async with server, aiohttp.ClientSession() as session:
            yield ChangingServer(server, session, changes_of(config, memory.name))
    finally:
        memory.close()
        memory.unlink()


def rows_of(config: triglot.Config) -> Rows:
    """Return the gRPC methods and REST routes of a server with this configuration."""
    server = triglot.Server([], config)
    return rows(Context(server.dataplane, server.telemetry, config))


def changes_of(config: triglot.Config, key: str) -> list[Change]:
    """Return a request for each route of a server with this configuration that may change its state."""
    _, routes = rows_of(config)
    bodies = {**BODIES, "/register": {"key": f"/{key}", "byte_size": 8}}
    return [change_of(route, bodies) for route in routes if route.operation in _CHANGING]


_CHANGING = (Operation.INFER, *ADMINISTRATION)


def path_of(route: Route) -> str:
    """Return a path that matches the route; it names the model `half` if it has a model."""
    verb = re.search(r"verb:\(\?i:(\w+)\)", route.path)
    values = {
        "model": "half",
        "version": "1",
        "repository": "named",
        "region": "r",
        "project": "p",
        "location": "l",
        "endpoint": "half",
        "v1": "v1",
        "path": "models/half",
        "verb": verb[1] if verb else "",
    }
    return VARIABLE.sub(lambda found: values[found[1]], route.path)


def change_of(route: Route, bodies: dict[str, Any]) -> Change:
    path = path_of(route)
    end = next((end for end in sorted(bodies, key=len, reverse=True) if path.endswith(end)), None)
    takes = end is not None and not REFUSED_ANYWAY.search(path)
    if end is None and route.operation in _CHANGING:
        # Routes without a body are those that TensorFlow Serving refuses by their path.
        assert "{v1" in route.path, f"a request for {route.verb} {route.path} is missing"
    body = b"" if end is None else json.dumps(bodies[end]).encode()
    return Change(route.verb, path, body, route.operation, takes)
