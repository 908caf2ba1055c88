"""The store of what happened: what it keeps, and how little a client can make it keep."""

from __future__ import annotations

from triglot.core.errors import Code
from triglot.protocols.tfserving.metrics import print_metrics
from triglot.telemetry import LONGEST_NAME, MAX_MODEL_NAMES, Telemetry


def test_calls_are_told_apart_by_kind() -> None:
    telemetry = Telemetry()
    telemetry.record("GRPC", "Predict", "m", Code.OK, 5e-6)
    telemetry.record("GRPC", "Predict", "m", Code.OK, 15e-6)
    telemetry.record("GRPC", "Predict", "m", Code.NOT_FOUND, 1.0)
    lines = print_metrics(telemetry).splitlines()
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
    # The two kinds of count, a histogram of 34 buckets, sum and count; and two lines of types.
    assert len(lines) == 2 + 34 + 2 + 2


def test_names_are_escaped() -> None:
    telemetry = Telemetry()
    telemetry.record("REST", "", 'a"b\\c\nd', Code.NOT_FOUND, 1.0)
    assert '{model_name="a\\"b\\\\c\\nd",status="NOT_FOUND"} 1' in print_metrics(telemetry)


def test_made_up_names_are_bounded() -> None:
    telemetry = Telemetry()
    telemetry.record("REST", "", "x" * (LONGEST_NAME + 1), Code.NOT_FOUND, 1.0)
    for number in range(MAX_MODEL_NAMES + 100):
        telemetry.record("REST", "", f"made-up-{number}", Code.NOT_FOUND, 1.0)
    names = {kind.model for kind, _ in telemetry.calls()}
    assert len(names) <= MAX_MODEL_NAMES + 1
    assert max(map(len, names)) <= LONGEST_NAME
