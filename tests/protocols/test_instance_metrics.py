"""How much of a model's instances is used, and which versions run, at /metrics."""

from __future__ import annotations

import asyncio
import platform
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as open_metrics
from prometheus_client.parser import text_string_to_metric_families as classic

import triglot
from tests.protocols.control_clients import ask, put
from tests.protocols.kserve_served import Served, serve_models
from tests.served_models import X, Y
from tests.waiting import until_found
from triglot.testing import GatedModel

READERS: dict[str, Any] = {"text/plain": classic, "application/openmetrics-text": open_metrics}


class OnTheLoop(triglot.Model):
    inputs, outputs = X, Y

    async def infer(self, inputs: Any) -> Any:
        return {"y": inputs["x"]}


async def readings(served: Served, accept: str) -> dict[str, float]:
    """The numbers of model m, by name, and of no model."""
    _, _, body = await served.rest.call("GET", "/metrics", headers={"Accept": accept})
    samples = [sample for family in READERS[accept](body.decode()) for sample in family.samples]
    return {sample.name: sample.value for sample in samples if sample.labels == {"model": "m", "version": "1"}}


@pytest.mark.parametrize("accept", READERS)
async def test_busy_instances_of_all(tmp_path: Path, accept: str) -> None:
    put(tmp_path / "m" / "1")
    model = GatedModel("infer", instances=3, inputs=X, outputs=Y)
    async with serve_models([tmp_path], load=lambda *_: model) as served:
        calls = [asyncio.create_task(ask(served, "m")) for _ in range(2)]

        async def look() -> dict[str, float]:
            return await readings(served, accept)

        found = await until_found(look, lambda values: values["triglot_instances_busy"] == 2)
        assert (found["triglot_instances"], found["triglot_held_requests"]) == (3, 2)
        calls += [asyncio.create_task(ask(served, "m")) for _ in range(2)]
        found = await until_found(look, lambda values: values["triglot_queue_depth"] == 1)
        assert (found["triglot_instances_busy"], found["triglot_held_requests"]) == (3, 4)
        model.open_point("infer")
        await asyncio.gather(*calls)
        await until_found(look, lambda values: values["triglot_instances_busy"] == 0)


async def test_code_on_the_loop_has_no_instances(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    async with serve_models([tmp_path], load=lambda *_: OnTheLoop()) as served:
        await ask(served, "m")
        found = await readings(served, "text/plain")
        assert found["triglot_held_requests"] == 0
        assert not [name for name in found if name.startswith("triglot_instances")]


async def test_requests_are_counted_without_limits(tmp_path: Path) -> None:
    """An autoscaler asks for them."""
    put(tmp_path / "m" / "1")
    none = {"max_queue_bytes": 0, "max_total_queue_size": 0, "max_total_queue_bytes": 0}
    model = GatedModel("infer", instances=3, inputs=X, outputs=Y)
    async with serve_models([tmp_path], load=lambda *_: model, **none) as served:
        call = asyncio.create_task(ask(served, "m"))
        await until_found(
            lambda: readings(served, "text/plain"), lambda values: values["triglot_held_requests"] == 1
        )
        model.open_point("infer")
        await call


async def test_batches_on_the_loop_use_an_instance_each(tmp_path: Path) -> None:
    put(tmp_path / "m" / "1")
    model = OnTheLoop()
    model.dynamic_batching = triglot.DynamicBatching(max_batch_size=4)
    async with serve_models([tmp_path], load=lambda *_: model) as served:
        await ask(served, "m")
        found = await readings(served, "text/plain")
        assert (found["triglot_instances"], found["triglot_instances_busy"]) == (1, 0)


@pytest.mark.parametrize("accept", READERS)
async def test_which_versions_run(tmp_path: Path, accept: str) -> None:
    put(tmp_path / "m" / "1")
    async with serve_models([tmp_path]) as served:
        _, _, body = await served.rest.call("GET", "/metrics", headers={"Accept": accept})
        (build,) = [family for family in READERS[accept](body.decode()) if family.name == "triglot_build_info"]
        (sample,) = build.samples
        assert sample.labels == {"version": triglot.__version__, "python": platform.python_version()}
        assert sample.value == 1
