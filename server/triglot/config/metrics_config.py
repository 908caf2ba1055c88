"""Reads Triton's `--metrics-config`: which latency metrics are exported."""

from __future__ import annotations

import re
from dataclasses import dataclass

COUNTERS, HISTOGRAMS, SUMMARIES = "counter_latencies", "histogram_latencies", "summary_latencies"
QUANTILES = "summary_quantiles"
SWITCHES = (COUNTERS, HISTOGRAMS, SUMMARIES)
_SWITCHED = {"true": True, "false": False}
_QUANTILE = re.compile(r"\s*(\d*\.?\d+)\s*:\s*(\d*\.?\d+)\s*")


@dataclass(frozen=True, slots=True)
class MetricsConfig:
    """Which of Triton's latency metrics are exported, and the quantiles of its summaries."""

    counters: bool = True
    histograms: bool = False
    summaries: bool = False
    quantiles: tuple[float, ...] = (0.5, 0.9, 0.95, 0.99, 0.999)


def read_metrics_config(text: str) -> MetricsConfig:
    """Read comma-separated settings such as `summary_latencies=true`.

    A value may contain commas: a part without `=` continues the previous one. Raise `ValueError`.
    """
    settings: dict[str, str] = {}
    name = ""
    for part in filter(str.strip, text.split(",")):
        if "=" in part:
            name, _, value = part.partition("=")
            name = name.strip()
            settings[name] = value.strip()
        elif name:
            settings[name] += f",{part}"
        else:
            raise ValueError(f"expected SETTING=VALUE, got {part.strip()!r}")
    for name in settings.keys() - {*SWITCHES, QUANTILES}:
        raise ValueError(f"expected a setting of {', '.join((*SWITCHES, QUANTILES))}, got {name!r}")
    default = MetricsConfig()
    return MetricsConfig(
        counters=_switch(settings, COUNTERS, default.counters),
        histograms=_switch(settings, HISTOGRAMS, default.histograms),
        summaries=_switch(settings, SUMMARIES, default.summaries),
        quantiles=_quantiles(settings[QUANTILES]) if QUANTILES in settings else default.quantiles,
    )


def _switch(settings: dict[str, str], name: str, default: bool) -> bool:
    value = settings.get(name)
    if value is None:
        return default
    if value not in _SWITCHED:
        raise ValueError(f"{name}: expected true or false, got {value!r}")
    return _SWITCHED[value]


def _quantiles(text: str) -> tuple[float, ...]:
    """Return the quantiles of pairs of a quantile and its error; the error has no effect on our accuracy."""
    quantiles = []
    for pair in text.split(","):
        found = _QUANTILE.fullmatch(pair)
        if found is None or not all(0 <= float(number) <= 1 for number in found.groups()):
            raise ValueError(
                f"{QUANTILES}: expected pairs of a quantile and its error from 0 to 1, like 0.5:0.05,0.9:0.01, "
                f"got {pair!r}"
            )
        quantiles.append(float(found[1]))
    return tuple(dict.fromkeys(quantiles))
