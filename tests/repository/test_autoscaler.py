"""Instances that come and go with the queue: threads, whose number changes in the same way as that of actors."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest

from tests.direct_work import direct_infer
from tests.waiting import until
from triglot import Call
from triglot.model.config import InstanceGroup, ModelConfig
from triglot.model.ray_options import RayOptions
from triglot.repository.manager import autoscaler
from triglot.repository.manager.autoscaler import Load, autoscale
from triglot.scheduling.servable import Servable
from triglot.testing import GatedModel

LOOK = 0.02


def counted_call(servable: Servable) -> Call:
    call = Call()
    call.statistics = servable.statistics
    return call


async def test_instances_come_while_requests_wait_and_go_when_none_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "CALM_LOOKS", 5)
    model = GatedModel()
    model.model_config = ModelConfig(instance_groups=(InstanceGroup(count=1),))
    model.ray = RayOptions(max_instances=3, max_wait=0.01)
    servable = Servable("gated", 1, model, max_queue_size=100)
    scaling = asyncio.create_task(autoscale(servable, LOOK))
    try:
        model.close_point("infer")
        x = {"x": np.zeros(1, np.float32)}
        calls = [asyncio.create_task(direct_infer(servable, x, counted_call(servable))) for _ in range(20)]
        await until(lambda: servable.instances == 3)
        began = time.monotonic()
        await until(lambda: time.monotonic() > began + 5 * LOOK)
        assert servable.instances == 3  # No more than that.
        model.open_point("infer")
        assert len(await asyncio.gather(*calls)) == 20
        await until(lambda: servable.instances == 1)
        began = time.monotonic()
        await until(lambda: time.monotonic() > began + 10 * LOOK)
        assert servable.instances == 1
        # What is configured is the least number, still.
        assert [group.count for group in model.model_config.instance_groups] == [1]
        assert (await direct_infer(servable, x, Call()))["y"] == 0
    finally:
        scaling.cancel()
        await servable.close()


async def test_a_call_now_and_then_keeps_no_instance(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoscaler, "CALM_LOOKS", 5)
    model = GatedModel()
    model.instances = 2
    servable = Servable("gated", 1, model, max_queue_size=100)
    try:
        load = Load(servable, max_wait=60.0)
        model.close_point("infer")
        call = asyncio.create_task(direct_infer(servable, {"x": np.zeros(1, np.float32)}, counted_call(servable)))
        await until(lambda: servable.busy == 1 and servable.queue_depth == 0)  # Its thread has taken it.
        changes = [load.step()]
        model.open_point("infer")
        await call
        await until(lambda: servable.busy == 0)
        changes += [load.step() for _ in range(4)]
        assert changes == [0, 0, 0, 0, -1]
    finally:
        await servable.close()
