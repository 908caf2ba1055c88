"""A hundred versions, one after the other, under clients of every protocol: no call fails, nothing leaks."""

from __future__ import annotations

import json
import shutil
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import aiohttp
import grpc.aio
import numpy as np
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.e2e.model_configs import config_flag, config_text
from tests.e2e.server_process import QUICK, ServerProcess
from tests.e2e.swap_load import MODEL, Load, Reply, load_of, statuses
from tests.process import SECONDS, Triglot, write_model
from tests.protocol_clients.channel import SERVICE
from tests.protocol_clients.tfserving import RELOAD
from tests.waiting import until, until_found
from triglot.pb.kserve import inference_pb2
from triglot.pb.tfserving import management_pb2

SWAPS = 100
SWAPS_IN_PLACE = 10
CLOSED = f"closed the previous {MODEL} version 1"
LEAK = 64
"""KiB by which a swap may add to the server's memory."""
POOLED = 4
"""Threads that may be more in the end: those of pools that start them when they are needed."""
LABELLED_VERSIONS = 6
"""Versions of a model on /metrics: the one that serves, and the last that ended."""
MODEL_TEXT = """
import asyncio
import time

import numpy as np

import triglot


class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]
    instances = 2

    def load(self, folder):
        self.answer = np.array([int(folder.name), {content}], np.float32)
        self.weights = np.ones(2**16, np.float32)  # 256 KiB: who keeps a version keeps them.

    {infer}
        return {{"y": self.answer}}
"""
INFER = (
    "def infer(self, inputs):\n        time.sleep(0.002)",
    "async def infer(self, inputs):\n        await asyncio.sleep(0.002)",
)
"""On threads and on the event loop; with some of the calls under way whenever a version changes."""


def model_text(content: int) -> str:
    return MODEL_TEXT.format(content=content, infer=INFER[content % 2])


class Server(ServerProcess):
    """One that can be looked at from outside, with every protocol."""

    def __init__(self, *arguments: str, command: str = "serve") -> None:
        Triglot.__init__(
            self, *arguments, command=command, environment=QUICK | {"TRIGLOT_PROTOCOLS": "kserve,tfserving,grps"}
        )
        self._usage = psutil.Process(self._process.pid)

    def memory(self) -> int:
        """Its resident memory, in bytes."""
        return int(self._usage.memory_info().rss)

    def threads(self) -> int:
        return int(self._usage.num_threads())


@dataclass(slots=True)
class Run:
    """A server under load. `since` and `until`: when a version could answer first and last."""

    server: Server
    folder: Path
    load: Load
    channel: grpc.aio.Channel
    session: aiohttp.ClientSession
    since: dict[int, float] = field(default_factory=lambda: {1: 0.0})
    until: dict[int, float] = field(default_factory=dict)
    memory: list[int] = field(default_factory=list)
    threads: list[int] = field(default_factory=list)

    async def swap(self, version: int, switch: Switch) -> None:
        """Put the version beside the one before, have the server take it, and remove the former."""
        write_model(self.folder / f".{version}", model_text(version))
        self.since[version] = monotonic()
        (self.folder / f".{version}").rename(self.folder / str(version))
        await switch(self, version)
        self.until[version - 1] = monotonic()
        await self.load.all_answer(version)
        shutil.rmtree(self.folder / str(version - 1))
        self.measure()

    async def replace(self, content: int) -> None:
        """Put other content in the place of version 1's."""
        file = write_model(self.folder / ".new", model_text(content))
        self.since[content] = monotonic()
        file.replace(self.folder / "1" / "model.py")
        await self.load.first_answer(content)
        self.until[content - 1] = monotonic()
        await self.load.all_answer(content)
        self.measure()

    def measure(self) -> None:
        self.memory.append(self.server.memory())
        self.threads.append(self.server.threads())

    async def states(self, expected: dict[int, str]) -> None:
        """Until the versions are in these states."""
        await until_found(lambda: statuses(self.channel), lambda found: expected.items() <= found.items())

    async def get(self, path: str) -> str:
        """The text of a page."""
        async with self.session.get(f"http://{self.server.rest_address}{path}") as response:
            assert response.status == 200, path
            return await response.text()

    async def settled(self) -> None:
        """After the load: until all calls are counted, and nothing of former versions is left."""
        await until_found(self.counts, lambda counts: counts == (len(self.load.replies), 0))
        await until_found(self.labelled_versions, lambda count: count <= LABELLED_VERSIONS)
        await until_found(self.thread_count, lambda count: count <= max(self.threads[:10]) + POOLED)

    async def counts(self) -> tuple[int, int]:
        """The calls that ran a model, and those that failed."""
        totals = json.loads(await self.get("/grps/v1/monitor/overview"))["totals"]
        return totals["requests"], totals["failures"]

    async def labelled_versions(self) -> int:
        families = text_string_to_metric_families(await self.get("/metrics"))
        samples = [sample for family in families for sample in family.samples]
        return len({sample.labels["version"] for sample in samples if sample.labels.get("model") == MODEL})

    async def thread_count(self) -> int:
        return self.server.threads()


Switch = Callable[[Run, int], Awaitable[None]]


async def found(run: Run, version: int) -> None:
    """By looking again and again."""
    await run.load.first_answer(version)


async def loaded(run: Run, version: int) -> None:
    """By RepositoryModelLoad, over gRPC and REST by turns."""
    if version % 2:
        async with run.session.post(
            f"http://{run.server.rest_address}/v2/repository/models/{MODEL}/load"
        ) as reply:
            assert reply.status == 200, await reply.text()
    else:
        request = inference_pb2.RepositoryModelLoadRequest(model_name=MODEL)
        await run.channel.unary_unary(SERVICE + "RepositoryModelLoad")(
            request.SerializeToString(), timeout=SECONDS
        )


async def configured(run: Run, version: int) -> None:
    """By HandleReloadConfigRequest, which names the version."""
    request = management_pb2.ReloadConfigRequest()
    config = request.config.model_config_list.config.add(
        name=MODEL, base_path=str(run.folder), model_platform="tensorflow"
    )
    config.model_version_policy.specific.versions.append(version)
    call = run.channel.unary_unary(RELOAD, response_deserializer=management_pb2.ReloadConfigResponse.FromString)
    response = await call(request.SerializeToString(), timeout=SECONDS)
    assert not response.status.error_code, response
    await run.states({version: "AVAILABLE"})


def polling(folder: Path) -> Server:
    return Server(str(folder.parent), "--model-control-mode", "poll", "--poll-interval", "0.02")


def explicit(folder: Path) -> Server:
    (folder / "config.pbtxt").write_text("version_policy { latest { num_versions: 1 } }")
    return Server(str(folder.parent), "--model-control-mode", "explicit", "--load-model", MODEL)


def tfserving(folder: Path) -> Server:
    policy = "model_version_policy { specific { versions: 1 } }"
    flag = config_flag(folder.with_name("models.config"), config_text(MODEL, folder, policy))
    return Server(flag, command="tfserving")


@asynccontextmanager
async def running(folder: Path, start: Callable[[Path], Server]) -> AsyncIterator[Run]:
    """A server of version 1, and the load, until the block ends."""
    write_model(folder / "1", model_text(1))
    server = start(folder)
    with server:
        try:
            async with (
                grpc.aio.insecure_channel(server.grpc_address) as channel,
                aiohttp.ClientSession() as session,
                load_of(server.grpc_address, server.rest_address) as load,
            ):
                run = Run(server, folder, load, channel, session)
                async with load.going_on():
                    await load.all_answer(1)
                    yield run
                await run.settled()
        except BaseException as error:
            error.add_note(server.stderr.text()[-4000:])
            raise


def untimely(run: Run) -> list[Reply]:
    """The replies of versions that could no longer answer when the call was sent, or not yet when it ended."""
    return [
        reply
        for reply in run.load.replies
        if reply.sent > run.until.get(reply.content, reply.sent) or reply.received < run.since[reply.content]
    ]


def slope(memory: list[int]) -> float:
    """By how many KiB a swap adds to the memory, over the later half of them."""
    later = memory[len(memory) // 2 :]
    return float(np.polyfit(np.arange(len(later)), later, 1)[0]) / 1024


@pytest.mark.parametrize(
    ("start", "switch"),
    [(polling, found), (explicit, loaded), (tfserving, configured)],
    ids=["poll", "explicit", "tfserving"],
)
async def test_no_call_fails(
    tmp_path: Path, start: Callable[[Path], Server], switch: Switch, record_property: Callable[[str, object], None]
) -> None:
    async with running(tmp_path / "models" / MODEL, start) as run:
        for version in range(2, SWAPS + 2):
            await run.swap(version, switch)
        # A call that still held one would keep it UNLOADING for a minute.
        await run.states(dict.fromkeys(range(1, SWAPS + 1), "END") | {SWAPS + 1: "AVAILABLE"})
    assert untimely(run) == []
    assert run.server.stderr.text().count(f"unloaded {MODEL} version") == SWAPS
    leak = slope(run.memory)
    record_property("KiB per swap", leak)
    print(f"{len(run.load.replies)} calls, {leak:.1f} KiB per swap")
    assert leak <= LEAK, run.memory


async def test_no_call_fails_while_a_version_is_replaced(tmp_path: Path) -> None:
    async with running(tmp_path / "models" / MODEL, polling) as run:
        for content in range(2, SWAPS_IN_PLACE + 2):
            await run.replace(content)
        await run.states({1: "AVAILABLE"})
        await until(lambda: run.server.stderr.text().count(CLOSED) >= SWAPS_IN_PLACE)
    assert untimely(run) == []
    assert run.server.stderr.text().count(CLOSED) == SWAPS_IN_PLACE
