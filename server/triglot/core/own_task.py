"""Whatever runs a call, code of users on the loop is given a task of asyncio's: it may want the whole of one."""

from __future__ import annotations

import asyncio
from collections.abc import Generator
from types import coroutine
from typing import Any

WANTS_TASK = object()
"""Yielded, where a future would be, to what runs the call: from here on it is to be a task of asyncio's."""


@coroutine
def as_task() -> Generator[Any, None, None]:
    """Let what comes next run in a task of asyncio's."""
    if not isinstance(asyncio.current_task(), asyncio.Task):
        yield WANTS_TASK
