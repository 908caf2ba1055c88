"""Merges what several workers have counted, which they report as JSON values.

Counters are summed, including those of workers that have ended, so that a sum never decreases. Gauges are summed
where a total makes sense, and have the label `worker` otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Family = dict[str, Any]
"""`name`, `help` (if the format has it), `type`, and `samples`: lists of a name, labels and a value, followed by
an exemplar's labels, value and time, if there is one."""
Page = dict[str, Any]
"""`families`, and `plain`: the names of counters that do not follow OpenMetrics' naming."""
Key = tuple[str, tuple[tuple[str, str], ...]]
Value = tuple[float, list[Any]]
"""A value and its exemplar: empty, or labels, value and time."""
Rule = Callable[[list[Any]], Any]
"""Merges the values of several workers."""
WORKER = "worker"
MONOTONIC = ("counter", "histogram", "unknown")
"""Types of families that are monotonic; our families of unknown type are Triton's counters."""
SUMMED = frozenset(
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
        "triglot_node_instances",
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
MINIMUM = frozenset(("process_start_time_seconds", "triglot_model_ready"))
MAXIMUM = frozenset(
    (
        "nv_cpu_memory_total_bytes",
        "nv_cpu_memory_used_bytes",
        "nv_cpu_utilization",
        "nv_model_load_duration_secs",
        "python_info",
        "triglot_build_info",
        "triglot_model_load_failed",
        "triglot_shadow_largest_difference",
        "triglot_traffic_percent",
    )
)


def values_by_key(parts: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return the values of each key, in the order in which the keys first appear."""
    values: dict[str, list[Any]] = {}
    for part in parts:
        for key, value in part.items():
            values.setdefault(key, []).append(value)
    return values


def merged(parts: Sequence[Any], rules: Mapping[str, Rule]) -> Any:
    """Merge numbers, or mappings of them by key, however nested; `rules`: of keys that are not summed."""
    if not isinstance(parts[0], Mapping):
        return sum(parts)
    return {
        key: rules[key](found) if key in rules else merged(found, rules)
        for key, found in values_by_key(parts).items()
    }


def merged_pages(pages: Sequence[tuple[int, Page]], past: Page | None = None) -> Page:
    """Merge the pages of workers, given with their numbers; `past`: the counters of workers that have ended."""
    families: dict[str, Family] = {}
    sums: dict[str, dict[Key, Value]] = {}
    for number, page in pages:
        for family in page["families"]:
            name = family["name"]
            merged = families.setdefault(name, family | {"samples": []})
            if merged["type"] == family["type"]:
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
    """Return a page with only its monotonic families, which are kept after a worker has ended."""
    return page | {"families": [family for family in page["families"] if family["type"] in MONOTONIC]}


def _add(sums: dict[Key, Value], family: Family, number: int) -> None:
    merge = _merge_function(family)
    for sample, labels, value, *exemplar in family["samples"]:
        # A model's own metric may already have a label of this name.
        distinct = labels if merge is not None else {WORKER: str(number)} | labels
        key = sample, tuple(distinct.items())
        before = sums.get(key)
        if before is None or merge is None:
            sums[key] = value, exemplar
        else:
            sums[key] = merge((before[0], value)), _latest(before[1], exemplar)


def _latest(first: list[Any], other: list[Any]) -> list[Any]:
    return max(first, other, key=lambda exemplar: exemplar[2] if exemplar else 0.0)


def _merge_function(family: Family) -> Callable[[Iterable[float]], float] | None:
    """Return the function that merges values; None if the workers' values are kept separate."""
    if family["type"] in MONOTONIC or family["name"] in SUMMED:
        return sum
    if family["name"] in MINIMUM:
        return min
    return max if family["name"] in MAXIMUM else None


def _add_past(sums: dict[Key, Value], family: Family) -> None:
    # Triton's counters belong to loaded versions and disappear with them.
    new = not family["name"].startswith("nv_")
    for sample, labels, value, *exemplar in family["samples"]:
        key = sample, tuple(labels.items())
        if new or key in sums:
            before = sums.get(key, (0, []))
            sums[key] = before[0] + value, _latest(before[1], exemplar)
