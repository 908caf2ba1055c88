"""Counts calls by their outcome."""

from __future__ import annotations

import time
from collections.abc import Awaitable
from typing import TypeVar

from triglot.core.errors import Code, outcome
from triglot.telemetry import Telemetry

T = TypeVar("T")


async def counted(telemetry: Telemetry, door: str, api: str, model: str, work: Awaitable[T]) -> T:
    """What the work gives; it is recorded when it ends, however it does."""
    started = time.perf_counter()
    code = Code.OK
    try:
        return await work
    except BaseException as error:
        code = outcome(error)
        raise
    finally:
        telemetry.record(door, api, model, code, time.perf_counter() - started)
