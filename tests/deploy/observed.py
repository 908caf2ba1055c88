"""A server with an access file and models of all kinds, another with workers, and calls of all kinds.

Both run as processes, so that a Prometheus may scrape them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import aiohttp
import grpc
import grpc.aio
from prometheus_client import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.access.access_files import anonymous, client, write
from tests.deploy.promql import Series, series_of
from tests.process import SECONDS, Triglot, write_model
from tests.protocol_clients.every_protocol import INTERFACES, MODEL, infer_message
from tests.transports.live import streaming

MODEL_TEXT = """
import time
import triglot

class Half(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    {attributes}

    {function}
        {lines}
        return {{"y": inputs["x"] * 0.5}}
"""
INFER = "def infer(self, inputs):"
MODELS: Mapping[str, tuple[str, str, str]] = {
    MODEL: ("", INFER, "pass"),
    "batched": (
        "max_batch_size = 8; dynamic_batching = triglot.DynamicBatching(max_queue_delay=0.01)",
        INFER,
        "time.sleep(0.01)",
    ),
    "narrow": (
        "dynamic_batching = triglot.DynamicBatching(policy=triglot.QueuePolicy(timeout=0.05, max_queue_size=2))",
        INFER,
        "time.sleep(0.2)",
    ),
    "apart": ("execution = 'process'", INFER, "pass"),
    "holding": ("", "async def infer(self, inputs):", "time.sleep(0.1)"),
    "cached": ("response_cache = True", INFER, "pass"),
    "failing": ("", INFER, "raise ValueError('as it is written')"),
    "broken": ("", INFER, "is no Python"),
}
"""By their names: attributes, the head of `infer`, and what it does first."""
TRACES = {"OTEL_TRACES_EXPORTER": "otlp", "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:9"}
"""Every request is traced, and no collector is there."""
TOKEN, GREEDY = "of search", "of greedy"
ACCESS = (
    client("search", [TOKEN], ["infer"]),
    client("greedy", [GREEDY], ["infer"], rate=0.001),
    anonymous(["infer", "inspect", "health"]),
)


class Observed:
    """Clients of a server, and what it counts. `url` is that of KServe's REST."""

    def __init__(self, channel: grpc.aio.Channel, session: aiohttp.ClientSession, port: int) -> None:
        self.channel, self.session, self.port = channel, session, port
        self.url = f"http://127.0.0.1:{port}/v2"
        self.stream_infer = streaming(channel)

    async def infer(self, model: str, token: str = "") -> int:
        """The status of a KServe inference over REST."""
        body = {"inputs": [{"name": "x", "datatype": "FP32", "shape": [1], "data": [1.0]}]}
        headers = {"x-api-key": token} if token else {}
        async with self.session.post(f"{self.url}/models/{model}/infer", json=body, headers=headers) as response:
            await response.read()
            return response.status

    async def infer_within(self, model: str, seconds: float) -> grpc.StatusCode:
        """The status of a KServe inference over gRPC that has a deadline."""
        request = infer_message(1.0)
        request.model_name = model
        call = self.channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
        return await call(request.SerializeToString(), timeout=seconds).code()

    async def calls_of_all_kinds(self) -> None:
        """By every protocol, with success and without; in batches, refused, too late."""
        for interface in INTERFACES.values():
            assert (await interface(self, 1.0)).value == 0.5
        assert await self.infer("absent") == 404
        assert await self.infer("failing") == 500
        for model in ("apart", "batched", "holding", "cached", "cached"):
            assert await self.infer(model) == 200
        assert set(await asyncio.gather(*(self.infer("batched") for _ in range(8)))) == {200}
        assert set(await asyncio.gather(*(self.infer("narrow") for _ in range(6)))) == {200, 429, 503}
        assert await self.infer_within("narrow", 0.02) is grpc.StatusCode.DEADLINE_EXCEEDED
        assert await self.infer(MODEL, TOKEN) == 200
        assert await self.infer(MODEL, GREEDY) in (200, 429)
        assert await self.infer(MODEL, GREEDY) == 429
        assert await self.infer(MODEL, "of nobody") == 401

    async def families(self) -> list[Metric]:
        """A scrape."""
        accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
        async with self.session.get(self.url.removesuffix("/v2") + "/metrics", headers=accept) as response:
            assert response.status == 200
            # It says not of what its families are.
            return list(text_string_to_metric_families(await response.text()))  # type: ignore[no-untyped-call]


@asynccontextmanager
async def observed(folder: Path) -> AsyncIterator[tuple[Observed, Observed]]:
    """The server with the access file, and the one with workers, which has demo models. `folder` is empty."""
    models = folder / "models"
    for name, (attributes, function, lines) in MODELS.items():
        text = MODEL_TEXT.format(attributes=attributes or "pass", function=function, lines=lines)
        write_model(models / name, text)
    access = write(folder / "access.toml", *ACCESS)
    arguments: list[str | Path] = [
        models,
        "--access",
        access,
        "--response-cache-bytes",
        "1000000",
        "--load-retries",
        "0",
        "--no-exit-on-load-error",
    ]
    async with AsyncExitStack() as stack:
        single = await stack.enter_async_context(_started(*arguments, environment=TRACES))
        yield single, await stack.enter_async_context(_started("--workers", "2"))


@asynccontextmanager
async def _started(
    *arguments: str | Path, environment: Mapping[str, str] | None = None
) -> AsyncIterator[Observed]:
    quick = ("--grpc-port", "0", "--rest-port", "0", "--drain-delay", "0")
    with Triglot(*arguments, *quick, environment=environment) as server:
        grpc_port, rest_port = await asyncio.to_thread(server.ports)
        timeout = aiohttp.ClientTimeout(SECONDS)
        async with (
            grpc.aio.insecure_channel(f"127.0.0.1:{grpc_port}") as channel,
            aiohttp.ClientSession(timeout=timeout) as session,
        ):
            yield Observed(channel, session, rest_port)
        await asyncio.to_thread(server.stop)


@cache
def scraped() -> Series:
    """What both show after calls of all kinds."""

    async def scrape(folder: Path) -> Series:
        async with observed(folder) as (server, with_workers):
            await server.calls_of_all_kinds()
            return series_of([*await server.families(), *await with_workers.families()])

    with TemporaryDirectory() as folder:
        return asyncio.run(scrape(Path(folder)))
