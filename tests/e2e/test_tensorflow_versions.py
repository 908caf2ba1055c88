"""Versions of a SavedModel appear and disappear on disk while clients call all the time: no call fails."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from tests.e2e.model_configs import config_flag, config_text
from tests.e2e.server_process import ServerProcess
from tests.e2e.steady_caller import Caller
from tests.protocol_clients.rest import Rest
from tests.protocol_clients.tfserving import Status, failure, predict, predict_request, statuses
from tests.waiting import wait_until

pytestmark = pytest.mark.newest

Y = {"half_plus_two": 2.5, "half_plus_three": 3.5}
STABLE = "model_version_policy { all {} } version_labels { key: 'stable' value: 1 }"


class BasePath:
    """A folder whose versions come and go."""

    def __init__(self, folder: Path, models: Path) -> None:
        self.folder = folder
        self._models = models
        folder.mkdir()

    def copy(self, version: int, model: str) -> None:
        """File by file, while the server looks."""
        shutil.copytree(self._models / model / "00000123", self.folder / str(version))

    def move(self, version: int, model: str) -> None:
        """All at once."""
        written = self.folder.with_name(f"written-{version}")
        shutil.copytree(self._models / model / "00000123", written)
        written.rename(self.folder / str(version))

    def spoil(self, version: int, model: str) -> None:
        """A version that cannot be loaded."""
        written = self.folder.with_name(f"written-{version}")
        shutil.copytree(self._models / model / "00000123", written)
        (written / "variables" / "variables.index").unlink()
        written.rename(self.folder / str(version))

    def remove(self, version: int) -> None:
        shutil.rmtree(self.folder / str(version))


@pytest.fixture(scope="module")
def base_paths(models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, BasePath]:
    """One for each test; its version 1 is half_plus_two."""
    folder = tmp_path_factory.mktemp("base_paths")
    base_paths = {name: BasePath(folder / name, models) for name in ("busy", "emptied", "unmounted")}
    for base_path in base_paths.values():
        base_path.copy(1, "half_plus_two")
    return base_paths


@pytest.fixture(scope="module")
def polling(
    base_paths: dict[str, BasePath], tensorflow: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[ServerProcess]:
    """A server that looks often. Of each folder, NAME-latest has the latest version, NAME-all every one."""
    texts = [
        config_text(f"{name}-{which}", base_path.folder, more)
        for name, base_path in base_paths.items()
        for which, more in (("latest", ""), ("all", STABLE))
    ]
    flag = config_flag(tmp_path_factory.mktemp("polling") / "models.config", *texts)
    often = "--file_system_poll_wait_seconds=0.05"
    with ServerProcess(flag, often, command="tfserving", python=tensorflow) as process:
        yield process


@pytest.fixture
def channel(polling: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(polling.grpc_address) as channel:
        yield channel


def by_grpc(channel: grpc.Channel, model: str, label: str = "") -> Callable[[], tuple[int, float]]:
    """What the model makes of 1, and the version that does."""
    request = predict_request(model, [1.0], label)

    def ask() -> tuple[int, float]:
        response = predict(channel, request)
        (y,) = response.outputs["y"].float_val
        return response.model_spec.version.value, y

    return ask


def by_rest(server: ServerProcess, model: str) -> Callable[[], float]:
    rest = Rest(int(server.rest_address.rpartition(":")[2]))

    def ask() -> float:
        status, answer = rest.post(f"/v1/models/{model}:predict", {"instances": [1.0]})
        assert status == 200, answer
        (y,) = answer["predictions"]
        assert isinstance(y, float)
        return y

    return ask


def until_statuses(channel: grpc.Channel, model: str, *expected: Status) -> None:
    """Wait until the model has these versions."""
    wait_until(lambda: statuses(channel, model) == list(expected))


def test_versions_come_and_go(
    polling: ServerProcess, channel: grpc.Channel, base_paths: dict[str, BasePath]
) -> None:
    base_path = base_paths["busy"]
    two, three = Y["half_plus_two"], Y["half_plus_three"]
    with (
        Caller(by_grpc(channel, "busy-latest")) as latest,
        Caller(by_rest(polling, "busy-latest")) as rest,
        Caller(by_grpc(channel, "busy-all", "stable")) as stable,
    ):

        def wait_for(version: int, y: float) -> None:
            latest.wait_for((version, y))
            rest.wait_for(y)

        wait_for(1, two)
        base_path.copy(2, "half_plus_three")
        wait_for(2, three)
        until_statuses(channel, "busy-latest", Status(2, "AVAILABLE"), Status(1, "END"))
        until_statuses(channel, "busy-all", Status(2, "AVAILABLE"), Status(1, "AVAILABLE"))
        base_path.move(4, "half_plus_two")
        wait_for(4, two)
        # Not before it has been loaded everywhere: a file that goes while it is read is an error.
        available = [Status(version, "AVAILABLE") for version in (4, 2, 1)]
        until_statuses(channel, "busy-all", *available)
        # Back again.
        base_path.remove(4)
        wait_for(2, three)
        until_statuses(channel, "busy-latest", Status(4, "END"), Status(2, "AVAILABLE"), Status(1, "END"))
        until_statuses(channel, "busy-all", Status(4, "END"), Status(2, "AVAILABLE"), Status(1, "AVAILABLE"))
        # One that cannot be loaded takes nobody's place.
        base_path.spoil(5, "half_plus_two")
        wait_until(lambda: statuses(channel, "busy-all")[0].error != "")
        spoilt, *others = statuses(channel, "busy-all")
        assert spoilt[:2] == (5, "END")
        assert str(base_path.folder / "5") in spoilt.error
        assert others == [Status(4, "END"), Status(2, "AVAILABLE"), Status(1, "AVAILABLE")]
        base_path.copy(6, "half_plus_two")
        wait_for(6, two)
    assert latest.answers == [(1, two), (2, three), (4, two), (2, three), (6, two)]
    assert rest.answers == [two, three, two, three, two]
    assert stable.answers == [(1, two)]


def test_all_versions_go(channel: grpc.Channel, base_paths: dict[str, BasePath]) -> None:
    """The label stays, and finds nothing; a later version serves."""
    base_path = base_paths["emptied"]
    base_path.remove(1)
    until_statuses(channel, "emptied-all", Status(1, "END"))
    until_statuses(channel, "emptied-latest", Status(1, "END"))
    for model, label, which in (
        ("emptied-latest", "", "Latest(emptied-latest)"),
        ("emptied-all", "", "Latest(emptied-all)"),
        ("emptied-all", "stable", "Specific(emptied-all, 1)"),
    ):
        found = failure(by_grpc(channel, model, label))
        assert found == (grpc.StatusCode.NOT_FOUND, f"Servable not found for request: {which}")
    base_path.copy(1, "half_plus_three")
    until_statuses(channel, "emptied-all", Status(1, "AVAILABLE"))
    assert by_grpc(channel, "emptied-all", "stable")() == (1, Y["half_plus_three"])


def test_a_base_path_that_cannot_be_read(
    polling: ServerProcess, channel: grpc.Channel, base_paths: dict[str, BasePath]
) -> None:
    """A mount that went away for a while is no reason to stop serving."""
    base_path = base_paths["unmounted"]
    with Caller(by_grpc(channel, "unmounted-latest")) as latest:
        latest.wait_for((1, Y["half_plus_two"]))
        away = base_path.folder.rename(base_path.folder.with_name("away"))
        polling.stderr.wait_for(f"Could not find base path {base_path.folder} for servable unmounted-latest")
        away.rename(base_path.folder)
        base_path.copy(2, "half_plus_three")
        latest.wait_for((2, Y["half_plus_three"]))
    assert latest.answers == [(1, Y["half_plus_two"]), (2, Y["half_plus_three"])]
