"""Triton's metrics at /metrics: names, types, labels and units (spec 6)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as classic

from tests.protocols.control_clients import ask, put, put_config
from tests.protocols.kserve_served import Served, serve_models
from triglot.protocols.monitor.triton_metrics import without_exponents
from triglot.telemetry.process import MachineUsage

COUNTERS = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
}
CACHED = {
    "nv_cache_num_hits_per_model",
    "nv_cache_num_misses_per_model",
    "nv_cache_hit_duration_per_model",
    "nv_cache_miss_duration_per_model",
}
GAUGES = {"nv_inference_pending_request_count", "nv_model_load_duration_secs"}
MACHINE = {"nv_cpu_utilization", "nv_cpu_memory_total_bytes", "nv_cpu_memory_used_bytes"}


READERS: dict[str, Any] = {"text/plain": classic, "application/openmetrics-text": open_metrics}


async def page(served: Served, accept: str) -> str:
    status, _, body = await served.rest.call("GET", "/metrics", headers={"Accept": accept})
    assert status == 200
    return body.decode()


def types(text: str) -> dict[str, str]:
    """Of Triton's metrics."""
    found = [line.removeprefix("# TYPE ") for line in text.splitlines() if line.startswith("# TYPE nv_")]
    return dict(line.split(" ") for line in found)


def samples(text: str) -> dict[str, float]:
    """Triton's numbers, by their names and labels as they are written."""
    found = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("nv_")]
    return {name: float(value) for name, value in found}


@pytest.mark.parametrize("cached", [False, True])
async def test_the_older_format(tmp_path: Path, cached: bool) -> None:
    put(tmp_path / "m" / "3", says=1)
    put_config(tmp_path / "m", "response_cache { enable: true }" if cached else "")
    async with serve_models([tmp_path], response_cache_bytes=1 << 20) as served:
        for _ in range(2):
            assert await ask(served, "m") == 1
        text = await page(served, "")
        counters, labels = COUNTERS | (CACHED if cached else set()), '{model="m",version="3"}'
        assert types(text) == dict.fromkeys(counters, "counter") | dict.fromkeys(GAUGES | MACHINE, "gauge")
        failure, found = "nv_inference_request_failure", samples(text)
        failures = {
            f'{failure}{{model="m",reason="{reason}",version="3"}}'
            for reason in ("REJECTED", "CANCELED", "BACKEND", "OTHER")
        }
        of_model = {f"{name}{labels}" for name in (counters | GAUGES) - {failure}}
        assert found.keys() == of_model | failures | MACHINE
        assert {found[name] for name in failures} == {0}
        assert found[f"nv_inference_request_success{labels}"] == 2
        assert found[f"nv_inference_count{labels}"] == (1 if cached else 2)


async def test_both_formats_can_be_read(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    async with serve_models([tmp_path]) as served:
        await ask(served, "m")
        names = COUNTERS | GAUGES | MACHINE
        read, newer = [
            {family.name: family for family in parse(await page(served, accept))}
            for accept, parse in READERS.items()
        ]
        assert names <= read.keys()
        assert {read[name].type for name in COUNTERS} == {"counter"}
        assert names <= newer.keys()
        # As they are called by Triton: a counter would have another name there.
        assert {newer[name].type for name in COUNTERS} == {"unknown"}
        assert {sample.name for name in names for sample in newer[name].samples} == names
        (share,), (used,), (total,) = (
            [sample.value for sample in read[name].samples]
            for name in ("nv_cpu_utilization", "nv_cpu_memory_used_bytes", "nv_cpu_memory_total_bytes")
        )
        assert 0 <= share <= 1
        assert 0 < used < total


async def test_tags_of_the_configuration_are_labels(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    tags = {"team": "red", "not a name": "x", "version": "9"}
    entries = " ".join(f"metric_tags {{ key: '{name}' value: '{value}' }}" for name, value in tags.items())
    put_config(tmp_path / "m", entries)
    async with serve_models([tmp_path]) as served:
        assert 'nv_inference_count{_team="red",_version="9",model="m",version="1"}' in samples(
            await page(served, "")
        )


def test_a_share_of_no_time_is_none() -> None:
    machine = MachineUsage()
    for _ in range(3):
        assert 0 <= machine.cpu_share() <= 1


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        (b"m 3.4e+09", b"m 3400000000"),
        (b'm{le="1e+06"} -1.2345678901e+09', b'm{le="1e+06"} -1234567890.1'),
        (b"m 1.0\nn 9.007199254740991e+15\nm 2.5", b"m 1.0\nn 9007199254740991\nm 2.5"),
        (b"m 1e+16", b"m 1e+16"),
        (b"m 1e-05", b"m 1e-05"),
        (b"# HELP m 1e+06 is a number.", b"# HELP m 1e+06 is a number."),
        (b"m +Inf", b"m +Inf"),
    ],
)
def test_large_values_have_all_their_digits(printed: bytes, expected: bytes) -> None:
    assert without_exponents(printed) == expected
