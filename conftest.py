"""For all tests: a property is tried with `EXAMPLES` examples, without a time limit, as machines are shared."""

import os

import pytest

pytest_plugins = [
    "tests.transports.grpc_transport",
    "tests.executors.ray_nodes",
    "tests.json_libraries",
]

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass  # Some environments have no property tests.
else:
    settings.register_profile(
        "untimed",
        deadline=None,
        max_examples=int(os.environ.get("EXAMPLES", "50")),
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("untimed")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let long tests begin first: else the run ends with one worker that is at them, and others that wait."""
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
