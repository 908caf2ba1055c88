"""Differences between versions of libraries that tests have to consider."""

from __future__ import annotations

import aiohttp

OLD_AIOHTTP = tuple(map(int, aiohttp.__version__.split(".")[:2])) < (3, 14)
"""Whether aiohttp may leave the call of a disconnected client to the garbage collector, as 3.10 does."""
