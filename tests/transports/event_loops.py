"""Both event loops for the tests of what is ours in the transports; the others run on asyncio's own."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

ON_BOTH = {
    "test_grpc_alike.py",
    "test_half_closed.py",
    "test_h2_calls.py",
    "test_h2_fuzzed.py",
    "test_h2_hostile.py",
    "test_h2_hostile_tls.py",
    "test_tls_slow_readers.py",
}
LoopFactory = Callable[[], asyncio.AbstractEventLoop]


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(item: pytest.Item) -> Mapping[str, LoopFactory]:
    """By name, the loops that a test runs on."""
    loops: dict[str, LoopFactory] = {"asyncio": asyncio.new_event_loop}
    if item.path.name in ON_BOTH:
        import uvloop  # noqa: PLC0415 - other environments do without its tests.

        loops["uvloop"] = uvloop.new_event_loop
    return loops
