"""What tests have to know of the versions of libraries."""

from __future__ import annotations

import aiohttp

OLD_AIOHTTP = tuple(map(int, aiohttp.__version__.split(".")[:2])) < (3, 14)
"""Whether it may leave the call of a client that has left to the garbage collector, as 3.10 does."""
