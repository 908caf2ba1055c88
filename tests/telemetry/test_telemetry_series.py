"""Values over time: seconds, minutes, hours and days of each metric, driven by a clock of the test's (grps 7)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from tests.recorded_calls import record_call
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.core.statistics import LATENCY_LIMITS, Histogram, rank
from triglot.telemetry.calls import Endpoint
from triglot.telemetry.monitor import MAX_WAITING, Aggregation
from triglot.telemetry.series import BUILT_IN, MAX_METRICS, Distribution, Metrics, Trend
from triglot.telemetry.store import HISTORY_SECONDS, MAX_LATENCIES, Telemetry

CDF_X = [10, 20, 30, 40, 50, 60, 70, 80, 90, 91, 92, 93, 94, 95, 96, 97, 98, 99, 100, 101]


class Clock:
    """Stands still until the test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.telemetry = Telemetry(clock=lambda: self.now)

    def tick(self, seconds: float = 1.0) -> None:
        self.now += seconds
        self.telemetry.tick(self.now)

    def endpoint(self, protocol: str = "kserve") -> Endpoint:
        return self.telemetry.endpoint(protocol, "GRPC", "ModelInfer", inference=True)

    def values(self, name: str) -> list[float]:
        metric = self.telemetry.metric(name)
        assert metric is not None
        return [value for _, value in metric.data()]


@pytest.fixture
def clock() -> Clock:
    return Clock()


def record(
    endpoint: Endpoint, seconds: float, code: Code = Code.OK, batch: int = 0, model: str = "m", times: int = 1
) -> None:
    call = Call()
    call.model_name, call.model_version, call.batch_size = model, 1, batch
    for _ in range(times):
        record_call(endpoint, call, code, seconds, 0.0, 0, 0)


def run_seconds(trend: Trend, values: Sequence[float], seconds: int) -> None:
    for _ in range(seconds):
        trend.end_second(values)


def test_the_built_in_names_and_their_forms(clock: Clock) -> None:
    metrics = clock.telemetry.metrics.by_name
    assert list(metrics) == [
        "*qps",
        "*fail_rate(%)",
        "*latency_avg(ms)",
        "*latency_max(ms)",
        "*latency_cdf(ms)",
        "*cpu_usage(%)",
        "*mem_usage(%)",
    ]
    for name, metric in metrics.items():
        data = metric.data()
        if name == "*latency_cdf(ms)":
            assert metric.label == "cdf"
            assert data == [[x, 0.0] for x in CDF_X]
        else:
            assert metric.label == "trend"
            assert data == [[at, 0.0] for at in range(174)]


def test_a_second_of_calls_by_every_interface(clock: Clock) -> None:
    clock.tick()
    record(clock.endpoint("kserve"), 0.010)
    record(clock.endpoint("tfserving"), 0.020, Code.NOT_FOUND)
    record(clock.endpoint("grps"), 0.030)
    record(clock.endpoint("grps"), 0.060)
    clock.tick()
    assert clock.values("*qps")[-2:] == [0, 4]
    assert clock.values("*fail_rate(%)")[-1] == 25
    assert clock.values("*latency_avg(ms)")[-1] == 30
    assert clock.values("*latency_max(ms)")[-1] == 60
    assert clock.values("*latency_cdf(ms)") == [10] * 2 + [20] * 3 + [30] * 2 + [60] * 13
    assert 0 < clock.values("*mem_usage(%)")[-1] < 100
    assert clock.values("*cpu_usage(%)")[-1] >= 0
    clock.tick()
    assert [clock.values(name)[-2:] for name in ("*qps", "*fail_rate(%)", "*latency_max(ms)")] == [
        [4, 0],
        [25, 0],
        [60, 0],
    ]
    assert clock.values("*latency_cdf(ms)") == [0] * 20


def test_calls_that_run_no_model_are_no_queries(clock: Clock) -> None:
    health = clock.telemetry.endpoint("grpc", "GRPC", "Check", inference=False)
    record(health, 1.0)
    clock.tick()
    assert clock.values("*qps")[-1] == 0


def test_a_part_of_a_second_is_not_finished(clock: Clock) -> None:
    record(clock.endpoint(), 0.001)
    clock.tick(0.5)
    assert clock.telemetry.seconds == 0
    clock.tick(0.25)
    clock.tick(0.5)
    assert (clock.telemetry.seconds, clock.values("*qps")[-1]) == (1, 1)
    clock.tick(0.75)
    assert clock.telemetry.seconds == 2


def test_unobserved_seconds_are_empty(clock: Clock) -> None:
    record(clock.endpoint(), 0.001, times=5)
    clock.tick(4.0)
    assert clock.values("*qps")[-5:] == [0, 0, 0, 0, 5]
    assert [sum(second.requests.values()) for second in clock.telemetry.history] == [0, 0, 0, 5]
    clock.tick(1e9)
    assert len(clock.telemetry.history) == HISTORY_SECONDS


def test_the_order_of_a_trend() -> None:
    trend = Trend("inc")
    for day in range(31):
        run_seconds(trend, [float(day)], 86_400)
    data = trend.data()
    assert [at for at, _ in data] == list(range(174))
    values = [value for _, value in data]
    assert values[:30] == list(range(1, 31))
    assert values[30:] == [30] * 144
    run_seconds(trend, [7], 60)
    run_seconds(trend, [9], 1)
    values = [value for _, value in trend.data()]
    assert values[29:54] == [30] * 25
    assert values[54:114] == [30] * 59 + [7]
    assert values[114:] == [7] * 59 + [9]


@pytest.mark.parametrize(
    ("aggregation", "second", "minute"),
    [("avg", 2.33, 1.67), ("max", 4.0, 4.0), ("min", 1.0, 1.0), ("inc", 7.0, 0.13)],
)
def test_each_aggregation(aggregation: Aggregation, second: float, minute: float) -> None:
    trend = Trend(aggregation)
    run_seconds(trend, [], 30)
    trend.end_second([1, 2, 4])
    assert [value for _, value in trend.data()][-2:] == [0, second]
    trend.end_second([1])
    run_seconds(trend, [], 28)
    # Seconds without values count for what is summed only.
    assert trend.data()[113] == [113, minute]
    assert trend.total == (8 if aggregation == "inc" else 0)


def test_an_empty_minute_is_zero() -> None:
    trend = Trend("min")
    run_seconds(trend, [], 3600)
    assert trend.data() == [[at, 0.0] for at in range(174)]
    assert trend.value is None


def test_values_are_rounded_and_may_be_odd() -> None:
    trend = Trend("avg")
    trend.end_second([1.23456])
    assert trend.data()[-1] == [173, 1.23]
    trend.end_second([math.inf])
    assert trend.data()[-1] == [173, math.inf]
    increments = Trend("inc")
    increments.end_second([5, -2, math.nan, math.inf])
    assert increments.total == 5


def test_the_points_of_a_distribution() -> None:
    distribution = Distribution()
    distribution.end_second([float(value) for value in range(10_000, 0, -1)])
    assert distribution.data() == [
        *([x, x * 100.0] for x in CDF_X[:-2]),
        [100, 9990.0],
        [101, 9999.0],
    ]
    assert list(distribution.lines("d")) == [
        "d_80 : 8000.00",
        "d_90 : 9000.00",
        "d_99 : 9900.00",
        "d_999 : 9990.00",
        "d_9999 : 9999.00",
    ]
    distribution.end_second([3.14159])
    assert distribution.data() == [[x, 3.14] for x in CDF_X]


def test_a_models_own_metrics(clock: Clock) -> None:
    monitor = clock.telemetry.monitor
    for value in (1, 2, 6):
        monitor.add("my avg", "avg", value)
        monitor.add("my max", "max", value)
        monitor.add("my min", "min", value)
        monitor.add("my inc", "inc", value)
        monitor.add("my cdf", "cdf", value)
    clock.tick()
    names = list(clock.telemetry.metrics.by_name)[len(BUILT_IN) :]
    assert names == ["my avg", "my max", "my min", "my inc", "my cdf"]
    assert [clock.values(name)[-1] for name in names] == [3, 6, 1, 9, 6]
    clock.tick()
    assert [clock.values(name)[-1] for name in names] == [0, 0, 0, 0, 0]
    assert "my avg : 0.00\n" in clock.telemetry.metrics.log_text()


def test_a_name_keeps_its_first_aggregation(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    monitor = clock.telemetry.monitor
    monitor.add("tp(token/s)", "avg", 10)
    for _ in range(3):
        monitor.add("tp(token/s)", "inc", 5)
        monitor.add("*qps", "inc", 5)
    clock.tick()
    assert clock.values("tp(token/s)")[-1] == 10
    assert clock.values("*qps")[-1] == 0
    assert [record.getMessage() for record in caplog.records] == [
        "metric tp(token/s): the kind is avg; values of kind inc are dropped",
        "metric *qps: the name is reserved by the server; values are dropped",
    ]


def test_names_are_bounded(caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    metrics.collect([(f"{number}%s", "inc", 1) for number in range(MAX_METRICS + 50)])
    metrics.end_second({})
    metrics.collect([("0%s", "inc", 2), ("new%s", "inc", 2)])
    metrics.end_second({})
    assert len(metrics.by_name) == MAX_METRICS + len(BUILT_IN)
    assert metrics.by_name["0%s"].value == 2
    assert [record.getMessage() for record in caplog.records] == [
        f"metric {MAX_METRICS}%s: dropped, as there are already {MAX_METRICS} names"
    ]


def test_waiting_values_are_bounded(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(MAX_WAITING + 5):
        clock.telemetry.monitor.add("n", "inc", 1)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    clock.tick()
    assert clock.values("n")[-1] == MAX_WAITING


def test_waiting_values_are_collected_within_the_second(clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(10):
        for _ in range(MAX_WAITING):
            clock.telemetry.monitor.add("n", "inc", 1)
        clock.tick(1 / 16)
    assert clock.telemetry.seconds == 0
    clock.telemetry.monitor.add("n", "inc", 1)
    clock.tick()
    assert clock.values("n")[-1] == 10 * MAX_WAITING + 1
    assert caplog.records == []


def test_the_history(clock: Clock) -> None:
    telemetry = clock.telemetry
    telemetry.queue_depth = lambda: 3
    grps, kserve = clock.endpoint("grps"), clock.endpoint("kserve")
    kserve.in_flight = 2
    record(kserve, 0.010, batch=4, times=4)
    record(grps, 0.100, Code.INTERNAL, batch=1)
    telemetry.lagged(0.002)
    telemetry.lagged(0.001)
    clock.tick()
    second = telemetry.history[-1]
    assert second.requests == {"grps": 1, "kserve": 4}
    assert (second.failures, second.queue_depth, second.in_flight) == (1, 3, 2)
    assert second.latencies == [(0.010, 1)] * 4 + [(0.100, 1)]
    # Two executions, of four requests and of one.
    assert (second.executed, second.executions) == (5, 2)
    assert second.loop_lag == 2
    clock.tick()
    idle = telemetry.history[-1]
    assert idle.requests == {"grps": 0, "kserve": 0}
    assert (idle.failures, idle.latencies, idle.executions, idle.loop_lag) == (0, [], 0, None)


def test_a_seconds_latencies_are_bounded(clock: Clock) -> None:
    record(clock.endpoint(), 0.002, times=10)
    record(clock.endpoint(), 0.001, times=MAX_LATENCIES)
    clock.tick()
    assert clock.values("*qps")[-1] == MAX_LATENCIES + 10
    assert clock.values("*latency_max(ms)")[-1] == 1


def test_ranks() -> None:
    assert rank([1.0], 0) == 1
    assert rank([1.0, 2.0], 5000) == 1
    assert rank([1.0, 2.0], 5001) == 2
    assert rank([1.0, 2.0], 10_000) == 2


def test_histograms() -> None:
    histogram = Histogram()
    for value in (0.0, 10.0, 10.1, 1e12):
        histogram.add(value)
    assert (histogram.counts[0], histogram.counts[1], histogram.counts[-1]) == (2, 1, 1)
    assert len(histogram.counts) == len(LATENCY_LIMITS) + 1 == 34
    other = Histogram()
    other.add_many(11.0, 3)
    histogram.merge(other)
    assert (histogram.count, histogram.counts[1], other.count) == (7, 4, 3)
    assert histogram.sum == 0 + 10 + 10.1 + 1e12 + 33
