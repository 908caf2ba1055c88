"""Exemplars at /metrics: the trace that a bucket names is the one that a collector of spans has."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import grpc.aio
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.served_models import Function, serving, twice
from tests.span_receivers import SERVER, Received, grpc_receiver
from tests.traced_models import Client

FAMILIES = ("triglot_request_seconds", "triglot_queue_seconds", "triglot_compute_seconds")
FIRST_RESPONSE = "nv_inference_first_response_histogram_ms"
TRACE = "0af7651916cd43dd8448eb211c80319c"


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Received]:
    """A collector of the spans of servers that are started from here on."""
    with grpc_receiver() as (url, received):
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", url)
        monkeypatch.setenv("OTEL_TRACES_EXPORTER", "otlp")
        yield received


@asynccontextmanager
async def one_model() -> AsyncIterator[Client]:
    async with (
        serving({"m": Function(twice)}, metrics_config="histogram_latencies=true") as it,
        aiohttp.ClientSession(f"http://127.0.0.1:{it.server.rest_port}") as session,
        grpc.aio.insecure_channel(f"127.0.0.1:{it.server.grpc_port}") as channel,
    ):
        yield Client(it.server, session, channel)


async def page(client: Client, accept: str) -> str:
    async with client.session.get("/metrics", headers={"Accept": accept}) as answer:
        assert answer.content_type == accept
        return await answer.text()


async def exemplars(client: Client) -> dict[str, Any]:
    """The only one of each family."""
    found: dict[str, Any] = {}
    parse: Any = text_string_to_metric_families  # It has no types.
    for family in parse(await page(client, "application/openmetrics-text")):
        for sample in family.samples:
            if sample.exemplar is not None:
                assert sample.name == f"{family.name}_bucket"
                assert sample.exemplar.value <= float(sample.labels["le"])
                assert family.name not in found
                found[family.name] = sample.exemplar
    return found


async def test_they_name_the_span_of_a_call(collector: Received) -> None:
    async with one_model() as client:
        assert await exemplars(client) == {}
        await client.infer("m", 1)
        found = await exemplars(client)
        assert found.keys() == {*FAMILIES, FIRST_RESPONSE}
        assert "trace_id" not in await page(client, "text/plain")
    (span,) = [received for received in await asyncio.to_thread(collector.wait_for, 3) if received.kind == SERVER]
    for name, exemplar in found.items():
        assert exemplar.labels == {"trace_id": span.trace, "span_id": span.id}, name
        assert span.start / 1e9 - 0.1 <= float(exemplar.timestamp) <= span.end / 1e9 + 0.1
    latency = found["triglot_request_seconds"].value
    assert latency == pytest.approx((span.end - span.start) / 1e9, abs=0.005)
    assert found[FIRST_RESPONSE].value == pytest.approx(latency * 1e3)


async def test_only_sampled_calls_are_exemplars(collector: Received, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    async with one_model() as client:
        await client.infer("m", 1)
        assert await exemplars(client) == {}
        tensor = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
        sampled = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        async with client.session.post("/v2/models/m/infer", json={"inputs": [tensor]}, headers=sampled) as answer:
            assert answer.status == 200
        found = await exemplars(client)
        assert found.keys() == {*FAMILIES, FIRST_RESPONSE}
        assert {exemplar.labels["trace_id"] for exemplar in found.values()} == {TRACE}
