"""A repository whose models load and close under a test's eyes, and what clients see of its server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import grpc
from server_process import ServerProcess
from steady_caller import Caller

from process import SECONDS, write_model
from protocol_clients.channel import grpc_channel, rpc
from protocol_clients.kserve import answer_value, infer_request
from protocol_clients.tfserving import Status, statuses
from triglot.pb.kserve import inference_pb2 as pb
from waiting import wait_until

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
