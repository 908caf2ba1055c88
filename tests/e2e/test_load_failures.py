"""Models that fail, hang, vanish or change while they load: real servers, and clients that see no error."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import pytest

from tests.e2e.server_process import ServerProcess
from tests.e2e.steady_caller import Caller
from tests.process import SECONDS, write_model
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import answer_value, infer_request
from tests.protocol_clients.tfserving import Status, failure, statuses
from tests.waiting import wait_until
from triglot.pb.kserve import inference_pb2 as pb

NUMBERED = """
import time
from pathlib import Path

import numpy as np

import triglot

GATES = Path({gates!r})


class Numbered(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def load(self, folder):
        (GATES / "begun-{number}").touch()
        while (GATES / "hold-{number}").exists():
            time.sleep(0.005)

    def infer(self, inputs):
        return {{"y": np.array([{number}], np.int32)}}

    def close(self):
        (GATES / "closed-{number}").touch()
"""


class Row(NamedTuple):
    """A version in RepositoryIndex."""

    state: str
    reason: str = ""


READY = Row("READY")


class Site:
    """A repository, and gates that hold the loads of its models. What a model answers is its number."""

    def __init__(self, folder: Path) -> None:
        self.repository = folder / "repository"
        self._gates = folder / "gates"
        self._gates.mkdir()

    def put(self, place: str, number: int, repository: Path | None = None) -> Path:
        """A model that can be loaded, at "NAME/VERSION"; its file takes the place of the former at once."""
        return self.write(place, NUMBERED.format(number=number, gates=str(self._gates)), repository)

    def write(self, place: str, text: str, repository: Path | None = None) -> Path:
        new = write_model(self.repository.parent / "new", text)
        folder = (repository or self.repository) / place
        folder.mkdir(parents=True, exist_ok=True)
        return new.replace(folder / "model.py")

    def hold(self, number: int) -> None:
        (self._gates / f"hold-{number}").touch()

    def release(self, number: int) -> None:
        (self._gates / f"hold-{number}").unlink()

    def wait_until_it_loads(self, number: int) -> None:
        wait_until((self._gates / f"begun-{number}").exists)

    def is_closed(self, number: int) -> bool:
        return (self._gates / f"closed-{number}").exists()


class Client:
    """What clients of one server see."""

    def __init__(self, process: ServerProcess, channel: grpc.Channel) -> None:
        self.process = process
        self.channel = channel

    def index(self) -> dict[str, Row]:
        reply = rpc(self.channel, "RepositoryIndex", pb.RepositoryIndexResponse)(
            pb.RepositoryIndexRequest(), timeout=SECONDS
        )
        return {f"{model.name}/{model.version}": Row(model.state, model.reason) for model in reply.models}

    def load(self, model: str) -> Any:
        """RepositoryModelLoad, which continues by itself."""
        call = rpc(self.channel, "RepositoryModelLoad", pb.RepositoryModelLoadResponse)
        return call.future(pb.RepositoryModelLoadRequest(model_name=model), timeout=SECONDS)

    def status(self, model: str, version: int) -> Status:
        return next(status for status in statuses(self.channel, model) if status.version == version)

    def wait_for(self, **rows: Row) -> None:
        """Until these versions, "NAME_VERSION", are in the index so."""
        expected = {key.replace("_", "/"): row for key, row in rows.items()}
        wait_until(lambda: expected.items() <= self.index().items())

    def wait_for_index(self, index: dict[str, Row]) -> None:
        """Until this is the whole index."""
        wait_until(lambda: self.index() == index)

    def wait_for_reason(self, place: str, *parts: str) -> Row:
        """Until a version's reason has these parts; the log has it, too."""
        wait_until(lambda: all(part in self.index().get(place, READY).reason for part in parts))
        row = self.index()[place]
        self.process.stderr.wait_for(re.escape(row.reason))
        return row

    def infer(self, model: str) -> int:
        """The number that a model, or "NAME/VERSION", answers. Raise `grpc.RpcError`."""
        name, _, version = model.partition("/")
        request = infer_request(name)
        request.model_version = version
        return answer_value(rpc(self.channel, "ModelInfer", pb.ModelInferResponse)(request, timeout=SECONDS))

    @contextmanager
    def asking(self, *models: str) -> Iterator[dict[str, Caller]]:
        """Ask these models all the time; no call fails."""
        with ExitStack() as stack:
            yield {name: stack.enter_context(Caller(partial(self.infer, name))) for name in models}


@contextmanager
def serving(site: Site, *options: str) -> Iterator[Client]:
    with (
        ServerProcess(str(site.repository), *options) as process,
        grpc_channel(int(process.grpc_address.rpartition(":")[2])) as channel,
    ):
        yield Client(process, channel)


POLL = ("--model-control-mode", "poll", "--poll-interval", "0.2")
EXPLICIT = ("--model-control-mode", "explicit", "--load-model", "*")
LOAD_TIMEOUT = ("--load-timeout", "3")
SYNTAX, RAISES, MISSING = "class Model(:\n", "raise OSError('no disk')\n", "import a_library_that_nobody_has\n"


@pytest.fixture
def site(tmp_path: Path) -> Site:
    site = Site(tmp_path)
    site.put("healthy/1", 1)
    site.put("m/1", 1)
    return site


# --- models that cannot be loaded ---


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (SYNTAX, "SyntaxError: invalid syntax"),
        (RAISES, "OSError: no disk"),
        (MISSING, "ModuleNotFoundError: No module named 'a_library_that_nobody_has'"),
    ],
)
def test_what_cannot_be_loaded_leaves_everything_else(site: Site, text: str, why: str) -> None:
    """A new model, a new version of another, and a version that served and is changed."""
    with serving(site, *POLL) as client, client.asking("healthy", "m") as callers:
        new, version = site.write("new/1", text), site.write("m/2", text)
        for place, file in (("new/1", new), ("m/2", version)):
            assert client.wait_for_reason(place, str(file), why).state == "UNAVAILABLE"
        status = client.status("m", 2)
        assert (status.state, status.code) == ("END", "UNKNOWN")
        assert why in status.error
        assert client.status("m", 1) == Status(1, "AVAILABLE")
        code, details = failure(lambda: client.infer("new"))
        assert (code, details) == (
            grpc.StatusCode.NOT_FOUND,
            "Request for unknown model: 'new' has no available versions: it could not be loaded; the server's log "
            "says why",
        )
        # What served goes on, and says why it is not as it is on disk.
        changed = site.write("healthy/1", text)
        assert client.wait_for_reason("healthy/1", str(changed), why).state == "READY"
        assert why in client.status("healthy", 1).error
        assert callers["healthy"].answers == callers["m"].answers == [1]
        for place in ("new/1", "m/2", "healthy/1"):
            site.put(place, 7)
        client.wait_for(new_1=READY, m_1=READY, m_2=READY, healthy_1=READY)
        assert client.infer("new") == 7
        for caller in callers.values():
            caller.wait_for(7)
            assert caller.answers == [1, 7]


def test_a_model_that_cannot_be_loaded_again_by_request(site: Site) -> None:
    with serving(site, *EXPLICIT) as client, client.asking("m") as callers:
        file = site.write("m/1", RAISES)
        code, details = failure(client.load("m").result)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert (
            details == f"load failed for model 'm': version 1 is at UNAVAILABLE state: {file}:1: OSError: no disk;"
        )
        assert client.index()["m/1"] == Row("READY", f"{file}:1: OSError: no disk")
        assert callers["m"].answers == [1]
        site.put("m/1", 2)
        client.load("m").result()
        callers["m"].wait_for(2)
        assert client.index()["m/1"] == READY


# --- models that hang ---


def test_hanging_load_blocks_no_other_call(site: Site) -> None:
    with serving(site, *POLL, *LOAD_TIMEOUT) as client, client.asking("healthy", "m") as callers:
        site.hold(2)
        file = site.put("m/2", 2)
        site.wait_until_it_loads(2)
        # Another model's new version is loaded, whether this one has been given up by then or not.
        site.put("healthy/2", 3)
        callers["healthy"].wait_for(3)
        assert not site.is_closed(2)
        error = f"{file}: loading took longer than load_timeout, 3 s"
        client.wait_for(m_2=Row("UNAVAILABLE", error))
        assert client.status("m", 2) == Status(2, "END", error, "DEADLINE_EXCEEDED")
        client.process.stderr.wait_for(re.escape(error))
        # What comes of it after all is closed; the next version of this model is loaded as any other.
        site.release(2)
        wait_until(lambda: site.is_closed(2))
        site.put("m/3", 4)
        callers["m"].wait_for(4)
        assert callers["m"].answers == [1, 4]
        assert client.index()["m/2"] == Row("UNAVAILABLE", error)


def test_a_load_by_request_that_hangs(site: Site) -> None:
    with serving(site, *EXPLICIT, *LOAD_TIMEOUT) as client, client.asking("healthy", "m") as callers:
        site.hold(2)
        file = site.put("m/1", 2)
        hanging = client.load("m")
        site.wait_until_it_loads(2)
        site.put("healthy/1", 3)
        client.load("healthy").result()
        callers["healthy"].wait_for(3)
        code, details = failure(hanging.result)
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert f"version 1 is at UNAVAILABLE state: {file}: loading took longer than load_timeout, 3 s;" in details
        assert callers["m"].answers == [1]


# --- folders that disappear ---


def test_a_version_that_is_removed(site: Site) -> None:
    site.put("m/2", 2)
    with serving(site, *POLL) as client, client.asking("healthy", "m") as callers:
        callers["m"].wait_for(2)
        shutil.rmtree(site.repository / "m" / "2")
        callers["m"].wait_for(1)
        wait_until(lambda: site.is_closed(2))
        wait_until(lambda: client.status("m", 2) == Status(2, "END"))
        client.wait_for_index({"healthy/1": READY, "m/1": READY})
        assert failure(lambda: client.infer("m/2")) == (
            grpc.StatusCode.NOT_FOUND,
            "Request for unknown model: 'm' version 2 is not found",
        )
        assert callers["m"].answers == [2, 1]


def test_a_model_that_is_removed(site: Site) -> None:
    site.put("gone/1", 5)
    with serving(site, *POLL) as client, client.asking("healthy", "m") as callers:
        assert client.infer("gone") == 5
        shutil.rmtree(site.repository / "gone")
        wait_until(lambda: site.is_closed(5))
        assert failure(lambda: client.infer("gone")) == (
            grpc.StatusCode.NOT_FOUND,
            "Request for unknown model: 'gone' is not found",
        )
        client.wait_for_index({"healthy/1": READY, "m/1": READY})
        site.put("gone/1", 6)
        client.wait_for(gone_1=READY)
        assert client.infer("gone") == 6
        assert callers["healthy"].answers == callers["m"].answers == [1]


def test_removed_repository(site: Site, tmp_path: Path) -> None:
    """A mount that is lost: serving models continue, and follow the files again when they are back."""
    with serving(site, *POLL) as client, client.asking("healthy", "m") as callers:
        away = site.repository.rename(tmp_path / "away")
        log, cancelled = client.process.stderr, f"{site.repository}: no such file or folder"
        log.wait_for(re.escape(cancelled))
        assert client.index() == {"healthy/1": READY, "m/1": READY}
        away.rename(site.repository)
        site.put("m/2", 2)
        callers["m"].wait_for(2)
        # And away for good; another one comes in its place.
        shutil.rmtree(site.repository.rename(away))
        another = tmp_path / "another"
        for place in ("healthy/1", "m/2"):
            site.put(place, 8, another)
        wait_until(lambda: log.text().count(cancelled) > 1)
        assert client.index() == {"healthy/1": READY, "m/1": READY, "m/2": READY}
        another.rename(site.repository)
        for caller in callers.values():
            caller.wait_for(8)
        assert callers["healthy"].answers == [1, 8]
        assert callers["m"].answers == [1, 2, 8]
        client.wait_for_index({"healthy/1": READY, "m/2": READY})


# --- models that are replaced while they load ---


def test_a_version_that_is_superseded_while_it_loads(site: Site) -> None:
    (site.repository / "m" / "config.pbtxt").write_text("version_policy { latest { num_versions: 1 } }")
    with serving(site, *POLL) as client, client.asking("healthy", "m") as callers:
        site.hold(2)
        site.put("m/2", 2)
        site.wait_until_it_loads(2)
        site.put("m/3", 3)
        client.wait_for(m_3=Row("UNKNOWN"))
        assert client.index()["m/2"] == Row("LOADING")
        assert client.status("m", 2) == Status(2, "LOADING")
        assert callers["m"].answers == [1]
        site.release(2)
        callers["m"].wait_for(3)
        wait_until(lambda: site.is_closed(2) and site.is_closed(1))
        assert callers["m"].answers == [1, 3]
        client.wait_for_index({"healthy/1": READY, "m/3": READY})


def test_files_that_are_replaced_while_they_are_loaded(site: Site) -> None:
    with serving(site, *EXPLICIT) as client, client.asking("healthy", "m/1") as callers:
        site.hold(2)
        site.put("m/1", 2)
        first = client.load("m")
        site.wait_until_it_loads(2)
        site.put("m/1", 3)
        site.put("m/2", 4)
        second = client.load("m")
        client.wait_for(m_2=Row("UNKNOWN"))
        site.release(2)
        second.result()
        callers["m/1"].wait_for(3)
        wait_until(lambda: site.is_closed(2) and site.is_closed(1))
        assert callers["m/1"].answers == [1, 3]
        assert client.infer("m") == 4
        assert failure(first.result) == (
            grpc.StatusCode.UNAVAILABLE,
            "model 'm' was unloaded or reloaded during this load",
        )


def test_files_that_are_replaced_in_a_watched_folder_while_they_are_loaded(site: Site) -> None:
    with serving(site, *POLL) as client, client.asking("healthy", "m") as callers:
        site.hold(2)
        site.put("m/1", 2)
        site.wait_until_it_loads(2)
        site.put("m/1", 3)
        site.release(2)
        callers["m"].wait_for(3)
        wait_until(lambda: site.is_closed(2) and site.is_closed(1))
        assert callers["m"].answers in ([1, 3], [1, 2, 3])
        client.wait_for(m_1=READY)
