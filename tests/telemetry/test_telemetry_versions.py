"""Versions come and go: the last ones stay told apart, and what is summed over a model never goes backwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping

from hypothesis import given
from hypothesis import strategies as st

from tests.recorded_calls import record_call
from triglot.core.call import Call
from triglot.core.errors import Code
from triglot.protocols.tfserving.metrics import metrics_page, print_page
from triglot.telemetry.calls import ENDED, ENDED_KEPT
from triglot.telemetry.store import Telemetry

OK, FAILED = Code.OK, Code.INTERNAL


class Served:
    """A store, the versions that are loaded, and a clock that moves when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.loaded: Collection[tuple[str, int]] = set()
        self.telemetry = Telemetry(clock=lambda: self.now)
        self.telemetry.loaded = lambda: self.loaded
        self.grpc = self.telemetry.endpoint("tfserving", "GRPC", "Predict", inference=True)
        self.status = self.telemetry.endpoint("tfserving", "GRPC", "GetModelStatus", inference=False)

    def call(self, model: str, version: int, code: Code = OK, batch: int = 0) -> None:
        call = Call()
        call.model_name, call.model_version, call.batch_size = model, version, batch
        call.queue_seconds = call.compute_seconds = 0.5
        record_call(self.grpc, call, code, 0.25, 0.125, 10, 20)

    def tick(self) -> None:
        self.now += 1
        self.telemetry.tick(self.now)

    def labelled_versions(self, model: str) -> set[int]:
        """The versions whose calls are counted by themselves."""
        return {kind.version for _, kind, _ in self.telemetry.calls() if kind.model == model} - {ENDED}

    def counts(self) -> Mapping[tuple[str, Code], int]:
        """Calls by model and code."""
        counts: Counter[tuple[str, Code]] = Counter()
        for _, kind, stats in self.telemetry.calls():
            counts[kind.model, kind.code] += stats.latency.count
        return counts


def test_last_ended_versions_keep_their_labels() -> None:
    served = Served()
    for version in range(1, 101):
        served.loaded = {("m", version)}
        served.call("m", version)
        served.call("m", version, FAILED)
        served.tick()
        assert served.labelled_versions("m") == set(range(max(1, version - ENDED_KEPT), version + 1))
        assert served.counts() == {("m", OK): version, ("m", FAILED): version}
    assert served.telemetry.kinds == 2 * (1 + ENDED_KEPT + 1)
    assert set(served.telemetry.models()) == {("m", version) for version in (ENDED, *range(95, 101))}


def test_the_numbers_of_those_that_ended() -> None:
    served = Served()
    for version in range(1, ENDED_KEPT + 3):
        for _ in range(version):
            served.call("m", version, batch=4)
    served.call("m", 2)
    served.tick()  # 1 and 3 are those that were not called for longest.
    ((kind, ended_stats),) = [
        (kind, stats) for _, kind, stats in served.telemetry.calls() if kind.version == ENDED
    ]
    assert kind == ("m", ENDED, OK)
    assert (ended_stats.latency.count, ended_stats.latency.sum) == (4, 1e6)
    assert ended_stats.codec is not None
    assert ended_stats.queue is not None
    assert ended_stats.compute is not None
    assert (ended_stats.codec.sum, ended_stats.queue.sum, ended_stats.compute.sum) == (5e5, 2e6, 2e6)
    assert (ended_stats.bytes_in, ended_stats.bytes_out, ended_stats.batches) == (40, 80, {4: 4})


def test_a_reader_who_has_begun_counts_nothing_twice() -> None:
    served = Served()
    for _ in range(2):
        for version in range(1, 2 * ENDED_KEPT):
            served.call("m", version)
        read = list(served.telemetry.calls())
        before = [(kind, stats.latency.count, stats.bytes_in) for _, kind, stats in read]
        served.tick()
        assert [(kind, stats.latency.count, stats.bytes_in) for _, kind, stats in read] == before


def test_version_loaded_again_has_its_own_label() -> None:
    served = Served()
    for version in (1, *range(2, ENDED_KEPT + 3), 1):
        served.loaded = {("m", version)}
        served.call("m", version)
        served.tick()
    assert served.counts() == {("m", OK): ENDED_KEPT + 3}
    assert served.labelled_versions("m") == set(range(3, ENDED_KEPT + 3)) | {1}
    assert served.telemetry.models()["m", 1].requests == 1


def test_no_version_ends_without_a_list_of_loaded_ones() -> None:
    served = Served()
    served.telemetry = telemetry = Telemetry(clock=lambda: served.now)
    served.grpc = telemetry.endpoint("tfserving", "GRPC", "Predict", inference=True)
    for version in range(1, 31):
        served.call("m", version)
        served.tick()
    assert served.labelled_versions("m") == set(range(1, 31))


def test_those_that_ended_long_ago_come_over_no_rate() -> None:
    served = Served()
    for version in range(1, 31):
        served.call("m", version)
    served.tick()
    served.tick()
    assert served.telemetry.models()["m", ENDED].request_rate == 0


MODELS = st.sampled_from(["a", "b"])
VERSIONS = st.integers(0, 12)
CALLS = st.tuples(MODELS, VERSIONS, st.sampled_from([OK, FAILED]), st.booleans())
LOADED = st.frozensets(st.tuples(MODELS, st.integers(1, 12)), max_size=8)


@given(st.lists(st.tuples(LOADED, st.lists(CALLS, max_size=30)), max_size=12))
def test_no_call_is_lost(
    seconds: list[tuple[frozenset[tuple[str, int]], list[tuple[str, int, Code, bool]]]],
) -> None:
    served = Served()
    counts: Counter[tuple[str, Code]] = Counter()
    inferences = 0
    for loaded, calls in seconds:
        served.loaded = loaded
        for model, version, code, inference in calls:
            counts[model, code] += 1
            inferences += inference
            if inference:
                served.call(model, version, code)
            else:
                call = Call()
                call.model_name, call.model_version = model, version
                record_call(served.status, call, code, 0.25, 0.0, 0, 0)
        served.tick()
        assert served.counts() == counts
        kept = served.telemetry.models()
        assert sum(model.requests for model in kept.values()) == inferences
        assert served.telemetry.kinds == len(list(served.telemetry.calls()))
        for model in ("a", "b"):
            ended_versions = {
                version
                for version in served.labelled_versions(model)
                if version and (model, version) not in loaded
            }
            assert len(ended_versions) <= ENDED_KEPT


def test_tensorflow_servings_counters_go_on() -> None:
    served = Served()
    for version in range(1, 31):
        served.loaded = {("m", version)}
        served.call("m", version)
        served.tick()
        text = print_page(metrics_page(served.telemetry))
        assert f':tensorflow:serving:request_count{{model_name="m",status="OK"}} {version}\n' in text
