"""--metrics-config, as Triton's users write it."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from triglot.cli.main import command_line
from triglot.cli.serve import start
from triglot.config.metrics_config import MetricsConfig, read_metrics_config
from triglot.config.options import Config, ConfigError
from triglot.config.sources import load_config


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", MetricsConfig()),
        ("histogram_latencies=true", MetricsConfig(histograms=True)),
        ("histogram_latencies=false", MetricsConfig()),
        (" summary_latencies = true , counter_latencies=false,", MetricsConfig(counters=False, summaries=True)),
        ("summary_quantiles=0.5:0.05,0.9:0.01", MetricsConfig(quantiles=(0.5, 0.9))),
        (
            "summary_latencies=true,summary_quantiles=.25:0.05, 1:0 ,histogram_latencies=true",
            MetricsConfig(histograms=True, summaries=True, quantiles=(0.25, 1.0)),
        ),
        ("summary_latencies=false,summary_latencies=true", MetricsConfig(summaries=True)),
        ("summary_quantiles=0.9:0.01,0.9:0.05", MetricsConfig(quantiles=(0.9,))),
    ],
)
def test_what_settings_mean(text: str, expected: MetricsConfig) -> None:
    assert Config(metrics_config=text).latency_metrics == expected


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("true", "expected SETTING=VALUE, got 'true'"),
        ("0.5:0.05,summary_latencies=true", "expected SETTING=VALUE, got '0.5:0.05'"),
        (
            "latencies=true",
            "expected a setting of counter_latencies, histogram_latencies, summary_latencies, summary_quantiles, "
            "got 'latencies'",
        ),
        ("summary_latencies=yes", "summary_latencies: expected true or false, got 'yes'"),
        ("summary_latencies=", "summary_latencies: expected true or false, got ''"),
        ("histogram_latencies=true,false", "histogram_latencies: expected true or false, got 'true,false'"),
        *(
            (
                f"summary_quantiles={pairs}",
                "summary_quantiles: expected pairs of a quantile and its error from 0 to 1, like "
                f"0.5:0.05,0.9:0.01, got {wrong!r}",
            )
            for pairs, wrong in (
                ("", ""),
                ("0.5", "0.5"),
                ("0.5:0.05,0.9", "0.9"),
                ("1.5:0.05", "1.5:0.05"),
                ("0.5:2", "0.5:2"),
                ("-0.5:0.1", "-0.5:0.1"),
                ("nan:0.1", "nan:0.1"),
                ("0.5:0.05 0.9:0.01", "0.5:0.05 0.9:0.01"),
            )
        ),
    ],
)
def test_what_no_setting_says(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(metrics_config=text)
    assert str(caught.value) == f"metrics_config: {problem}"


@given(
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.integers(0, 1000).map(lambda thousandths: thousandths / 1000), min_size=1, unique=True),
    st.randoms(use_true_random=False),
)
def test_settings_in_any_order(
    counters: bool, histograms: bool, summaries: bool, quantiles: list[float], order: random.Random
) -> None:
    settings = [
        f"counter_latencies={str(counters).lower()}",
        f"histogram_latencies={str(histograms).lower()}",
        f"summary_latencies={str(summaries).lower()}",
        "summary_quantiles=" + ",".join(f"{quantile}:0.001" for quantile in quantiles),
    ]
    order.shuffle(settings)
    found = read_metrics_config(",".join(settings))
    assert found == MetricsConfig(counters, histograms, summaries, tuple(quantiles))


def test_where_it_may_be_written(tmp_path: Path) -> None:
    file = tmp_path / "triglot.toml"
    file.write_text('metrics_config = "summary_latencies=true"\n')
    assert load_config(file, {}, {}).latency_metrics.summaries
    variables = {"TRIGLOT_METRICS_CONFIG": "histogram_latencies=true"}
    assert load_config(None, variables, {}).latency_metrics.histograms


def test_the_flag_may_be_given_more_than_once() -> None:
    """As Triton's users do, for each setting."""
    flags = ["summary_latencies=true", "summary_quantiles=0.5:0.05,0.99:0.001", "counter_latencies=false"]
    arguments = ["serve", "models"] + [part for flag in flags for part in ("--metrics-config", flag)]
    config = start(vars(command_line().parse_args(arguments)), [], {}).config
    assert config.latency_metrics == MetricsConfig(counters=False, summaries=True, quantiles=(0.5, 0.99))
