"""Models in a repository whose configuration, or whose class, says how they are scheduled."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.repository.written_model import ROWS, serving, write
from tests.served_models import Served
from tests.waiting import until
from triglot.core.errors import ModelLoadError
from triglot.core.operation import EVERYTHING

NEVER = "max_queue_delay_microseconds: 30000000"
"""A delay that no test waits for: the batch fills up before."""
OF_FOUR = "max_batch_size = 4"
HELD = "gate, entered = threading.Event(), threading.Event()"
HELD_ROWS = f"self.entered.set() or self.gate.wait(30) and {ROWS}"
"""Answers when the test opens the gate."""


async def sizes(here: Served, *rows: int) -> list[list[int]]:
    """Of requests with so many rows, all at once, what each gets of its batch."""
    calls = [here.infer("m", np.zeros(count, np.int32)) for count in rows]
    return [answer.tolist() for answer in await asyncio.gather(*calls)]


@pytest.mark.parametrize(
    ("config", "own"),
    [
        (f"max_batch_size: 4 dynamic_batching {{ {NEVER} }}", "pass"),
        (f"dynamic_batching {{ {NEVER} }}", "max_batch_size = 4"),
        (f"dynamic_batching {{ {NEVER} preferred_batch_size: 4 }}", "max_batch_size = 8"),
        (None, "max_batch_size, dynamic_batching = 4, triglot.DynamicBatching(max_queue_delay=30)"),
    ],
    ids=["configuration", "the model's size", "preferred size", "class"],
)
async def test_requests_share_a_batch(tmp_path: Path, config: str | None, own: str) -> None:
    async with serving(write(tmp_path, config, own)) as here:
        assert await sizes(here, 1, 3) == [[4], [4, 4, 4]]


async def test_a_load_request_has_a_model_batched(tmp_path: Path) -> None:
    async with serving(write(tmp_path, own=OF_FOUR), model_control_mode="explicit", load_model="m") as here:
        assert await sizes(here, 2, 2) == [[2, 2]] * 2
        batching = {"max_queue_delay_microseconds": "30000000"}
        await here.server.dataplane.load_model(EVERYTHING, "m", json.dumps({"dynamic_batching": batching}))
        assert await sizes(here, 2, 2) == [[4, 4]] * 2


async def test_without_a_batch_dim_the_queues_policy_holds(tmp_path: Path) -> None:
    config = "dynamic_batching { default_queue_policy { max_queue_size: 1 } }"
    async with serving(write(tmp_path, config, HELD, rows_code=HELD_ROWS)) as here:
        (servable,) = (version.servable for version in here.server.dataplane.versions(EVERYTHING))
        assert servable is not None
        model: Any = servable.model
        busy = asyncio.ensure_future(sizes(here, 3))
        assert await asyncio.to_thread(model.entered.wait, 30)
        two, one_row = np.zeros(2, np.int32), np.zeros(1, np.int32)
        first = asyncio.ensure_future(here.infer("m", two))
        await until(lambda: servable.queue_depth == 1)
        second = await here.error("m", one_row)
        model.gate.set()
        assert await busy == [[3, 3, 3]]
        assert (await first).tolist() == [2, 2]
        assert second.message.startswith("Exceeds maximum queue size: 1 requests are queued")


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ("dynamic_batching = True", "ValueError: dynamic_batching: expected DynamicBatching, got True"),
        (
            "dynamic_batching = triglot.DynamicBatching(preferred_sizes=[9]); max_batch_size = 4",
            "ValueError: dynamic_batching.preferred_sizes: expected at most the max_batch_size 4, got 9",
        ),
        (
            "dynamic_batching = triglot.DynamicBatching(max_queue_delay='1 ms')",
            "ValueError: dynamic_batching.max_queue_delay: expected seconds, got '1 ms'",
        ),
        (
            "execution = 'inline'",
            "ValueError: execution: expected thread, process or ray; 'inline' was removed: an async def infer",
        ),
        ("execution = 'fork'", "ValueError: execution: expected one of thread, process, ray, got 'fork'"),
    ],
)
async def test_a_class_that_is_wrong(
    tmp_path: Path, own: str, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ModelLoadError):
        async with serving(write(tmp_path, own=own)):
            pass
    (error,) = [record.getMessage() for record in caplog.records if message in record.getMessage()]
    assert str(tmp_path / "m" / "model.py") in error


async def test_a_configuration_that_does_not_fit_the_model(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = "dynamic_batching { preferred_batch_size: 5 }"
    with pytest.raises(ModelLoadError):
        async with serving(write(tmp_path, config, OF_FOUR)):
            pass
    key = "dynamic_batching.preferred_batch_size"
    assert f"{tmp_path / 'm' / 'config.pbtxt'}: {key}: expected at most the max_batch_size 4, got 5" in caplog.text
