"""What workers have counted is added up, wherever it is read, and stays so when workers go."""

from __future__ import annotations

import json
import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from tests.process import SECONDS
from tests.protocol_clients.channel import rpc
from tests.protocol_clients.kserve import infer
from tests.protocol_clients.rest import Rest
from tests.waiting import wait_until
from tests.workers.shared_ports import TRANSPORTS, Workers
from triglot.pb.kserve import inference_pb2 as pb

LABELS = '{code="OK",entrypoint="GRPC",method="ModelInfer",model="who",protocol="kserve",version="1"}'
REQUESTS = f"triglot_requests_total{LABELS}"


def call_each(workers: Workers, first: int, second: int) -> int:
    """So many more calls to each; how many calls there were in all, those of the search for workers, too."""
    before = int(workers.metrics().get(REQUESTS, 0))
    calls = iter((first, second))

    def call(channel: grpc.Channel) -> int:
        count = next(calls)
        for _ in range(count):
            infer(channel, "who")
        return count

    made = sum(workers.on_each(call))
    assert made == first + second
    after = int(workers.metrics()[REQUESTS])
    assert after >= before + made + 2
    return after


def statistics(channel: grpc.Channel) -> Any:
    call = rpc(channel, "ModelStatistics", pb.ModelStatisticsResponse)
    (stats,) = call(pb.ModelStatisticsRequest(name="who"), timeout=SECONDS).model_stats
    return stats


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_workers_report_the_same_sums(tmp_path: Path, transport: str) -> None:
    options = ("--grpc-transport", transport, "--monitoring-path", "/tf")
    with Workers(tmp_path, *options) as workers:
        total = call_each(workers, 30, 20)
        metrics = workers.metrics()
        assert metrics['triglot_worker_up{worker="1"}'] == metrics['triglot_worker_up{worker="2"}'] == 1
        assert metrics['triglot_worker_restarts_total{worker="1"}'] == 0
        assert metrics['nv_inference_count{model="who",version="1"}'] == total
        assert metrics['triglot_model_ready{model="who",version="1"}'] == 1
        assert metrics['triglot_compute_seconds_count{model="who",version="1"}'] == total
        by_method = LABELS.replace('code="OK",', "")
        assert metrics[f"triglot_request_seconds_count{by_method}"] == total
        last = [value for name, value in metrics.items() if name.startswith("triglot_request_seconds_bucket")]
        assert max(last) == total
        # Both processes are in it: none of ours is that small.
        assert metrics["process_resident_memory_bytes"] > 80e6

        def counts(channel: grpc.Channel) -> tuple[int, ...]:
            stats = statistics(channel)
            batches = sum(batch.compute_infer.count for batch in stats.batch_stats)
            return stats.inference_count, stats.execution_count, stats.inference_stats.success.count, batches

        for counts_of_workers in workers.on_each(counts):
            assert len(set(counts_of_workers)) == 1
            # The search for a connection to each takes calls, too.
            assert counts_of_workers[0] > total
        document = workers.overview()
        (row,) = document["models"]
        assert row["requests"] == document["totals"]["requests"] == row["protocols"]["kserve"] >= total
        assert row["latency_ms"]["p50"] <= row["latency_ms"]["p99"]
        assert sum(document["history"]["requests"]["kserve"]) <= row["requests"]
        wait_until(lambda: sum(workers.overview()["history"]["requests"]["kserve"]) == row["requests"])
        stats = json.loads(workers.get("/v2/models/who/stats"))["model_stats"][0]
        assert stats["inference_count"] == row["requests"]


def test_tensorflow_serving_s_metrics_are_added(tmp_path: Path) -> None:
    with Workers(tmp_path, "--monitoring-path", "/tf") as workers:
        body = {"inputs": {"x": [1]}}
        seen: set[int] = set()
        calls = 0
        while len(seen) < 2:
            status, reply = workers.rest.post("/v1/models/who:predict", body)
            assert status == 200
            seen.add(reply["outputs"][0])
            calls += 1
        text = workers.get("/tf")
        assert f':tensorflow:serving:request_count{{model_name="who",status="OK"}} {calls}\n' in text
        assert f',entrypoint="REST",le="+Inf"}} {calls}\n' in text


def test_sums_do_not_become_smaller_when_workers_go(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        total = call_each(workers, 10, 10)
        os.kill(workers.pids()[0], signal.SIGKILL)
        workers.wait_for_serving(3)
        assert workers.metrics()[REQUESTS] == total
        more = call_each(workers, 3, 3)
        workers.signal(signal.SIGHUP)
        workers.stderr.wait_for("rolling restart: all workers are replaced\n")
        metrics = workers.metrics()
        assert metrics[REQUESTS] == more
        restarts = [metrics[f'triglot_worker_restarts_total{{worker="{number}"}}'] for number in (1, 2)]
        assert restarts == [2, 1]
        # Of what is loaded, and not of what was.
        assert 'nv_inference_count{model="who",version="1"}' in metrics
        workers.stop()


def test_series_and_names_of_the_page(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        total = call_each(workers, 5, 5)
        assert 'data-name="*qps"' in workers.get("/grps/v1/monitor/metrics")

        def seconds() -> float:
            series = json.loads(workers.get("/grps/v1/monitor/series?name=*qps"))
            assert series["label"] == "trend"
            assert len(series["data"]) == 174
            return float(sum(value for _, value in series["data"][-60:]))

        wait_until(lambda: seconds() == total)
        cdf = json.loads(workers.get("/grps/v1/monitor/series?name=*latency_cdf(ms)"))
        assert (cdf["label"], len(cdf["data"])) == ("cdf", 20)
        assert workers.get("/grps/v1/monitor/series?name=nothing") == "key not found"


def test_any_worker_serves_the_page_of_a_model(tmp_path: Path) -> None:
    with Workers(tmp_path) as workers:
        rest = Rest(workers.rest_port)
        for _ in range(10):  # Connections go to either.
            status, document = rest.get("/grps/v1/monitor/model?name=who")
            assert (status, document["serves"]["version"]) == (200, 1)
            status, document = rest.get("/grps/v1/monitor/overview")
            assert (status, document["server"]["grpc_port"]) == (200, workers.grpc_port)


def test_histograms_are_added_and_summaries_are_per_worker(tmp_path: Path) -> None:
    settings = "histogram_latencies=true,summary_latencies=true"
    with Workers(tmp_path, "--metrics-config", settings) as workers:
        total = call_each(workers, 3, 2)
        metrics = workers.metrics()
        of_model = '{model="who",version="1"}'
        assert metrics[f"nv_inference_first_response_histogram_ms_count{of_model}"] == total
        last = 'nv_inference_first_response_histogram_ms_bucket{le="+Inf",model="who",version="1"}'
        assert metrics[last] == total
        counts = [
            metrics[f'nv_inference_request_summary_us_count{{model="who",version="1",worker="{number}"}}']
            for number in (1, 2)
        ]
        assert min(counts) >= 2
        assert sum(counts) == total
        median = 'nv_inference_request_summary_us{model="who",quantile="0.5",version="1",worker="2"}'
        assert metrics[median] > 0


def test_exemplars_are_of_any_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "console")
    with Workers(tmp_path) as workers:
        total = call_each(workers, 3, 2)
        url = f"http://127.0.0.1:{workers.rest_port}/metrics"
        request = urllib.request.Request(url, headers={"Accept": "application/openmetrics-text"})
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            parse: Any = text_string_to_metric_families  # It has no types.
            families = {family.name: family for family in parse(answer.read().decode())}
        for name in ("triglot_request_seconds", "triglot_queue_seconds", "triglot_compute_seconds"):
            samples = [sample for sample in families[name].samples if sample.labels["model"] == "who"]
            (last,) = [sample.value for sample in samples if sample.labels.get("le") == "+Inf"]
            assert last == total
            examples = [sample.exemplar for sample in samples if sample.exemplar is not None]
            assert examples
            assert len({example.labels["trace_id"] for example in examples}) == len(examples)
