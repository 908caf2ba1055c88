"""What is loaded, and which model a request goes to: real model folders behind a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.process import IDENTITY, SECONDS, write_model
from tests.protocol_clients.channel import SERVICE
from tests.protocol_clients.kserve import answer_value, infer_request
from triglot import testing
from triglot.core.errors import ModelLoadError
from triglot.pb.kserve import inference_pb2 as pb

BROKEN = IDENTITY + "    def load(self, folder):\n        raise OSError('no disk')\n"


class Client:
    """A gRPC client."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel

    async def call(self, rpc: str, request: Any, reply: Any) -> Any:
        stub = self._channel.unary_unary(SERVICE + rpc)
        return reply.FromString(await stub(request.SerializeToString(), timeout=SECONDS))

    async def infer(self, model: str, version: str = "") -> int:
        request = infer_request(model)
        request.model_version = version
        return answer_value(await self.call("ModelInfer", request, pb.ModelInferResponse))

    async def error(self, model: str, version: str = "") -> tuple[grpc.StatusCode, str | None]:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await self.infer(model, version)
        return caught.value.code(), caught.value.details()

    async def ready(self, model: str = "", version: str = "") -> bool:
        if not model:
            return bool((await self.call("ServerReady", pb.ServerReadyRequest(), pb.ServerReadyResponse)).ready)
        request = pb.ModelReadyRequest(name=model, version=version)
        return bool((await self.call("ModelReady", request, pb.ModelReadyResponse)).ready)

    async def serves(self, name: str) -> bool:
        """By the standard health service."""
        request = health_pb2.HealthCheckRequest(service=name)
        reply = await health_pb2_grpc.HealthStub(self._channel).Check(request, timeout=SECONDS)
        return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

    async def index(self, *, ready: bool = False) -> list[tuple[str, str, str, str]]:
        request = pb.RepositoryIndexRequest(ready=ready)
        reply = await self.call("RepositoryIndex", request, pb.RepositoryIndexResponse)
        return [(model.name, model.version, model.state, model.reason) for model in reply.models]


@asynccontextmanager
async def serve(*paths: Path, **options: Any) -> AsyncIterator[Client]:
    async with (
        testing.serve(*paths, **options) as server,
        grpc.aio.insecure_channel(server.grpc_address) as channel,
    ):
        yield Client(channel)


async def load_error(*paths: Path) -> str:
    with pytest.raises(ModelLoadError) as caught:
        async with serve(*paths):
            pass
    text, cause = str(caught.value), caught.value.__cause__
    return text if cause is None else f"{text}: {cause}"


async def test_versions(tmp_path: Path) -> None:
    for version in (1, 2, 10):
        says = f'"y": inputs["x"] * 0 + {version}'
        write_model(tmp_path / "model" / str(version), IDENTITY.replace('"y": inputs["x"]', says))
    async with serve(tmp_path) as client:
        assert await client.infer("model") == 10
        assert [await client.infer("model", version) for version in ("1", "2", "10")] == [1, 2, 10]
        assert await client.error("model", "3") == (
            grpc.StatusCode.NOT_FOUND,
            "Request for unknown model: 'model' version 3 is not found",
        )
        assert await client.infer("model", "0") == 10
        for missing in ("one", "1.0"):
            assert await client.error("model", missing) == (
                grpc.StatusCode.NOT_FOUND,
                f"Request for unknown model: 'model' version {missing} is not found, only 1, 2, 10",
            )
        for wrong in ("01", "00", "-1"):
            code, text = await client.error("model", wrong)
            assert code is grpc.StatusCode.INVALID_ARGUMENT
            assert f"specified version string '{wrong}'" in str(text)
        metadata = await client.call(
            "ModelMetadata", pb.ModelMetadataRequest(name="model"), pb.ModelMetadataResponse
        )
        assert list(metadata.versions) == ["1", "2", "10"]
        assert await client.index() == [("model", version, "READY", "") for version in ("1", "2", "10")]


async def test_an_unknown_model(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    async with serve(tmp_path) as client:
        for version in ("", "1"):
            assert await client.error("other", version) == (
                grpc.StatusCode.NOT_FOUND,
                "Request for unknown model: 'other' is not found",
            )
        assert not await client.ready("other")


async def test_a_server_of_nothing_does_not_start(tmp_path: Path) -> None:
    """It could only say that it is ready for nothing, or never be."""
    assert "no models here" in await load_error(tmp_path)


async def test_one_broken_model_of_several(tmp_path: Path) -> None:
    write_model(tmp_path / "good")
    file = write_model(tmp_path / "broken", BROKEN)
    reason, why = f"{file}:11: OSError: no disk", "it could not be loaded; the server's log says why"
    assert await load_error(tmp_path) == f"1 of the models could not be loaded (broken): {reason}"
    async with serve(tmp_path, exit_on_load_error=False) as client:
        assert not await client.ready()
        assert [await client.ready(name) for name in ("good", "broken")] == [True, False]
        assert not await client.serves("")
        assert [await client.serves(name) for name in ("good", "broken")] == [True, False]
        assert await client.infer("good") == 7
        assert await client.error("broken") == (
            grpc.StatusCode.NOT_FOUND,
            f"Request for unknown model: 'broken' has no available versions: {why}",
        )
        assert await client.error("broken", "1") == (
            grpc.StatusCode.UNAVAILABLE,
            f"Request for unknown model: 'broken' version 1 is not at ready state: {why}",
        )
        assert await client.index() == [("broken", "1", "UNAVAILABLE", reason), ("good", "1", "READY", "")]
        assert await client.index(ready=True) == [("good", "1", "READY", "")]


async def test_a_server_that_is_ready_without_all_of_its_models(tmp_path: Path) -> None:
    write_model(tmp_path / "good")
    write_model(tmp_path / "broken", BROKEN)
    async with serve(tmp_path, exit_on_load_error=False, strict_readiness=False) as client:
        assert await client.ready()
        assert await client.serves("")
        assert [await client.ready(name) for name in ("good", "broken")] == [True, False]


async def test_a_broken_newest_version_leaves_the_one_before(tmp_path: Path) -> None:
    write_model(tmp_path / "model" / "9")
    write_model(tmp_path / "model" / "10", BROKEN)
    async with serve(tmp_path, exit_on_load_error=False) as client:
        assert await client.infer("model") == 7
        assert await client.ready("model")
        assert not await client.ready("model", "10")
        assert not await client.ready()
        assert (await client.error("model", "10"))[0] is grpc.StatusCode.UNAVAILABLE


async def test_no_model_could_be_loaded(tmp_path: Path) -> None:
    write_model(tmp_path / "a", BROKEN)
    write_model(tmp_path / "b", BROKEN)
    assert (await load_error(tmp_path)).startswith("2 of the models could not be loaded (a, b): ")
    async with serve(tmp_path, exit_on_load_error=False) as client:
        assert not await client.ready()
        assert not await client.serves("")
        assert await client.index(ready=True) == []


@pytest.mark.parametrize("instances", [0, -1])
async def test_a_model_needs_an_instance(tmp_path: Path, instances: int) -> None:
    file = write_model(tmp_path / "model", IDENTITY + f"    instances = {instances}\n")
    text = await load_error(tmp_path)
    assert str(file) in text
    assert "instances" in text


async def test_every_model_is_closed(tmp_path: Path) -> None:
    """Those too that were loaded before another could not be."""
    closing = IDENTITY + (
        "    def load(self, folder):\n        self.folder = folder\n"
        "    def close(self):\n        (self.folder / 'closed').touch()\n"
    )
    for name in ("a", "b"):
        write_model(tmp_path / "good" / name, closing)
    good, bad = tmp_path / "good", tmp_path / "bad"
    async with serve(good):
        assert not closed_in(good)
    assert closed_in(good) == ["a", "b"]
    write_model(bad / "a", closing)
    write_model(bad / "b", BROKEN)
    await load_error(bad)
    assert closed_in(bad) == ["a"]


def closed_in(folder: Path) -> list[str]:
    return sorted(file.parent.name for file in folder.glob("*/closed"))
