"""The store of what happened: what it keeps, and how little a client can make it keep."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from tests.recorded_calls import record_call
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.protocols.tfserving.metrics import metrics_page, print_page
from triglot.telemetry.calls import MAX_KINDS, MAX_MODEL_NAMES, MAX_NAME, RECENT_CALLS, RECENT_SECONDS, Endpoint
from triglot.telemetry.monitor import Monitor
from triglot.telemetry.store import Telemetry


def call_of(model: str, version: int = 0, batch: int = 0, queue: float = 0.0, compute: float = 0.0) -> Call:
    call = Call()
    call.model_name, call.model_version = model, version
    call.batch_size, call.queue_seconds, call.compute_seconds = batch, queue, compute
    return call


def predict(telemetry: Telemetry) -> Endpoint:
    return telemetry.endpoint("tfserving", "GRPC", "Predict", inference=True)


def test_an_endpoint_is_made_once() -> None:
    telemetry = Telemetry()
    assert predict(telemetry) is predict(telemetry)
    assert predict(telemetry) is not telemetry.endpoint("tfserving", "REST", "Predict", inference=True)
    assert len(telemetry.endpoints()) == 2


def test_what_is_kept_of_calls() -> None:
    telemetry = Telemetry()
    endpoint = predict(telemetry)
    record_call(endpoint, call_of("m", 3, batch=4, queue=0.5, compute=0.25), Code.OK, 1.0, 0.125, 100, 10)
    record_call(endpoint, call_of("m", 3, batch=4, queue=0.5, compute=0.25), Code.OK, 2.0, 0.125, 200, 20)
    record_call(endpoint, call_of("m", 3), Code.INVALID_ARGUMENT, 0.5, 0.0, 7, 0)
    (_, ok, done), (_, bad, failed) = telemetry.calls()
    assert ok == ("m", 3, Code.OK)
    assert bad == ("m", 3, Code.INVALID_ARGUMENT)
    assert (done.latency.count, done.latency.sum) == (2, 3e6)
    assert (done.bytes_in, done.bytes_out) == (300, 30)
    assert done.batches == {4: 2}
    assert done.queue is not None
    assert done.compute is not None
    assert done.codec is not None
    assert (done.queue.sum, done.compute.sum, done.codec.sum) == (1e6, 5e5, 2.5e5)
    # It was never executed.
    assert (failed.latency.count, failed.queue, failed.compute, failed.batches) == (1, None, None, {})
    model = telemetry.models()["m", 3]
    assert model.sums() == (3, 1, 2, 0.5)
    assert model.recent_executions == (2, 0.5)
    assert model.recent_latencies() == [0.5, 1.0, 2.0]


def test_calls_that_run_no_model_are_no_traffic() -> None:
    telemetry = Telemetry()
    endpoint = telemetry.endpoint("kserve", "REST", "ready", inference=False)
    record_call(endpoint, call_of("m", 1), Code.OK, 1.0, 0.0, 0, 2)
    endpoint.in_flight += 1
    assert telemetry.in_flight == 0
    assert telemetry.traffic() == {}
    assert [(kind.model, stats.codec, stats.bytes_out) for _, kind, stats in telemetry.calls()] == [("m", None, 2)]


def test_recent_calls_are_few() -> None:
    now = 0.0
    telemetry = Telemetry(clock=lambda: now)
    endpoint = predict(telemetry)
    for _ in range(RECENT_CALLS + 1):
        record_call(endpoint, call_of("m", 1), Code.OK, 9.0, 0.0, 0, 0)
    model = telemetry.models()["m", 1]
    assert len(model.recent_latencies()) == RECENT_CALLS
    for second in range(1, RECENT_SECONDS + 1):
        now = float(second)
        telemetry.tick(now)
    assert model.request_rate == (RECENT_CALLS + 1) / RECENT_SECONDS
    record_call(endpoint, call_of("m", 1), Code.OK, 0.5, 0.0, 0, 0)
    telemetry.tick(RECENT_SECONDS + 1.0)
    assert model.request_rate == 1 / RECENT_SECONDS
    assert model.recent_latencies() == [0.5]


def test_made_up_names_are_bounded() -> None:
    telemetry = Telemetry()
    endpoint = predict(telemetry)
    record_call(endpoint, call_of("x" * (MAX_NAME + 1)), Code.NOT_FOUND, 1.0, 0.0, 0, 0)
    for number in range(MAX_MODEL_NAMES + 100):
        record_call(endpoint, call_of(f"made-up-{number}"), Code.NOT_FOUND, 1.0, 0.0, 0, 0)
    names = {kind.model for _, kind, _ in telemetry.calls()}
    assert len(names) <= MAX_MODEL_NAMES + 1
    assert max(map(len, names)) <= MAX_NAME
    assert sum(stats.latency.count for _, _, stats in telemetry.calls()) == MAX_MODEL_NAMES + 101
    # A version that was found is no invention.
    record_call(endpoint, call_of("real", 1), Code.OK, 1.0, 0.0, 0, 0)
    assert "real" in {kind.model for _, kind, _ in telemetry.calls()}


def test_what_is_long_unused_is_forgotten() -> None:
    last = MAX_KINDS + 300
    telemetry = Telemetry()
    endpoint, other = predict(telemetry), telemetry.endpoint("kserve", "GRPC", "ModelInfer", inference=True)
    record_call(other, call_of("steady", 1), Code.OK, 1.0, 0.0, 0, 0)
    for version in range(1, last + 1):
        record_call(endpoint, call_of("m", version), Code.OK, 1.0, 0.0, 0, 0)
        record_call(other, call_of("steady", 1), Code.OK, 1.0, 0.0, 0, 0)
    kept = [kind for _, kind, _ in telemetry.calls()]
    assert telemetry.kinds == len(kept) <= MAX_KINDS
    assert ("m", last, Code.OK) in kept
    assert ("m", 1, Code.OK) not in kept
    assert set(telemetry.models()) == {(kind.model, kind.version) for kind in kept}
    assert telemetry.models()["steady", 1].requests == last + 1
    assert telemetry.traffic()["tfserving"].requests == last


def test_tensorflow_servings_metrics() -> None:
    telemetry = Telemetry()
    endpoint = predict(telemetry)
    # Whichever version answers, they are one model's.
    record_call(endpoint, call_of("m", 1), Code.OK, 5e-6, 0.0, 0, 0)
    record_call(endpoint, call_of("m", 2), Code.OK, 15e-6, 0.0, 0, 0)
    record_call(endpoint, call_of("m"), Code.NOT_FOUND, 1.0, 0.0, 0, 0)
    # None of these is counted by TensorFlow Serving.
    record_call(
        telemetry.endpoint("tfserving", "GRPC", "GetModelStatus", inference=False),
        call_of("m"),
        Code.OK,
        1.0,
        0.0,
        0,
        0,
    )
    record_call(
        telemetry.endpoint("kserve", "GRPC", "ModelInfer", inference=True), call_of("m"), Code.OK, 1.0, 0.0, 0, 0
    )
    lines = print_page(metrics_page(telemetry)).splitlines()
    labels = 'model_name="m",API="Predict",entrypoint="GRPC"'
    for line in (
        "# TYPE :tensorflow:serving:request_count counter",
        ':tensorflow:serving:request_count{model_name="m",status="OK"} 2',
        ':tensorflow:serving:request_count{model_name="m",status="NOT_FOUND"} 1',
        "# TYPE :tensorflow:serving:request_latency histogram",
        f':tensorflow:serving:request_latency_bucket{{{labels},le="10"}} 1',
        f':tensorflow:serving:request_latency_bucket{{{labels},le="18"}} 2',
        f':tensorflow:serving:request_latency_bucket{{{labels},le="+Inf"}} 2',
        f":tensorflow:serving:request_latency_sum{{{labels}}} 20",
        f":tensorflow:serving:request_latency_count{{{labels}}} 2",
    ):
        assert line in lines
    # The two kinds of count, a histogram of 34 buckets, sum and count, and what ran; and eight lines of types.
    assert len(lines) == 2 + 34 + 2 + 2 + 8


def test_the_metrics_of_tensorflow_itself() -> None:
    """Those that Grafana's dashboard for TensorFlow Serving shows, and loads."""
    telemetry = Telemetry()
    rest = telemetry.endpoint("tfserving", "REST", "predict", inference=True)
    for batch, queue, compute in ((1, 5e-6, 15e-6), (2, 0.0, 20e-6), (2, 0.0, 20e-6)):
        record_call(predict(telemetry), call_of("m", 1, batch, queue, compute), Code.OK, 1e-3, 0.0, 0, 0)
    record_call(rest, call_of("m", 1, 1, 0.0, 5e-6), Code.OK, 1e-3, 0.0, 0, 0)
    record_call(rest, call_of("m", 1, 1, 0.0, 100e-6), Code.INTERNAL, 1e-3, 0.0, 0, 0)
    record_call(
        telemetry.endpoint("kserve", "GRPC", "ModelInfer", inference=True),
        call_of("m", 1, 1, 0.0, 7e-6),
        Code.OK,
        1e-3,
        0.0,
        0,
        0,
    )
    for failed in (True, False, False):
        telemetry.loaded_from("/models/m/1", 0.5, failed=failed)
    telemetry.loaded_from("/models/m/2", 0.5, failed=True)
    lines = print_page(metrics_page(telemetry)).splitlines()
    runtime = 'model_name="m",API="Predict",runtime="TF1"'
    queuing = ":tensorflow:serving:batching_session:queuing_latency"
    loads = ":tensorflow:cc:saved_model:load"
    for line in (
        "# TYPE :tensorflow:serving:runtime_latency histogram",
        f':tensorflow:serving:runtime_latency_bucket{{{runtime},le="10"}} 1',
        f':tensorflow:serving:runtime_latency_bucket{{{runtime},le="18"}} 2',
        f":tensorflow:serving:runtime_latency_count{{{runtime}}} 4",
        f":tensorflow:serving:runtime_latency_sum{{{runtime}}} 60",
        f"# TYPE {queuing} histogram",
        f'{queuing}_count{{thread_pool_name="model_server_batch_threads"}} 5',
        f'{queuing}_sum{{thread_pool_name="model_server_batch_threads"}} 5',
        "# TYPE :tensorflow:core:graph_runs counter",
        ":tensorflow:core:graph_runs{} 5",
        # The two calls of a batch have its whole time.
        f":tensorflow:core:graph_run_time_usecs{{}} {15 + 20 + 5 + 100 + 7}",
        f'{loads}_attempt_count{{model_path="/models/m/1",status="success"}} 2',
        f'{loads}_attempt_count{{model_path="/models/m/1",status="fail"}} 1',
        f'{loads}_attempt_count{{model_path="/models/m/2",status="fail"}} 1',
        f'{loads}_latency{{model_path="/models/m/1"}} 1000000',
    ):
        assert line in lines


def test_the_paths_that_models_were_loaded_from_do_not_grow_without_an_end() -> None:
    telemetry = Telemetry()
    for number in range(1500):
        telemetry.loaded_from("/models/m/1", 0.5, failed=False)
        telemetry.loaded_from(f"/models/m/{number + 2}", 0.5, failed=False)
    assert len(telemetry.loads) == 1000
    assert telemetry.loads["/models/m/1"].successes == 1500


def test_sums_keep_their_last_microsecond() -> None:
    telemetry = Telemetry()
    record_call(predict(telemetry), call_of("m", 1), Code.OK, 123456.789012, 0.0, 0, 0)
    assert 'entrypoint="GRPC"} 123456789012\n' in print_page(metrics_page(telemetry))


def test_rest_calls_that_run_no_model_have_no_api() -> None:
    telemetry = Telemetry()
    endpoint = telemetry.endpoint("tfserving", "REST", "models", inference=False)
    record_call(endpoint, call_of('a"b\\c\nd'), Code.NOT_FOUND, 1.0, 0.0, 0, 0)
    record_call(endpoint, call_of("m"), Code.OK, 1.0, 0.0, 0, 0)
    text = print_page(metrics_page(telemetry))
    assert '{model_name="a\\"b\\\\c\\nd",status="NOT_FOUND"} 1' in text
    assert ':request_latency_count{model_name="m",API="",entrypoint="REST"} 1' in text


def test_models_measure_on_any_thread() -> None:
    now = 0.0
    telemetry = Telemetry(Monitor(), lambda: now)

    def measure() -> None:
        for _ in range(100):
            telemetry.monitor.add("mine", "inc", 1)

    threads = [threading.Thread(target=measure) for _ in range(8)]
    for thread in threads:
        thread.start()
    seen = 0.0
    while any(thread.is_alive() for thread in threads):
        now += 1
        telemetry.tick(now)
        seen += value_of(telemetry, "mine")
    now += 1
    telemetry.tick(now)
    assert seen + value_of(telemetry, "mine") == 800


def value_of(telemetry: Telemetry, name: str) -> float:
    metric = telemetry.metric(name)
    return 0.0 if metric is None else metric.value or 0.0


async def run_seconds(telemetry: Telemetry, count: int, *, fail: bool = False) -> None:
    """Let its task finish so many seconds, and what it does after all but the last of them."""
    finished: asyncio.Queue[int] = asyncio.Queue()

    def waiting() -> int:
        finished.put_nowait(1)
        if fail:
            raise RuntimeError("no queue")
        return 0

    telemetry.queue_depth = waiting
    running = asyncio.create_task(telemetry.run())
    async with asyncio.timeout(30):
        for _ in range(count):
            await finished.get()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def quick_clock() -> float:
    return time.monotonic() * 20


async def test_the_task_measures_the_loop_and_writes_the_log(tmp_path: Path) -> None:
    telemetry = Telemetry(clock=quick_clock)
    telemetry.log_file = tmp_path / "grps_monitor.log"
    await run_seconds(telemetry, 2)
    lines = telemetry.log_file.read_text().splitlines()
    assert lines[0] == "*qps : 0.00"
    assert "*latency_cdf(ms)_9999 : 0.00" in lines
    assert telemetry.loop_lag.count > 0
    assert telemetry.history[-1].loop_lag is not None


async def test_a_source_that_fails_does_not_stop_the_clock(caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(clock=quick_clock)
    await run_seconds(telemetry, 2, fail=True)
    assert telemetry.seconds >= 2
    assert caplog.records[0].getMessage() == "telemetry: lost the metrics of one second"


async def test_unwritable_log_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    telemetry = Telemetry(clock=quick_clock)
    telemetry.log_file = tmp_path / "nowhere" / "grps_monitor.log"
    await run_seconds(telemetry, 3)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
