"""Codec work that is too long for the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

OFF_LOOP_BYTES = 128 * 1024
"""Text larger than this takes longer than the way to a thread and back."""


async def run_sized(size: int, function: Callable[..., T], *arguments: object) -> T:
    """What `function` gives, on a thread when it has more than `OFF_LOOP_BYTES` to work through."""
    if size > OFF_LOOP_BYTES:
        return await asyncio.to_thread(function, *arguments)
    return function(*arguments)
