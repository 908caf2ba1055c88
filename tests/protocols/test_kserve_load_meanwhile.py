"""Loads that ask too much: they fail, and meanwhile other calls are answered. The server is a process."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import grpc.aio
import pytest

from tests.process import FREE_PORTS, Triglot
from tests.protocol_clients.kserve_async import GrpcClient, Infer, RestClient, Tensor
from tests.protocols.control_clients import (
    FINE,
    INVALID,
    SAYS,
    Control,
    GrpcControl,
    Outcome,
    RestControl,
    config_text,
    put,
    saying,
)
from triglot.core.errors import Code

pytestmark = pytest.mark.both_transports

ANSWER_SECONDS = 30.0
"""How long an answer may take at most, of a model that computes nothing."""
HANGS = (
    SAYS
    + """
    def load(self, folder):
        while "hang" in self.model_config.parameters:
            time.sleep(0.01)
"""
).replace("import triglot", "import time\nimport triglot", 1)
OPEN = """
import triglot

class Open(triglot.Model):
    def infer(self, inputs):
        return {{}}
"""
WIDENED = [
    word
    for name in ("batch-size", "sequences", "entries", "warm-up-runs", "bytes")
    for word in (f"--max-requested-{name}", str(2**40))
]
"""The options that bound what a request asks for, beside the number of instances."""


class Clients(NamedTuple):
    """The server and its clients."""

    process: Triglot
    grpc: GrpcClient
    rest: RestClient
    control: Control


@asynccontextmanager
async def served(folder: Path, interface: str, *arguments: str, load_timeout: int) -> AsyncIterator[Clients]:
    """A server of the models in the folder; `interface` is where models are loaded."""
    options = ("--model-control-mode", "explicit", "--load-model", "*", "--load-timeout", str(load_timeout))
    with Triglot(folder, *FREE_PORTS, *options, *arguments) as process:
        grpc_port, rest_port = process.ports()
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
            aiohttp.ClientSession(f"http://127.0.0.1:{rest_port}") as session,
        ):
            grpc_client, rest_client = GrpcClient(channel), RestClient(session)
            control = GrpcControl(grpc_client) if interface == "grpc" else RestControl(rest_client)
            yield Clients(process, grpc_client, rest_client, control)


async def answers_until(clients: Clients, done: asyncio.Task[list[Outcome]]) -> list[Outcome]:
    """Call another model, and ask for health, until `done` is; returns its result."""
    tensor = Tensor("x", "INT32", [1], bytes(4))
    while not done.done():
        async with asyncio.timeout(ANSWER_SECONDS):
            answer = await clients.grpc.infer(Infer("other", [tensor]))
            assert answer.code is Code.OK, answer.text
            status, _, _ = await clients.rest.call("GET", "/v2/health/live")
            assert status == 200
    return await done


def tensors(count: int) -> list[dict[str, Any]]:
    return [{"name": f"t{at}", "data_type": "TYPE_FP32", "dims": [-1]} for at in range(count)]


ONE_RUN = {"name": "w", "inputs": {"x": {"data_type": "TYPE_INT32", "dims": [1], "zero_data": True}}}
TOO_MUCH = {
    "slots of rows": ("a", {"max_batch_size": 10**9, "sequence_batching": {"direct": {}}}),
    "slots of sequences": ("a", {"sequence_batching": {"oldest": {"max_candidate_sequences": 10**9}}}),
    "tensors": ("open", {"max_batch_size": 8, "input": tensors(7000), "output": tensors(7000)}),
    "versions": ("a", {"version_policy": {"specific": {"versions": list(range(1, 10**5 + 1))}}}),
    "tags": ("a", {"metric_tags": {f"t{at}": "v" for at in range(50_000)}}),
    "warm-up runs": ("a", {"model_warmup": [ONE_RUN | {"count": 2**32 - 1}]}),
    "state": (
        "a",
        {
            "sequence_batching": {
                "state": [{"input_name": "i", "output_name": "o", "data_type": "TYPE_STRING", "dims": [2**33]}]
            }
        },
    ),
}
"""Models, and configurations that took the event loop's time or the machine's memory."""


@pytest.mark.parametrize("interface", ["grpc", "rest"])
async def test_other_calls_are_answered_while_loads_are_refused(tmp_path: Path, interface: str) -> None:
    for name in ("a", "other"):
        put(tmp_path / name / "1", says=1)
    put(tmp_path / "open" / "1", text=OPEN)
    async with served(tmp_path, interface, load_timeout=60) as clients:

        async def load() -> list[Outcome]:
            return [
                await clients.control.load(name, config=json.dumps(config)) for name, config in TOO_MUCH.values()
            ]

        for code, text in await answers_until(clients, asyncio.create_task(load())):
            assert code == INVALID
            assert "expected at most" in text
        assert await clients.control.load("a", config=config_text(**saying(3))) == FINE


async def test_other_calls_are_answered_while_such_loads_run(tmp_path: Path) -> None:
    """The owner widened the bounds."""
    for name in ("a", "other"):
        put(tmp_path / name / "1", says=1)
    put(tmp_path / "open" / "1", text=OPEN)
    async with served(tmp_path, "grpc", *WIDENED, load_timeout=60) as clients:

        async def load() -> list[Outcome]:
            large = [TOO_MUCH[what] for what in ("slots of rows", "slots of sequences", "tensors", "versions")]
            return [await clients.control.load(name, config=json.dumps(config)) for name, config in large]

        assert await answers_until(clients, asyncio.create_task(load())) == [FINE] * 4


@pytest.mark.parametrize("interface", ["grpc", "rest"])
@pytest.mark.parametrize(
    ("fields", "logged"),
    [
        ({"parameters": {"hang": {"string_value": "1"}}}, "the load of a version 1 still runs on its thread"),
        (TOO_MUCH["warm-up runs"][1], "a version 1 could not be loaded"),
    ],
    ids=["load", "warm-up"],
)
async def test_a_load_that_does_not_end_fails_and_is_logged(
    tmp_path: Path, interface: str, fields: dict[str, Any], logged: str
) -> None:
    put(tmp_path / "a" / "1", says=1, text=HANGS)
    put(tmp_path / "other" / "1", says=1)
    async with served(tmp_path, interface, *WIDENED, load_timeout=5) as clients:

        async def load() -> list[Outcome]:
            return [await clients.control.load("a", config=json.dumps(fields))]

        [(code, text)] = await answers_until(clients, asyncio.create_task(load()))
        assert (code, "loading took longer than load_timeout, 5 s" in text) == (INVALID, True), text
        clients.process.stderr.wait_for(logged)
        assert await clients.control.load("a", config=config_text(**saying(3))) == FINE
