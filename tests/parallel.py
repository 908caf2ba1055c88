"""Pytest plugin for parallel runs: assigns tests to the workers of pytest-xdist, and runs some tests exclusively.

Strategy: the tests of a file, or of several files that share servers that are expensive to start, run on one
worker, so each server starts once. Tests with the mark `alone` measure something that concurrent tests would
distort. All workers synchronise by two file locks, used as a readers-writer lock: a test with the mark holds the
second one exclusively, and keeps it if the next test has the mark, too. The files with such tests run first, and
on one worker: later, each would wait for long tests of the other workers, and these for it.
"""

from __future__ import annotations

import fcntl
import gc
import tempfile
from collections.abc import Generator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from grpc_transport import is_over_aio

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

TOGETHER = {
    "tests/repository/test_freed.py": "alone",
    "tests/transports/test_large_json.py": "alone",
    "tests/e2e/test_grps_streams.py": "alone",
    "tests/executors/test_ray_missing.py": "alone",
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
}
"""Names of groups of several files, in the order in which these run: those with tests that run alone, and then
the one whose test takes minutes, for which they would wait; those that share expensive servers, or the process
that they are forked from."""
LONGEST = (
    "alone",
    "tests/e2e/test_rolling_restart.py",
    "tests/transports/test_failed_bodies.py",
    "tensorflow",
    "tests/docs/test_pages.py",
    "tests/transports/test_h2_hostile_tls.py",
    "tests/e2e/test_kserve_runtime.py",
    "tests/deploy/test_deploy_missing.py",
    "tests/backends/test_torch_missing.py",
    "bench/test_spans.py",
    "tests/cli/test_tfserving_start.py",
    "tests/repository/test_storage_s3.py",
    "tests/e2e/test_hundred_swaps.py",
    "tests/e2e/test_foreign_clients.py",
    "tests/e2e/test_try_models.py",
    "bench/test_load.py",
    "tests/executors/test_process_chaos.py",
    "tests/e2e/test_try_snippets.py",
    "tests/access/test_no_secret_leaks.py",
    "tests/telemetry/test_span_export.py",
    "tests/access/test_probes.py",
    "tests/e2e/test_load_failures.py",
    "tests/e2e/test_request_states.py",
    "tests/access/test_odd_requests.py",
    "tests/cases/test_grps_cases.py",
    "tests/transports/test_h2_hostile.py",
    "tests/backends/test_sklearn_missing.py",
    "bench/test_storms.py",
    "tests/workers/test_workers_live.py",
    "tests/e2e/test_tensorflow_backend.py",
    "tests/repository/test_storage_web.py",
    "tests/workers/test_workers_deaf.py",
    "bench/test_access.py",
    "bench/test_scheduling.py",
    "tests/transports/test_tls_slow_readers.py",
    "tests/transports/test_connections_bounded.py",
    "tests/e2e/test_request_ends.py",
)
"""The longest groups, which start first: started last, one would keep its worker busy after the others ended."""
_FOLDER = "turns"


def group_of(node_id: str) -> str:
    """Returns the name of a test's group; the tests of a group run on one worker, one after the other."""
    file = node_id.split("::", 1)[0]
    return TOGETHER.get(file, file) + " over aio" * is_over_aio(node_id)


class LoadLock:
    """A readers-writer lock between processes, made of two files.

    A process that waits for the second one holds the first, so that no other can overtake it.
    """

    def __init__(self, folder: Path) -> None:
        with ExitStack() as files:
            self._door, self._room = (files.enter_context((folder / name).open("w")) for name in ("door", "room"))
            self._files = files.pop_all()

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """Hold the lock for the block: exclusively with `alone`, else shared with others that are not `alone`."""
        fcntl.flock(self._door, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._room, fcntl.LOCK_EX if alone else fcntl.LOCK_SH)
        finally:
            fcntl.flock(self._door, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._room, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the files."""
        self._files.close()


def runs_alone(item: pytest.Item) -> bool:
    """Returns whether no other test may run at the same time."""
    return item.get_closest_marker("alone") is not None


class Worker:
    """Plugin of a worker process: takes the lock for each test."""

    def __init__(self, folder: Path) -> None:
        self._load_lock = LoadLock(folder)
        self._alone = ExitStack()
        self._is_alone = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """Hold the lock while a test runs, with the setup and teardown of its fixtures."""
        if not runs_alone(item):
            with self._load_lock.turn(alone=False):
                return (yield)
        if not self._is_alone:
            self._alone.enter_context(self._load_lock.turn(alone=True))
            self._is_alone = True
        try:
            return (yield)
        finally:
            if nextitem is None or not runs_alone(nextitem):
                self._is_alone = False
                self._alone.close()

    def pytest_unconfigure(self) -> None:
        """Close the lock's files."""
        self._load_lock.close()


class Controller:
    """Plugin of the controller process: schedules the tests, and owns the folder of the locks' files."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="triglot-tests-")

    def pytest_configure_node(self, node: WorkerController) -> None:
        """Send a worker the path of the locks' folder."""
        node.workerinput[_FOLDER] = self._folder.name

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Producer) -> object:
        """Returns the scheduler."""
        from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - some environments lack it.

        class Groups(LoadScopeScheduling):  # type: ignore[misc]  # It has no types.
            """Schedules the tests by groups, in their order: the longest first."""

            def _split_scope(self, nodeid: str) -> str:
                return group_of(nodeid)

            def _reschedule(self, node: WorkerController) -> None:
                # A worker that replaces a lost one may not have reported its collected tests yet.
                if node in self.registered_collections:
                    super()._reschedule(node)

        config.option.loadscopereorder = False
        return Groups(config, log)

    def pytest_unconfigure(self) -> None:
        """Delete the locks' folder."""
        self._folder.cleanup()


def pytest_configure(config: pytest.Config) -> None:
    """Register the plugin of a worker or of the controller, if there are workers."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is not None:
        config.pluginmanager.register(Worker(Path(worker[_FOLDER])))
    elif getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Controller())


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
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After the tests of a file, also exclude what they left, such as modules that they were first to import."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done
