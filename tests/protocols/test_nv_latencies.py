"""Triton's histogram and summaries of latencies at /metrics, as `--metrics-config` and `model_metrics` ask for."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as classic

import triglot
from tests.protocols.control_clients import ask, put, put_config
from tests.protocols.kserve_served import Served, serve_models
from tests.served_models import Arrays, Function, ensemble, serving, step, twice, twice_on_loop
from tests.traced_models import Client

READERS: dict[str, Any] = {"text/plain": classic, "application/openmetrics-text": open_metrics}
FIRST = "nv_inference_first_response_histogram_ms"
PARTS = ("request", "queue", "compute_input", "compute_infer", "compute_output")
SUMMARIES = [f"nv_inference_{part}_summary_us" for part in PARTS]
CACHE_SUMMARIES = ["nv_cache_hit_summary_per_model", "nv_cache_miss_summary_per_model"]
HISTOGRAM: dict[str, Any] = {"metrics_config": "histogram_latencies=true"}
SUMMARY: dict[str, Any] = {"metrics_config": "summary_latencies=true"}
Found = dict[tuple[str, str, str], float]
"""Values by name, model, and limit or quantile, which both formats agree on."""


def read(text: str, accept: str) -> Found:
    """What a page says of models' Triton metrics; failures, by reason, are omitted."""
    samples = [sample for family in READERS[accept](text) for sample in family.samples]
    # The older parser names counters as OpenMetrics has them.
    return {
        (
            sample.name.removesuffix("_total"),
            sample.labels["model"],
            sample.labels.get("le", sample.labels.get("quantile", "")),
        ): sample.value
        for sample in samples
        if sample.name.startswith("nv_") and "model" in sample.labels and "reason" not in sample.labels
    }


def same(older: str, newer: str) -> Found:
    """What both texts say."""
    first, other = (read(text, accept) for text, accept in zip((older, newer), READERS, strict=True))
    assert first.keys() == other.keys()
    assert str(first) == str(other)  # Not a number is no number.
    return first


async def metrics(session: aiohttp.ClientSession) -> Found:
    texts = []
    for accept in READERS:
        async with session.get("/metrics", headers={"Accept": accept}) as answer:
            assert answer.content_type == accept
            texts.append(await answer.text())
    return same(*texts)


async def of(served: Served) -> Found:
    bodies = [await served.rest.call("GET", "/metrics", headers={"Accept": accept}) for accept in READERS]
    return same(*(body.decode() for _, _, body in bodies))


def limits(found: Found, model: str) -> list[str]:
    return [limit for name, of_model, limit in found if (name, of_model) == (f"{FIRST}_bucket", model)]


def first(found: Found, model: str) -> tuple[float, float]:
    """How many first responses there were, and their milliseconds."""
    assert found[f"{FIRST}_bucket", model, "+Inf"] == found[f"{FIRST}_count", model, ""]
    return found[f"{FIRST}_count", model, ""], found[f"{FIRST}_sum", model, ""]


def slow_stream(inputs: Arrays) -> Iterator[dict[str, Any]]:
    """As many answers as `x` says, and takes 0.2 s after each."""
    for _ in range(int(inputs["x"][0])):
        yield {"y": inputs["x"]}
        time.sleep(0.2)
    if inputs["x"][0] < 0:
        raise triglot.InvalidArgument("no such count")


def failing(inputs: Arrays) -> dict[str, Any]:
    raise ValueError("broken")


async def test_first_responses_of_all_kinds_of_models() -> None:
    models: dict[str, triglot.Model] = {
        "thread": Function(twice),
        "loop": Function(twice_on_loop),
        "batched": Function(twice, dynamic_batching=triglot.DynamicBatching(max_batch_size=4)),
        "stream": Function(slow_stream),
        "failing": Function(failing),
        "both": ensemble(step("thread", "x", "h"), step("loop", "h", "y")),
    }
    async with (
        serving(models, **HISTOGRAM) as it,
        aiohttp.ClientSession(f"http://127.0.0.1:{it.server.rest_port}") as session,
        grpc.aio.insecure_channel(f"127.0.0.1:{it.server.grpc_port}") as channel,
    ):
        client = Client(it.server, session, channel)
        found = await metrics(session)
        for name in models:
            assert limits(found, name) == ["100.0", "500.0", "2000.0", "5000.0", "+Inf"]
            assert first(found, name) == (0, 0)
        for name in ("thread", "loop", "batched", "both"):
            await client.infer(name, 1)
        assert await client.stream("stream", 2) == 2
        await client.infer("failing", 1, status=500)
        # Wrong requests have failed before, and so they do in Triton.
        status, _ = await client.post("/v2/models/thread/infer", {"inputs": []})
        assert status == 400
        found = await metrics(session)
        counts = {name: first(found, name)[0] for name in models}
        # The ensemble's steps have their own.
        assert counts == {"thread": 2, "loop": 2, "batched": 1, "stream": 1, "failing": 1, "both": 1}
        for name in ("thread", "loop", "batched", "both"):
            milliseconds = found["nv_inference_request_duration_us", name, ""] / 1000
            assert first(found, name)[1] == pytest.approx(milliseconds, abs=0.01)
        total = found["nv_inference_request_duration_us", "stream", ""] / 1000
        assert 0 < first(found, "stream")[1] < total / 2
        # A stream of no answers has no first one, but for an error.
        await client.stream("stream", 0)
        assert first(await metrics(session), "stream")[0] == 1
        await client.stream("stream", -1)
        assert first(await metrics(session), "stream")[0] == 2


BUCKETS = f"""
model_metrics {{
  metric_control: [
    {{
      metric_identifier: {{ family: "{FIRST}" }}
      histogram_options: {{ buckets: [ %s ] }}
    }}
  ]
}}
"""


async def test_buckets_are_the_configuration_s(tmp_path: Path) -> None:
    for name in ("a", "b"):
        put(tmp_path / name / "1")
    put_config(tmp_path / "a", BUCKETS % "-1, 0.0, 1, 2.5")
    async with serve_models([tmp_path], **HISTOGRAM) as served:
        await ask(served, "a")
        # The parser of OpenMetrics wants no sum where a limit is negative; Triton has one.
        _, _, body = await served.rest.call("GET", "/metrics")
        found = read(body.decode(), "text/plain")
        assert limits(found, "a") == ["-1.0", "0.0", "1.0", "2.5", "+Inf"]
        assert limits(found, "b") == ["100.0", "500.0", "2000.0", "5000.0", "+Inf"]
        assert (first(found, "a")[0], first(found, "b")[0]) == (1, 0)


async def test_other_buckets_after_a_reload(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    put_config(tmp_path / "m", BUCKETS % "1, 2")
    options = {**HISTOGRAM, "model_control_mode": "explicit", "load_model": "m"}
    async with serve_models([tmp_path], **options) as served:
        assert limits(await of(served), "m") == ["1.0", "2.0", "+Inf"]
        put_config(tmp_path / "m", BUCKETS % "3")
        status, _, _ = await served.rest.call("POST", "/v2/repository/models/m/load", b"{}")
        assert status == 200
        assert limits(await of(served), "m") == ["3.0", "+Inf"]


async def test_a_metric_without_a_choice_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    put(tmp_path / "m" / "1")
    put_config(tmp_path / "m", (BUCKETS % "1").replace(FIRST, "nv_inference_count"))
    with caplog.at_level(logging.WARNING):
        async with serve_models([tmp_path], **HISTOGRAM) as served:
            assert limits(await of(served), "m") == ["100.0", "500.0", "2000.0", "5000.0", "+Inf"]
    assert f"metric_identifier.family: expected {FIRST}, got 'nv_inference_count', ignored" in caplog.text


async def test_nothing_of_it_is_exported_by_default(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    put_config(tmp_path / "m", BUCKETS % "1")
    async with serve_models([tmp_path]) as served:
        await ask(served, "m")
        names = {name for name, *_ in await of(served)}
        assert not [name for name in names if "histogram" in name or "summary" in name]


# --- summaries ---


async def test_summaries_match_the_counters(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    async with serve_models([tmp_path], **SUMMARY) as served:
        empty = await of(served)
        for name in SUMMARIES:
            assert [quantile for found, _, quantile in empty if found == name] == [
                "0.5",
                "0.9",
                "0.95",
                "0.99",
                "0.999",
            ]
            assert math.isnan(empty[name, "m", "0.5"])
            assert (empty[f"{name}_count", "m", ""], empty[f"{name}_sum", "m", ""]) == (0, 0)
        for _ in range(20):
            await ask(served, "m")
        found = await of(served)
        for part, name in zip(PARTS, SUMMARIES, strict=True):
            assert found[f"{name}_count", "m", ""] == found["nv_inference_request_success", "m", ""] == 20
            total = found[f"nv_inference_{part}_duration_us", "m", ""]
            assert found[f"{name}_sum", "m", ""] == pytest.approx(total, abs=1)
            values = [found[name, "m", quantile] for quantile in ("0.5", "0.9", "0.95", "0.99", "0.999")]
            assert values == sorted(values)
            assert values[0] <= total / 10 * 1.02 + 1
        names = {name for name, *_ in found}
        assert not names & set(CACHE_SUMMARIES)
        assert f"{FIRST}_count" not in names


async def test_quantiles_may_be_chosen(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    options: dict[str, Any] = {"metrics_config": "summary_latencies=true,summary_quantiles=0.25:0.05,1:0.01"}
    async with serve_models([tmp_path], **options) as served:
        await ask(served, "m")
        found = await of(served)
        assert {quantile for name, _, quantile in found if name == SUMMARIES[0]} == {"0.25", "1.0"}
        total = found["nv_inference_request_summary_us_sum", "m", ""]
        # Within 1 % or a microsecond of the value; its sum is rounded to whole ones.
        assert found[SUMMARIES[0], "m", "0.25"] == pytest.approx(total, abs=max(0.01 * total, 1) + 0.51)


async def test_summaries_of_a_response_cache(tmp_path: Path) -> None:
    """As in Triton: of hits and misses, and not of the whole request."""
    put(tmp_path / "m" / "1")
    put_config(tmp_path / "m", "response_cache { enable: true }")
    async with serve_models([tmp_path], response_cache_bytes=1 << 20, **SUMMARY) as served:
        for _ in range(3):
            await ask(served, "m")
        found = await of(served)
        counts = {name: found.get((f"{name}_count", "m", "")) for name in (*SUMMARIES, *CACHE_SUMMARIES)}
        assert list(counts.values()) == [None, 3, 1, 1, 1, 2, 1]
        total = found["nv_cache_hit_duration_per_model", "m", ""]
        assert found["nv_cache_hit_summary_per_model_sum", "m", ""] == pytest.approx(total, abs=1)


async def test_failed_requests_are_in_no_summary() -> None:
    async with (
        serving(
            {"failing": Function(failing)}, metrics_config="summary_latencies=true,histogram_latencies=true"
        ) as it,
        aiohttp.ClientSession(f"http://127.0.0.1:{it.server.rest_port}") as session,
        grpc.aio.insecure_channel(f"127.0.0.1:{it.server.grpc_port}") as channel,
    ):
        await Client(it.server, session, channel).infer("failing", 1, status=500)
        found = await metrics(session)
        assert found["nv_inference_request_summary_us_count", "failing", ""] == 0
        assert first(found, "failing")[0] == 1


async def test_without_counters_of_latencies(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    put_config(tmp_path / "m", "response_cache { enable: true }")
    options: dict[str, Any] = {"metrics_config": "counter_latencies=false", "response_cache_bytes": 1 << 20}
    async with serve_models([tmp_path], **options) as served:
        await ask(served, "m")
        found = await of(served)
        names = {name for name, *_ in found}
        assert names == {
            "nv_inference_request_success",
            "nv_inference_count",
            "nv_inference_exec_count",
            "nv_inference_pending_request_count",
            "nv_model_load_duration_secs",
        }
        assert found["nv_inference_request_success", "m", ""] == 1
