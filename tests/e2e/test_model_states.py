"""A model comes, is replaced, fails and goes; at each stage every interface tells the same story."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import grpc
import pytest

from tests.e2e.every_interface import EveryInterface, State, Story
from tests.e2e.server_process import ServerProcess
from tests.gates import GATE, Gate
from tests.process import IDENTITY, SECONDS, write_atomically, write_model
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import infer
from triglot.pb.kserve import inference_pb2 as pb

BROKEN = IDENTITY + "\n    def load(self, folder):\n        raise OSError('no disk')\n"
START, LOADING, READY, KEPT = State.START, State.LOADING, State.READY, State.KEPT
UNLOADING, FAILED, REPLACED, UNLOADED = State.UNLOADING, State.FAILED, State.REPLACED, State.UNLOADED
NEVER_LOADED = Story(known=False)


class Clients:
    """Calls that are made while others look."""

    def __init__(self, channel: grpc.Channel, threads: ThreadPoolExecutor) -> None:
        self._channel = channel
        self._threads = threads

    def load(self, name: str) -> Future[grpc.StatusCode]:
        """How a load ends."""
        return self._threads.submit(self._load, name)

    def _load(self, name: str) -> grpc.StatusCode:
        call = rpc(self._channel, "RepositoryModelLoad", pb.RepositoryModelLoadResponse)
        try:
            call(pb.RepositoryModelLoadRequest(model_name=name), timeout=SECONDS)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    def unload(self, name: str) -> None:
        call = rpc(self._channel, "RepositoryModelUnload", pb.RepositoryModelUnloadResponse)
        call(pb.RepositoryModelUnloadRequest(model_name=name), timeout=SECONDS)

    def ask(self, name: str, value: int) -> Future[int]:
        """What the model answers."""
        return self._threads.submit(infer, self._channel, name, value)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    Gate(tmp_path / "blocker" / "1")
    write_model(tmp_path / "m" / "1")
    (tmp_path / "m" / "config.pbtxt").write_text("version_policy { latest { num_versions: 1 } }")
    with ServerProcess(str(tmp_path), "--model-control-mode", "explicit", "--grps-online") as process:
        yield process


@pytest.fixture
def channel(server: ServerProcess) -> Iterator[grpc.Channel]:
    with grpc_channel(int(server.grpc_address.rpartition(":")[2])) as opened:
        yield opened


@pytest.fixture
def clients(channel: grpc.Channel) -> Iterator[Clients]:
    with ThreadPoolExecutor() as threads:
        yield Clients(channel, threads)


@pytest.fixture
def m(server: ServerProcess, channel: grpc.Channel) -> Iterator[EveryInterface]:
    with closing(EveryInterface(server, channel, "m")) as interfaces:
        yield interfaces


OK, INVALID = grpc.StatusCode.OK, grpc.StatusCode.INVALID_ARGUMENT


def break_model(folder: Path) -> str:
    """The model cannot be loaded from now on; why not."""
    file = write_model(folder, BROKEN)
    return f"{file}:{len(BROKEN.splitlines())}: OSError: no disk"


def test_model_is_added_replaced_fails_and_is_removed(tmp_path: Path, clients: Clients, m: EveryInterface) -> None:
    first_load = expect_a_first_load(tmp_path, clients, m)
    expect_a_swap(first_load, tmp_path / "m", clients, m)
    expect_failures_and_an_unload(tmp_path / "m", clients, m)
    m.close()
    up, down = "SERVING", "NOT_SERVING"
    assert m.watch == ["SERVICE_UNKNOWN", down, up, down, up]


def expect_a_first_load(tmp_path: Path, clients: Clients, m: EveryInterface) -> Gate:
    """Its turn comes when another model has been loaded."""
    folder, blocker = tmp_path / "m", Gate(tmp_path / "blocker" / "1")
    m.expect(NEVER_LOADED)
    first = clients.load("blocker")
    blocker.wait_until_it_waits("load")
    gate = Gate(folder / "1")
    loading = clients.load("m")
    m.until(1, START)
    m.expect(Story({1: START}, server=False))
    blocker.open("load")
    gate.wait_until_it_waits("load")
    assert first.result(SECONDS) is OK
    m.expect(Story({1: LOADING}))
    gate.open("load")
    assert loading.result(SECONDS) is OK
    m.expect(Story({1: READY}))
    return gate


def expect_a_swap(gate: Gate, folder: Path, clients: Clients, m: EveryInterface) -> None:
    """While a call holds the version that goes."""
    two = Gate(folder / "2")
    loading = clients.load("m")
    two.wait_until_it_waits("load")
    m.expect(Story({1: READY, 2: LOADING}))
    held = clients.ask("m", 11)
    gate.wait_until_it_waits(11)
    two.open("load")
    assert loading.result(SECONDS) is OK
    m.expect(Story({1: UNLOADING, 2: READY}))
    gate.open(11)
    assert held.result(SECONDS) == 11
    m.until(1, REPLACED)
    m.expect(Story({1: REPLACED, 2: READY}))


def expect_failures_and_an_unload(folder: Path, clients: Clients, m: EveryInterface) -> None:
    """A new version fails; loaded again, one that serves fails; a call holds it when it goes."""
    why = break_model(folder / "3")
    assert clients.load("m").result(SECONDS) is INVALID
    m.expect(Story({1: REPLACED, 2: READY, 3: FAILED}, error=why))
    three = Gate(folder / "3")
    three.open("load")
    assert clients.load("m").result(SECONDS) is OK
    m.until(2, REPLACED)
    m.expect(Story({1: REPLACED, 2: REPLACED, 3: READY}))
    break_model(folder / "3")
    assert clients.load("m").result(SECONDS) is INVALID
    m.expect(Story({1: REPLACED, 2: REPLACED, 3: KEPT}, error=why))

    held = clients.ask("m", 33)
    three.wait_until_it_waits(33)
    clients.unload("m")
    m.expect(Story({1: REPLACED, 2: REPLACED, 3: UNLOADING}))
    three.open(33)
    assert held.result(SECONDS) == 33
    m.until(3, UNLOADED)
    m.expect(Story({1: REPLACED, 2: REPLACED, 3: UNLOADED}))

    write_model(folder / "3", GATE)
    assert clients.load("m").result(SECONDS) is OK
    m.expect(Story({1: REPLACED, 2: REPLACED, 3: READY}))


def test_a_first_load_that_fails(tmp_path: Path, clients: Clients, m: EveryInterface) -> None:
    why = break_model(tmp_path / "m" / "1")
    assert clients.load("m").result(SECONDS) is INVALID
    m.expect(Story({1: FAILED}, error=why, server=False))
    clients.unload("m")
    m.expect(Story({1: UNLOADED}))
    write_model(tmp_path / "m" / "1")
    assert clients.load("m").result(SECONDS) is OK
    m.expect(Story({1: READY}))


def test_a_load_that_is_taken_back(tmp_path: Path, clients: Clients, m: EveryInterface) -> None:
    gate = Gate(tmp_path / "m" / "1")
    loading = clients.load("m")
    gate.wait_until_it_waits("load")
    clients.unload("m")
    m.expect(Story({1: State.TAKEN_BACK}))
    gate.open("load")
    assert loading.result(SECONDS) is grpc.StatusCode.UNAVAILABLE
    m.until(1, UNLOADED)
    m.expect(Story({1: UNLOADED}))


def test_error_of_a_folder_is_reported_until_it_is_repaired(tmp_path: Path) -> None:
    write_model(tmp_path / "m" / "1")
    write_model(tmp_path / "good" / "1")
    file = tmp_path / "m" / "config.pbtxt"
    file.write_text("max_batch_size: -1")
    why = f"{file}: max_batch_size: expected at least 0, got -1"
    options = (
        "--no-exit-on-load-error",
        "--model-control-mode",
        "poll",
        "--poll-interval",
        "0.1",
        "--grps-online",
    )
    with (
        ServerProcess(str(tmp_path), *options) as server,
        grpc_channel(int(server.grpc_address.rpartition(":")[2])) as channel,
        closing(EveryInterface(server, channel, "m")) as m,
    ):
        assert infer(channel, "good", 5) == 5
        m.expect(Story(broken=why, server=False))
        file.unlink()
        m.until(1, READY)
        m.expect(Story({1: READY}))
        policy = "version_policy { specific { versions: 7 } }"
        for text, error in (
            ("max_batch_size: -1", why),
            (policy, f"{file}: version_policy.specific: expected one of the versions 1 in {file.parent}, got 7"),
        ):
            write_atomically(file, text)
            m.until_index([("1", "READY", error)])
            server.stderr.wait_for(f" E {re.escape(error)}\n")
            m.expect(Story({1: KEPT}, error=error, code="INVALID_ARGUMENT"))
            assert infer(channel, "m", 6) == 6
        file.unlink()
        m.until_index([("1", "READY", "")])
        m.expect(Story({1: READY}))
