"""What `promql` finds wrong with an expression."""

from __future__ import annotations

import pytest

from tests.deploy.promql import LabelNotFound, Series, labels_of

SERIES: Series = {
    "up": [{}],
    "calls_total": [{"model": "m", "code": "OK"}, {"model": "n", "code": "INTERNAL"}],
    "seconds_bucket": [{"model": "m", "le": "+Inf"}],
    "ready": [{"model": "m"}],
}


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("1", None),
        ("sum(calls_total)", ""),
        ("rate(calls_total[5m])", "code instance job model"),
        ('calls_total{code=~"INT.*|NONE",model!=""}', "code instance job model"),
        ("sum by (model) (rate(calls_total[5m]))", "model"),
        ("histogram_quantile(0.9, sum by (model, le) (rate(seconds_bucket[5m])))", "model"),
        ("sum by (model) (calls_total) / sum by (model) (ready) > 0.5", "model"),
        ("sum(calls_total) or vector(0)", ""),
        ('up{job="a"} == 0 or absent(up{job="a"})', "instance job"),
        ("avg_over_time(ready[5m]) and ready == 0", "instance job model"),
    ],
)
def test_labels(text: str, labels: str | None) -> None:
    assert labels_of(text, SERIES) == (None if labels is None else frozenset(labels.split()))


@pytest.mark.parametrize(
    ("text", "missing"),
    [
        ("rate(call_total[5m])", "metric call_total"),
        ('calls_total{modell="m"}', "label modell of calls_total"),
        ('calls_total{code="FINE"}', "value 'FINE' of label code of calls_total"),
        ('calls_total{code=~"FINE|O"}', "value 'FINE|O' of label code of calls_total"),
        ("sum by (protocol) (calls_total)", "label protocol in"),
        ("sum by (le) (sum by (model) (seconds_bucket))", "label le in"),
        ("histogram_quantile(0.9, sum by (model) (seconds_bucket))", "label le in"),
        ("sum by (model) (calls_total) / sum(ready)", "on the right of /"),
        ("calls_total / ready", "on the right of /"),
    ],
)
def test_missing_names(text: str, missing: str) -> None:
    with pytest.raises(LabelNotFound) as caught:
        labels_of(text, SERIES)
    assert missing in str(caught.value)


def test_no_promql() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        labels_of("sum(", SERIES)


@pytest.mark.parametrize("text", ["ready / on (model) ready", "sum without (code) (calls_total)", "-ready"])
def test_what_is_not_known_is_an_error(text: str) -> None:
    with pytest.raises(AssertionError, match="not known here"):
        labels_of(text, SERIES)
