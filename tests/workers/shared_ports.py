"""A server of several workers as a process, and clients of single workers: a connection belongs to one."""

from __future__ import annotations

import json
import os
import re
import signal
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc

from tests.process import SECONDS, Triglot, write_model
from tests.protocol_clients.channel import grpc_channel, rpc
from tests.protocol_clients.kserve import infer
from tests.protocol_clients.rest import Rest
from tests.waiting import wait_until
from triglot.pb.kserve import inference_pb2 as pb

T = TypeVar("T")
WHO = """
import os
import triglot

class Who(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [1])]
    outputs = [triglot.TensorSpec("y", "INT32", [1])]

    def infer(self, inputs):
        return {"y": inputs["x"] * 0 + os.getpid()}
"""
"""A model that answers with the number of its worker's process."""
TRANSPORTS = ("aio", "h2")
SERVES = re.compile(r"worker (\d+) \(pid (\d+)\) serves")


class Workers(Triglot):
    """`triglot serve FOLDER --workers 2 ARGUMENTS`; the folder has the model `who`, at least."""

    def __init__(
        self, folder: Path, *arguments: str, count: int = 2, drain_delay: float = 0.0, command: str = "serve"
    ) -> None:
        write_model(folder / "who", WHO)
        self.count = count
        super().__init__(
            folder,
            *("--workers", str(count), "--grpc-port", "0", "--rest-port", "0"),
            *("--drain-delay", str(drain_delay)),
            *arguments,
            command=command,
        )
        self.grpc_port = self.rest_port = 0

    def __enter__(self) -> Self:
        try:
            self.wait_for_serving(self.count)
            self.grpc_port, self.rest_port = self.ports()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.runs:
            # Workers have sessions of their own, and end when their supervisor does: sooner if they are told.
            for pid in self.pids():
                with suppress(ProcessLookupError):
                    kill(pid)
        super().__exit__(kind, error, trace)

    def wait_for_serving(self, times: int) -> None:
        """Until workers have said so often that they serve."""
        wait_until(lambda: len(SERVES.findall(self.stderr.text())) >= times or not self.runs)
        assert len(SERVES.findall(self.stderr.text())) >= times, self.stderr.text()

    def pids(self) -> list[int]:
        """Of the workers that serve, in the order of their numbers, as far as the log tells."""
        last = {int(number): int(pid) for number, pid in SERVES.findall(self.stderr.text())}
        return [last[number] for number in sorted(last)]

    @property
    def rest(self) -> Rest:
        """A client whose every call has a connection of its own."""
        return Rest(self.rest_port)

    def on_each(self, do: Callable[[grpc.Channel], T]) -> list[T]:
        """What it gives on a connection to each worker, in the order of `pids`."""
        given: dict[int, T] = {}
        end = time.monotonic() + SECONDS
        while len(given) < self.count:
            assert time.monotonic() < end, f"no connection to more than {list(given)} of {self.pids()}"
            with grpc_channel(self.grpc_port) as channel:
                pid = infer(channel, "who")
                if pid not in given:
                    given[pid] = do(channel)
        return [given[pid] for pid in self.pids()]

    @contextmanager
    def at(self, pid: int) -> Iterator[grpc.Channel]:
        """A connection to this worker."""
        end = time.monotonic() + SECONDS
        while time.monotonic() < end:
            with grpc_channel(self.grpc_port) as channel:
                if infer(channel, "who") == pid:
                    yield channel
                    return
        raise AssertionError(f"no connection to {pid}")

    def get(self, path: str) -> str:
        """The text at a path of the REST interface."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.rest_port}{path}", timeout=SECONDS) as response:
            return str(response.read().decode())

    def metrics(self) -> dict[str, float]:
        """The samples of /metrics by name and labels."""
        lines = [line for line in self.get("/metrics").splitlines() if not line.startswith("#")]
        return {sample: float(value) for sample, _, value in (line.rpartition(" ") for line in lines)}

    def overview(self) -> Any:
        """The numbers of the page."""
        return json.loads(self.get("/grps/v1/monitor/overview"))


def kill(pid: int) -> None:
    """SIGKILL."""
    os.kill(pid, signal.SIGKILL)


def ready(channel: grpc.Channel, model: str) -> bool:
    """ModelReady."""
    reply = rpc(channel, "ModelReady", pb.ModelReadyResponse)(pb.ModelReadyRequest(name=model), timeout=SECONDS)
    return bool(reply.ready)


def change(channel: grpc.Channel, verb: str, model: str) -> None:
    """RepositoryModelLoad or RepositoryModelUnload."""
    request = getattr(pb, f"RepositoryModel{verb}Request")(model_name=model)
    rpc(channel, f"RepositoryModel{verb}", getattr(pb, f"RepositoryModel{verb}Response"))(request, timeout=SECONDS)
