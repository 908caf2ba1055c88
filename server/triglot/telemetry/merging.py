"""Metrics of several workers, added up: families of samples as JSON's values, and TensorFlow Serving's text.

Strategy: what only grows is added, that of workers that are gone, too: who reads a sum twice never finds it
smaller. Gauges are added where a whole makes sense, and told apart by the label `worker` where none does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

Family = dict[str, Any]
"""`name`, `help`, `type`, and `samples`: lists of a name, labels and a value, and then of an exemplar's labels,
value and time, if there is one."""
Page = dict[str, Any]
"""`families`, and `plain`: the names of counters that are not named as OpenMetrics has it."""
Key = tuple[str, tuple[tuple[str, str], ...]]
Value = tuple[float, list[Any]]
"""A value, and its exemplar: empty, or labels, value and time."""
WORKER = "worker"
GROWING = ("counter", "histogram", "unknown")
"""Types of families of which only growing numbers are kept; ours of unknown type are Triton's counters."""
ADDED = frozenset(
    (
        "nv_inference_pending_request_count",
        "process_max_fds",
        "process_open_fds",
        "process_resident_memory_bytes",
        "process_virtual_memory_bytes",
        "triglot_held_bytes",
        "triglot_held_requests",
        "triglot_in_flight",
        "triglot_instances",
        "triglot_instances_busy",
        "triglot_processes",
        "triglot_processes_wanted",
        "triglot_queue_depth",
        "triglot_response_cache_bytes",
        "triglot_sequence_backlog",
        "triglot_sequence_slots",
        "triglot_sequence_slots_used",
        "triglot_sequences",
    )
)
LEAST = frozenset(("process_start_time_seconds", "triglot_model_ready"))
MOST = frozenset(
    (
        "nv_cpu_memory_total_bytes",
        "nv_cpu_memory_used_bytes",
        "nv_cpu_utilization",
        "nv_model_load_duration_secs",
        "python_info",
        "triglot_build_info",
        "triglot_model_load_failed",
    )
)


def merged_pages(pages: Sequence[tuple[int, Page]], past: Page | None = None) -> Page:
    """The pages of workers, with their numbers, as one; `past`: what workers that are gone have counted."""
    families: dict[str, Family] = {}
    sums: dict[str, dict[Key, Value]] = {}
    for number, page in pages:
        for family in page["families"]:
            name = family["name"]
            there = families.setdefault(name, family | {"samples": []})
            if there["type"] == family["type"]:
                _add(sums.setdefault(name, {}), family, number)
    for family in [] if past is None else past["families"]:
        name = family["name"]
        if name not in families:
            families[name] = family | {"samples": []}
        elif families[name]["type"] != family["type"]:
            continue
        _add_past(sums.setdefault(name, {}), family)
    for name, family in families.items():
        family["samples"] = [
            [sample, dict(labels), value, *exemplar] for (sample, labels), (value, exemplar) in sums[name].items()
        ]
    every = [page for _, page in pages] + ([] if past is None else [past])
    plain = {name for page in every for name in page["plain"]}
    return {"families": list(families.values()), "plain": sorted(plain)}


def growing(page: Page) -> Page:
    """Of a page what only grows: that is what remains of a worker."""
    return page | {"families": [family for family in page["families"] if family["type"] in GROWING]}


def _add(sums: dict[Key, Value], family: Family, number: int) -> None:
    together = _together(family)
    for sample, labels, value, *exemplar in family["samples"]:
        # A model's own metric may have a label of this name.
        apart = labels if together is not None else {WORKER: str(number)} | labels
        key = sample, tuple(apart.items())
        before = sums.get(key)
        if before is None or together is None:
            sums[key] = value, exemplar
        else:
            sums[key] = together((before[0], value)), _latest(before[1], exemplar)


def _latest(one: list[Any], other: list[Any]) -> list[Any]:
    return max(one, other, key=lambda exemplar: exemplar[2] if exemplar else 0.0)


def _together(family: Family) -> Callable[[Iterable[float]], float] | None:
    """What makes one value of two; None: the workers are told apart."""
    if family["type"] in GROWING or family["name"] in ADDED:
        return sum
    if family["name"] in LEAST:
        return min
    return max if family["name"] in MOST else None


def _add_past(sums: dict[Key, Value], family: Family) -> None:
    # Triton's counters are of versions that are loaded: they go with them.
    new = not family["name"].startswith("nv_")
    for sample, labels, value, *exemplar in family["samples"]:
        key = sample, tuple(labels.items())
        if new or key in sums:
            before = sums.get(key, (0, []))
            sums[key] = before[0] + value, _latest(before[1], exemplar)


def merged_texts(texts: Sequence[str]) -> str:
    """Several pages of counters and histograms in Prometheus' text form as one: equal samples are added."""
    sections: dict[str, dict[str, float]] = {}
    for text in texts:
        section: dict[str, float] = {}
        for line in text.splitlines():
            if line.startswith("#"):
                section = sections.setdefault(line, {})
                continue
            sample, _, value = line.rpartition(" ")
            section[sample] = section.get(sample, 0) + (int(value) if value.isdecimal() else float(value))
    lines = []
    for head, samples in sections.items():
        lines += [head, *(f"{sample} {_number(value)}" for sample, value in samples.items())]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.15g}"
