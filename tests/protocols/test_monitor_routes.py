"""The monitor's routes over real sockets: Prometheus, grps' series and page, and what the page reads."""

from __future__ import annotations

import gzip
import html
import json
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import grpc.aio
import pytest
from prometheus_client.parser import text_string_to_metric_families

import triglot
from tests.transports.live import Live, live, request
from tests.waiting import until
from triglot.core.tensor import Array
from triglot.protocols.monitor.routes import OVERVIEW, PAGE, SERIES
from triglot.telemetry.store import Telemetry

FLOAT = b"\0\0\x80\x3f"


class Echo(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Array]:
        if inputs["x"].size > 1:
            raise RuntimeError("too many")
        return {"y": inputs["x"]}


@pytest.fixture
async def server() -> AsyncIterator[Live]:
    async with live({"echo": Echo()}, protocols="kserve,tfserving,grps") as running:
        yield running


class Reply:
    def __init__(self, status: int, headers: Mapping[str, str], body: bytes) -> None:
        self.status = status
        self.headers = headers
        self.body = body

    @property
    def json(self) -> Any:
        return json.loads(self.body)


async def get(server: Live, path: str, method: str = "GET", **headers: str) -> Reply:
    url = f"http://127.0.0.1:{server.server.rest_port}{path}"
    named = {name.replace("_", "-"): value for name, value in ({"Accept_Encoding": "identity"} | headers).items()}
    session = server.session
    async with session.request(method, url, headers=named, auto_decompress=False) as response:
        return Reply(response.status, response.headers, await response.read())


def finish_second(telemetry: Telemetry) -> None:
    """What the clock would do in a second at most."""
    telemetry.tick(telemetry._ticked + 1)


async def call_each_protocol(server: Live) -> None:
    await server.infer(request("echo", FLOAT))
    with pytest.raises(grpc.aio.AioRpcError):
        await server.infer(request("echo", FLOAT * 2))
    predict = server.url.removesuffix("/v2") + "/v1/models/echo:predict"
    async with server.session.post(predict, json={"instances": [1.0]}) as response:
        assert response.status == 200
    with pytest.raises(grpc.aio.AioRpcError):
        await server.infer(request("nobody", FLOAT))
    # gRPC's clients may know of an error before the server has counted it.
    await until(lambda: not server.server.telemetry.in_flight)


async def test_metrics_count_the_calls(server: Live) -> None:
    await call_each_protocol(server)
    reply = await get(server, "/metrics")
    assert reply.status == 200
    assert reply.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
    families = text_string_to_metric_families(reply.body.decode())
    samples = [sample for family in families for sample in family.samples]
    names = ("protocol", "entrypoint", "model", "version", "code")
    requests = {
        tuple(sample.labels[name] for name in names): sample.value
        for sample in samples
        if sample.name == "triglot_requests_total" and sample.labels["method"] in ("ModelInfer", "predict")
    }
    assert requests == {
        ("kserve", "GRPC", "echo", "1", "OK"): 1,
        ("kserve", "GRPC", "echo", "1", "INTERNAL"): 1,
        ("tfserving", "REST", "echo", "1", "OK"): 1,
        ("kserve", "GRPC", "nobody", "", "NOT_FOUND"): 1,
    }
    state = {sample.name: sample.value for sample in samples if sample.labels == {"model": "echo", "version": "1"}}
    assert state["triglot_model_ready"] == 1
    assert state["triglot_queue_depth"] == 0
    assert state["triglot_compute_seconds_count"] == 3
    assert state["triglot_batch_size_sum"] == 3


async def test_metrics_in_the_form_that_is_asked_for(server: Live) -> None:
    reply = await get(server, "/metrics", Accept="application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert reply.headers["Content-Type"].startswith("application/openmetrics-text; version=1.0.0; charset=utf-8")
    assert reply.body.endswith(b"# EOF\n")
    assert "Content-Encoding" not in (await get(server, "/metrics", Accept_Encoding="gzip;q=0")).headers
    zipped = await get(server, "/metrics", Accept_Encoding="deflate, GZIP;q=0.5")
    assert (zipped.headers["Content-Encoding"], zipped.headers["Vary"]) == ("gzip", "Accept, Accept-Encoding")
    assert gzip.decompress(zipped.body).startswith(b"# HELP ")
    head = await get(server, "/metrics", "HEAD")
    assert (head.status, head.body) == (200, b"")


async def test_the_series_of_calls(server: Live) -> None:
    await call_each_protocol(server)
    finish_second(server.server.telemetry)
    reply = await get(server, f"{SERIES}?name={quote('*qps')}")
    assert reply.headers["Content-Type"].startswith("application/json")
    assert reply.json["label"] == "trend"
    assert [at for at, _ in reply.json["data"]] == list(range(174))
    assert sum(value for _, value in reply.json["data"]) >= 1
    reply = await get(server, f"{SERIES}?name=*latency_cdf(ms)")
    assert reply.json["label"] == "cdf"
    assert [x for x, _ in reply.json["data"]] == [*range(10, 90, 10), *range(90, 102)]


@pytest.mark.parametrize("query", ["", "?", "?name", "?name=", "?name=nobody", "?name=%ff&name=*qps", "?nom=*qps"])
async def test_an_unknown_name(server: Live, query: str) -> None:
    reply = await get(server, SERIES + query)
    assert (reply.status, reply.body) == (200, b"key not found")
    assert reply.headers["Content-Type"].startswith("text/plain")


async def test_the_page_names_every_metric(server: Live) -> None:
    name = '<script>"&'
    server.server.telemetry.monitor.add(name, "avg", 1)
    finish_second(server.server.telemetry)
    reply = await get(server, PAGE)
    assert reply.headers["Content-Type"] == "text/html; charset=utf-8"
    text = reply.body.decode()
    for metric in ("*qps", "*latency_cdf(ms)", name):
        assert f'<li data-name="{html.escape(metric)}">{html.escape(metric)}</li>' in text
    assert name not in text
    points = (await get(server, f"{SERIES}?name={quote(name)}")).json["data"]
    assert 1.0 in [value for _, value in points]


async def test_the_overview(server: Live) -> None:
    await call_each_protocol(server)
    finish_second(server.server.telemetry)
    document = (await get(server, OVERVIEW)).json
    assert document["server"]["ready"] is True
    assert document["server"]["uptime_seconds"] > 0
    assert document["totals"] == {"requests": 4, "failures": 2, "in_flight": 0, "queue_depth": 0}
    assert document["protocols"]["kserve"] == {"requests": 3, "failures": 2}
    assert document["protocols"]["tfserving"] == {"requests": 1, "failures": 0}
    assert document["protocols"]["grps"] == {"requests": 0, "failures": 0}
    (model,) = document["models"]
    assert {name: model[name] for name in ("name", "version", "state", "ready", "platform", "reason")} == {
        "name": "echo",
        "version": 1,
        "state": "READY",
        "ready": True,
        "platform": "python",
        "reason": "",
    }
    assert (model["requests"], model["failures"]) == (3, 1)
    assert model["protocols"] == {"kserve": 2, "tfserving": 1}
    assert (model["queue_depth"], model["in_flight"], model["mean_batch_size"]) == (0, 0, 1)
    assert 0 < model["latency_ms"]["p50"] <= model["latency_ms"]["p99"]
    assert model["queue_ms"] >= 0 <= model["compute_ms"]
    assert model["last_inference"] > 1e9
    history = document["history"]
    assert sum(history["requests"]["kserve"]) == 3
    assert sum(history["failures"]) == 2
    lists = [value for value in history.values() if isinstance(value, list)]
    assert {len(value) for value in [*lists, *history["requests"].values()]} == {history["seconds"]}
    assert {"name": "*qps", "value": 4} in document["metrics"] or history["seconds"] > 1


async def test_the_overview_of_a_server_that_was_not_called(server: Live) -> None:
    document = (await get(server, OVERVIEW)).json
    (model,) = document["models"]
    assert model["latency_ms"] == {"p50": None, "p90": None, "p99": None}
    assert (model["queue_ms"], model["mean_batch_size"], model["last_inference"]) == (None, None, None)
    assert document["totals"]["requests"] == 0
