"""Pytest plugin for parallel runs: assigns tests to the workers of pytest-xdist.

The tests of a file, or of several files that share servers that are expensive to start, run on one worker, so each
server starts once.
"""

from __future__ import annotations

import gc
from collections.abc import Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pytest
from grpc_transport import is_over_aio

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

TOGETHER = {
    "tests/e2e/test_foreign_clients.py": "kserve",
    "tests/e2e/test_kserve_runtime.py": "kserve",
    "tests/cases/test_tfserving_cases.py": "tensorflow",
    "tests/e2e/test_every_protocol.py": "tensorflow",
    "tests/e2e/test_request_records.py": "tensorflow",
    "tests/e2e/test_tensorflow_batched.py": "tensorflow",
    "tests/e2e/test_tensorflow_client.py": "tensorflow",
    "tests/e2e/test_tensorflow_guide.py": "tensorflow",
    "tests/e2e/test_tensorflow_versions.py": "tensorflow",
    "tests/e2e/test_tensorflow_warm_up.py": "tensorflow",
    "tests/pb/test_pb_tfserving.py": "tensorflow",
    "tests/protocols/test_tfserving_stock.py": "tensorflow",
    "tests/protocols/test_tfserving_warmup.py": "tensorflow",
    "tests/cli/test_check.py": "tensorflow",
    "tests/docs/test_pages.py": "tensorflow",
    "tests/e2e/test_try_snippets.py": "tensorflow",
}
"""Names of groups of several files, in the order in which these run: they share expensive servers, or the process
that they are forked from."""
LONGEST = (
    "tests/executors/test_ray_missing.py",
    "tests/e2e/test_rolling_restart.py",
    "tensorflow",
    "kserve",
    "tests/e2e/test_hundred_swaps.py",
    "tests/transports/test_failed_bodies.py",
    "tests/backends/test_torch_missing.py",
    "bench/test_load.py",
    "tests/transports/test_h2_hostile_tls.py",
    "tests/e2e/test_request_states.py",
    "tests/deploy/test_deploy_missing.py",
    "tests/e2e/test_try_models.py",
    "tests/e2e/test_grps_streams.py",
    "tests/cli/test_tfserving_start.py",
    "tests/repository/test_storage_s3.py",
    "tests/access/test_probes.py",
    "tests/e2e/test_openapi_tools.py",
    "tests/executors/test_process_chaos.py",
    "tests/backends/test_sklearn_missing.py",
    "tests/e2e/test_deadlines.py",
    "tests/access/test_no_secret_leaks.py",
    "tests/transports/test_raised_by_models.py",
    "tests/telemetry/test_span_export.py",
    "tests/protocols/test_kserve_shared_memory_safe.py",
    "tests/e2e/test_load_failures.py",
    "tests/access/test_odd_requests.py",
    "tests/transports/test_h2_hostile.py",
    "tests/transports/test_tls_slow_readers.py",
    "tests/pb/test_pb_descriptors.py",
    "tests/cases/test_grps_cases.py",
    "tests/transports/test_call_leaks.py",
    "tests/workers/test_workers_live.py",
    "tests/access/test_strangers.py",
    "tests/workers/test_workers_stalled.py",
    "tests/e2e/test_tensorflow_backend.py",
    "tests/repository/test_storage_web.py",
    "tests/transports/test_connections_bounded.py",
    "tests/e2e/test_request_ends.py",
)
"""The longest groups, which start first: started last, one would keep its worker busy after the others ended.

Those that mostly wait begin between those that compute, so that the cores are busy."""

YOUNG_OBJECTS = 20_000
"""New objects that trigger a garbage collection: with Python's 700, collections take 3 % of the tests' time."""


def group_of(node_id: str) -> str:
    """Return the name of a test's group; the tests of a group run on one worker, one after the other."""
    file = node_id.split("::", 1)[0]
    return TOGETHER.get(file, file) + " over aio" * is_over_aio(node_id)


class CollectedTests(list[str]):
    """The tests that a worker has collected, in their order; each is found at once by its id."""

    def __init__(self, node_ids: Iterable[str]) -> None:
        super().__init__(node_ids)
        self._places = {node_id: place for place, node_id in enumerate(self)}

    def index(self, node_id: str, *_: Any) -> int:
        """Return the place of a test. Raise `KeyError`."""
        return self._places[node_id]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> object:
    """Return the scheduler."""
    from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - some environments lack it.

    class Groups(LoadScopeScheduling):  # type: ignore[misc]  # It has no types.
        """Schedules the tests by groups, in their order: the longest first."""

        def add_node_collection(self, node: WorkerController, collection: Sequence[str]) -> None:
            super().add_node_collection(node, collection)
            if node in self.registered_collections:
                self.registered_collections[node] = CollectedTests(collection)

        def mark_test_complete(self, node: WorkerController, item_index: int, duration: float = 0) -> None:
            super().mark_test_complete(node, item_index, duration)
            # Else all that the worker has ever done would be looked through after each test.
            group = group_of(self.registered_collections[node][item_index])
            groups = self.assigned_work.get(node, {})
            if group in groups and all(groups[group].values()):
                del groups[group]

        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

        def _reschedule(self, node: WorkerController) -> None:
            # A worker that replaces a lost one may not have reported its collected tests yet.
            if node in self.registered_collections:
                super()._reschedule(node)

    config.option.loadscopereorder = False
    return Groups(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the longest groups first, and the files of a group as in `TOGETHER`; otherwise the order is kept.

    The tests over grpc.aio are last: between those and the others a worker starts its servers anew.
    """
    ranks = {group: rank for rank, group in enumerate(LONGEST)}
    places = {file: place for place, file in enumerate(TOGETHER)}

    def rank_of(item: pytest.Item) -> tuple[bool, int, int]:
        file = item.nodeid.split("::", 1)[0]
        group = TOGETHER.get(file, file)
        return is_over_aio(item.nodeid), ranks.get(group, len(ranks)), places.get(file, len(places))

    items.sort(key=rank_of)


def pytest_collection() -> None:
    """Disable the garbage collector during collection: all objects made then stay alive."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Exclude all objects made so far from garbage collection, which many tests and the code under test run."""
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, *gc.get_threshold()[1:])
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After the tests of a file, also exclude what they left, if it is much: modules that they imported first."""
    done = yield
    if (nextitem is None or nextitem.path != item.path) and any(gc.get_count()[1:]):
        gc.collect()
        gc.freeze()
    return done
