"""Tests side by side: what goes to which of pytest-xdist's workers, and what runs while no other test does.

Strategy: a file of tests, or several that share what is dear to start, go to one worker, so each server starts
once. Tests with the mark `alone` measure, and the others would be measured too: all workers take turns at two
locks, of which such a test holds the second one for itself, and keeps it for the next test that has the mark. The
files with such tests come first, and on one worker: later, each would wait for long tests of the other workers,
and these for it.
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

if TYPE_CHECKING:
    from xdist.remote import Producer
    from xdist.workermanage import WorkerController

TOGETHER = {
    "tests/repository/test_freed.py": "alone",
    "tests/transports/test_large_json.py": "alone",
    "tests/e2e/test_grps_streams.py": "alone",
    "tests/e2e/test_tensorflow_client.py": "tensorflow",
    "tests/e2e/test_tensorflow_warm_up.py": "tensorflow",
}
"""Files that are one group: they have tests that run alone, or share a server that is dear to start; its name."""
LONGEST = (
    "alone",
    "tests/executors/test_ray_missing.py",
    "tests/transports/test_h2_hostile_tls.py",
    "bench/test_load.py",
    "tests/e2e/test_request_states.py",
    "tests/e2e/test_request_ends.py",
    "tests/e2e/test_kserve_runtime.py",
    "tests/e2e/test_openapi_tools.py",
    "tensorflow",
    "tests/docs/test_pages.py",
    "tests/backends/test_foreign_missing.py",
    "tests/transports/test_failed_bodies.py",
    "tests/executors/test_process_chaos.py",
    "tests/backends/test_torch_missing.py",
    "tests/cases/test_tfserving_cases.py",
    "tests/e2e/test_hundred_swaps.py",
    "bench/test_scheduling.py",
    "tests/workers/test_workers_live.py",
    "tests/workers/test_workers_deaf.py",
    "tests/workers/test_workers_counted.py",
    "tests/backends/test_sklearn_missing.py",
    "tests/e2e/test_foreign_clients.py",
    "tests/e2e/test_monitor_page.py",
    "tests/e2e/test_try_models.py",
    "tests/e2e/test_load_failures.py",
    "tests/e2e/test_process_instances.py",
    "tests/repository/test_reconciler_machine.py",
)
"""The groups that take longest: begun last, they would leave one worker alone at its work."""
_FOLDER = "turns"


def group_of(node_id: str) -> str:
    """The name of a test's group; the tests of a group run on one worker, one after the other."""
    file = node_id.split("::", 1)[0]
    return TOGETHER.get(file, file)


class LoadLock:
    """The two locks: who waits for the second one holds the first, so that nobody overtakes."""

    def __init__(self, folder: Path) -> None:
        with ExitStack() as files:
            self._door, self._room = (files.enter_context((folder / name).open("w")) for name in ("door", "room"))
            self._files = files.pop_all()

    @contextmanager
    def turn(self, *, alone: bool) -> Iterator[None]:
        """Wait until nobody runs who is `alone`; with `alone`, until nobody runs."""
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
        """Give back the files."""
        self._files.close()


def runs_alone(item: pytest.Item) -> bool:
    """Whether no other test may run meanwhile."""
    return item.get_closest_marker("alone") is not None


class Worker:
    """In each worker: its tests take their turns."""

    def __init__(self, folder: Path) -> None:
        self._load_lock = LoadLock(folder)
        self._alone = ExitStack()
        self._is_alone = False

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(
        self, item: pytest.Item, nextitem: pytest.Item | None
    ) -> Generator[None, object, object]:
        """One test, with the fixtures that are made for it and ended after it."""
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
        """The end."""
        self._load_lock.close()


class Controller:
    """In the process that has workers: it gives out the tests, and keeps the locks' files."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="triglot-tests-")

    def pytest_configure_node(self, node: WorkerController) -> None:
        """What a worker is told."""
        node.workerinput[_FOLDER] = self._folder.name

    def pytest_xdist_make_scheduler(self, config: pytest.Config, log: Producer) -> object:
        """Who gives out the tests."""
        from xdist.scheduler import LoadScopeScheduling  # noqa: PLC0415 - not every environment has it.

        class Groups(LoadScopeScheduling):  # type: ignore[misc]  # It has no types.
            """By groups, the long ones first."""

            def _split_scope(self, nodeid: str) -> str:
                return group_of(nodeid)

            def _reschedule(self, node: WorkerController) -> None:
                # One that takes the place of a lost worker may not have said yet what tests it knows.
                if node in self.registered_collections:
                    super()._reschedule(node)

        config.option.loadscopereorder = False
        return Groups(config, log)

    def pytest_unconfigure(self) -> None:
        """The end."""
        self._folder.cleanup()


def pytest_configure(config: pytest.Config) -> None:
    """Take part, in one role or the other, where there are workers."""
    worker: dict[str, Any] | None = getattr(config, "workerinput", None)
    if worker is not None:
        config.pluginmanager.register(Worker(Path(worker[_FOLDER])))
    elif getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(Controller())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups first; else the order stays as it is."""
    ranks = {group: rank for rank, group in enumerate(LONGEST)}
    items.sort(key=lambda item: ranks.get(group_of(item.nodeid), len(ranks)))


def pytest_collection() -> None:
    """Keep the garbage collector from looking through tests that are being collected: they stay."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Keep it from what is there to stay, from here on: many tests, and what they test, have it collect."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """Keep it from what the tests of a file have left, too, as modules that they were the first to import."""
    done = yield
    if nextitem is None or nextitem.path != item.path:
        gc.collect()
        gc.freeze()
    return done
