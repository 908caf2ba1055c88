"""What several workers have counted, as one has: pure functions of what they say."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.core.operation import EVERYTHING
from triglot.core.statistics import rank
from triglot.dataplane.control import METRICS, TFSERVING_METRICS
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.statistics import Report, statistics_message
from triglot.protocols.tfserving.metrics import metrics_page, print_page
from triglot.telemetry.merging import merged_pages
from triglot.telemetry.points import point, points_of, together
from triglot.telemetry.series import Metrics, merged_series, merged_value, series_report
from triglot.telemetry.store import Telemetry
from triglot.workers.supervisor import RetiredCounters

SECONDS = st.lists(st.floats(0, 100), max_size=500)


# --- distributions ---


@given(st.lists(SECONDS, max_size=4), st.sampled_from([5000, 9000, 9900]))
def test_few_points_stand_for_all_values(parts: list[list[float]], share: int) -> None:
    """What is found is one of the values, and nearly the right one."""
    points = together(points_of(sorted(part)) for part in parts)
    every = sorted(value for part in parts for value in part)
    assert sum(weight for _, weight in points) == len(every)
    found = point(points, share)
    if not every:
        assert found is None
        return
    assert found is not None
    assert found in every
    # Not below, and above by no more than one point of each part stands for.
    assert found >= rank(every, share)
    assert found <= rank(every, min(10_000, share + 800))


@given(st.lists(st.floats(0, 100), min_size=1, max_size=32), st.sampled_from([1, 5000, 9000, 9900, 10_000]))
def test_as_few_values_as_points_are_exact(values: list[float], share: int) -> None:
    assert point(points_of(sorted(values)), share) == rank(sorted(values), share)


# --- metrics ---


def page(family: str, kind: str, *samples: tuple[str, dict[str, str], float], plain: tuple[str, ...] = ()) -> Any:
    families = [{"name": family, "help": "", "type": kind, "samples": [list(sample) for sample in samples]}]
    return json.loads(json.dumps({"families": families, "plain": plain}))


def samples(found: Any) -> dict[str, float]:
    return {
        name + "".join(f" {key}={text}" for key, text in labels.items()): value
        for family in found["families"]
        for name, labels, value in family["samples"]
    }


@pytest.mark.parametrize(
    ("name", "kind", "expected"),
    [
        ("requests", "counter", {"requests m=a": 5}),
        ("own", "unknown", {"own m=a": 5}),
        ("triglot_queue_depth", "gauge", {"triglot_queue_depth m=a": 5}),
        ("triglot_model_ready", "gauge", {"triglot_model_ready m=a": 2}),
        ("triglot_instances", "gauge", {"triglot_instances m=a": 5}),
        ("triglot_instances_busy", "gauge", {"triglot_instances_busy m=a": 5}),
        ("triglot_build_info", "gauge", {"triglot_build_info m=a": 3}),
        ("nv_cpu_utilization", "gauge", {"nv_cpu_utilization m=a": 3}),
        ("a_model_s_own", "gauge", {"a_model_s_own worker=1 m=a": 2, "a_model_s_own worker=2 m=a": 3}),
    ],
)
def test_what_becomes_of_two_values(name: str, kind: str, expected: dict[str, float]) -> None:
    first, other = (page(name, kind, (name, {"m": "a"}, value)) for value in (2, 3))
    assert samples(merged_pages([(1, first), (2, other)])) == expected


def test_what_one_worker_alone_has_stays() -> None:
    first = page("x", "counter", ("x_total", {"m": "a"}, 2))
    other = page("x", "counter", ("x_total", {"m": "b"}, 3))
    third = page("y", "gauge", ("y", {}, 1), plain=("y",))
    found = merged_pages([(1, first), (2, other), (3, third)])
    assert samples(found) == {"x_total m=a": 2, "x_total m=b": 3, "y worker=3": 1}
    assert found["plain"] == ["y"]


def test_of_families_of_one_name_and_two_kinds_the_first_is_taken() -> None:
    first, other = page("x", "counter", ("x_total", {}, 2)), page("x", "gauge", ("x", {}, 3))
    assert samples(merged_pages([(1, first), (2, other)])) == {"x_total": 2}


def test_only_counters_are_kept_of_ended_workers() -> None:
    past = RetiredCounters()
    assert past.total(METRICS) is None
    for value in (2, 3):
        counter = page("x", "counter", ("x_total", {"m": "a"}, value))
        gauge = page("triglot_queue_depth", "gauge", ("triglot_queue_depth", {}, value))
        of_triton = page("nv_inference_count", "unknown", ("nv_inference_count", {"model": "a"}, value))
        families = [page_of_worker["families"][0] for page_of_worker in (counter, gauge, of_triton)]
        past.add({METRICS: {"families": families, "plain": []}, TFSERVING_METRICS: counter})
    assert samples(past.total(TFSERVING_METRICS)) == {"x_total m=a": 5}
    living = page("x", "counter", ("x_total", {"m": "b"}, 1))
    # Nobody has Triton's model any more.
    assert samples(merged_pages([(1, living)], past.total(METRICS))) == {"x_total m=b": 1, "x_total m=a": 5}
    loaded = page("nv_inference_count", "unknown", ("nv_inference_count", {"model": "a"}, 1))
    assert samples(merged_pages([(1, loaded)], past.total(METRICS))) == {
        "nv_inference_count model=a": 6,
        "x_total m=a": 5,
    }


def test_tensorflow_serving_s_page_of_one_worker_stays_as_it_is() -> None:
    empty = metrics_page(Telemetry())
    assert merged_pages([(1, empty)]) == merged_pages([(1, empty), (2, empty)])
    assert print_page(merged_pages([(1, empty)])) == print_page(empty)


# --- statistics ---


def statistics(name: str, count: int, size: int) -> Report:
    durations = {"count": count, "ns": 10 * count}
    counters = {
        "last_inference": count,
        "inference_count": count,
        "inference_stats": {"success": durations},
        "batch_stats": {str(size): {"compute_infer": durations}},
        "response_stats": {"0": {"success": durations}},
    }
    report: Report = json.loads(json.dumps({name: {"1": counters}}))
    return report


def test_statistics_of_one_version_are_added() -> None:
    reports = [statistics("a", 2, 4), statistics("a", 3, 1), statistics("a", 5, 4), statistics("b", 7, 1)]
    a, b = statistics_message(reports, EVERYTHING).model_stats
    assert (a.name, a.version, a.last_inference, a.inference_count) == ("a", "1", 5, 10)
    assert (a.inference_stats.success.count, a.inference_stats.success.ns) == (10, 100)
    assert [(batch.batch_size, batch.compute_infer.count) for batch in a.batch_stats] == [(1, 3), (4, 7)]
    assert a.response_stats["0"].success.count == 10
    assert (b.name, b.inference_count) == ("b", 7)
    assert statistics_message([], EVERYTHING) == pb.ModelStatisticsResponse()


# --- series ---


def metrics(requests: float, mean: float, own: float | None = None, kind: Any = "avg") -> Metrics:
    """After one second."""
    made = Metrics()
    if own is not None:
        made.collect([("own", kind, own)])
    made.end_second({"*qps": [requests], "*latency_avg(ms)": [mean], "*cpu_usage(%)": [40.0]})
    return made


def test_means_over_requests_count_by_their_requests() -> None:
    both = metrics(30, 10.0), metrics(10, 50.0)

    def last(name: str) -> float | None:
        reports = [json.loads(json.dumps(series_report(page_of_worker, name))) for page_of_worker in both]
        series = merged_series(reports)
        assert series is not None
        assert len(series["data"]) == 174
        assert series["data"][-1][1] == merged_value(reports)
        assert series["data"][-2][1] == 0
        return merged_value([series_report(page_of_worker, name, last=True) for page_of_worker in both])

    assert last("*qps") == 40
    assert last("*latency_avg(ms)") == 20
    assert last("*cpu_usage(%)") == 80


@pytest.mark.parametrize(("kind", "expected"), [("avg", 3), ("max", 4), ("min", 2), ("inc", 6), ("cdf", 4)])
def test_models_own_metrics(kind: str, expected: float) -> None:
    reports = [
        series_report(page_of_worker, "own")
        for page_of_worker in (metrics(1, 1, 2, kind), metrics(1, 1), metrics(1, 1, 4, kind))
    ]
    assert reports[1] is None
    assert merged_value(reports) == expected


def test_values_of_another_kind_are_left_out() -> None:
    reports = [
        series_report(page_of_worker, "own")
        for page_of_worker in (metrics(1, 1, 2, "max"), metrics(1, 1, 4, "cdf"))
    ]
    assert merged_value(reports) == 2
    assert merged_series([None, None]) is None
    assert merged_value([None]) is None
