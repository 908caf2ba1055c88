"""`TritonPythonModel.is_ready`, as every protocol of the server asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import grpc
import numpy as np
import pytest

from tests.backends.triton_served import DECOUPLED, SERVICE, X_TO_Y, GrpcClient, ints, serving, text, write_model
from triglot.pb.grpc.health.v1 import health_pb2
from triglot.pb.kserve import inference_pb2 as pb

MODEL = """
from pathlib import Path

class TritonPythonModel:
    def initialize(self, args):
        self.says = Path(args["model_repository"]) / "says"

    def is_ready(self):
        return eval(self.says.read_text())

    def execute(self, requests):
        given = [pb_utils.get_input_tensor_by_name(one, "X").as_numpy() for one in requests]
        return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", one)]) for one in given]
"""
ASYNC = MODEL.replace("def is_ready", "async def is_ready")
SENDS = """
class TritonPythonModel:
    async def is_ready(self):
        return False

    async def execute(self, requests):
        for request in requests:
            request.get_response_sender().send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
ASKS = """
class TritonPythonModel:
    def execute(self, requests):
        names = [pb_utils.get_input_tensor_by_name(one, "NAME").as_numpy().item().decode() for one in requests]
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("Y", np.array([pb_utils.is_model_ready(name)], np.int32))])
            for name in names
        ]
"""
ASKS_CONFIG = """
input [ { name: "NAME" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] } ]
"""
IN_A_PROCESS = 'parameters { key: "execution" value { string_value: "process" } }\n'


class ReadinessClients:
    """Everything that says whether a model is ready."""

    def __init__(self, client: GrpcClient, channel: grpc.aio.Channel, session: aiohttp.ClientSession) -> None:
        self.client = client
        self.channel = channel
        self._session = session

    async def ready(self, model: str) -> bool:
        """What all of them say."""
        asked = pb.ModelReadyRequest(name=model).SerializeToString()
        reply = await self.channel.unary_unary(SERVICE + "ModelReady")(asked)
        answers = {pb.ModelReadyResponse.FromString(reply).ready}
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check")
        asked = health_pb2.HealthCheckRequest(service=model).SerializeToString()
        answers.add(_serving(health_pb2.HealthCheckResponse.FromString(await check(asked))))
        listed = self.channel.unary_unary("/grpc.health.v1.Health/List")
        statuses = health_pb2.HealthListResponse.FromString(await listed(b"")).statuses
        answers.add(_serving(statuses[model]))
        async with self._session.get(f"/v2/models/{model}/ready") as response:
            assert response.status in (200, 503)
            answers.add(response.status == 200)
        (only,) = answers
        return only


def _serving(response: health_pb2.HealthCheckResponse) -> bool:
    return bool(response.status == health_pb2.HealthCheckResponse.SERVING)


@asynccontextmanager
async def readiness_clients(*paths: Path) -> AsyncIterator[ReadinessClients]:
    async with (
        serving(*paths) as client,
        grpc.aio.insecure_channel(f"127.0.0.1:{client.server.grpc_port}") as channel,
        aiohttp.ClientSession(f"http://127.0.0.1:{client.server.rest_port}") as session,
    ):
        yield ReadinessClients(client, channel, session)


@pytest.mark.parametrize("execution", ["", IN_A_PROCESS])
@pytest.mark.parametrize("code", [MODEL, ASYNC])
async def test_it_decides(tmp_path: Path, code: str, execution: str, caplog: pytest.LogCaptureFixture) -> None:
    path = write_model(tmp_path, "moody", code, X_TO_Y + execution + "instance_group { count: 2 }\n")
    says = path / "says"
    says.write_text("True")
    async with readiness_clients(path) as found:
        assert await found.ready("moody")
        for answer in ("False", "1", "None", "1 / 0", "exit()"):
            says.write_text(answer)
            assert not await found.ready("moody"), answer
            # It is asked for readiness only: requests run.
            assert (await found.client.infer("moody", {"X": ints(3)})).outputs["Y"].tolist() == [3]
        says.write_text("True")
        assert await found.ready("moody")
    if not execution:
        assert "is_ready: expected it to return a bool, got int" in caplog.text


async def test_every_instance_has_to_be_ready(tmp_path: Path) -> None:
    code = MODEL.replace("self.says.read_text()", "self.says.read_text(), {'name': self.name}").replace(
        "        self.says =", '        self.name = args["model_instance_name"]\n        self.says ='
    )
    path = write_model(tmp_path, "moody", code, X_TO_Y + "instance_group { count: 2 }\n")
    async with readiness_clients(path) as found:
        for answer, ready in (
            ("name.endswith('_0')", False),
            ("name.endswith('_1')", False),
            ("bool(name)", True),
        ):
            (path / "says").write_text(answer)
            assert await found.ready("moody") is ready


async def test_decoupled_and_asked_by_another_model(tmp_path: Path) -> None:
    paths = [
        write_model(tmp_path, "sends", SENDS, DECOUPLED),
        write_model(tmp_path, "asks", ASKS, ASKS_CONFIG),
    ]
    async with readiness_clients(*paths) as found:
        assert not await found.ready("sends")
        assert await found.ready("asks")
        for model, ready in (("sends", 0), ("asks", 1)):
            reply = await found.client.infer("asks", {"NAME": text(model)})
            assert np.array_equal(reply.outputs["Y"], [ready])


async def test_a_watcher_hears_of_it(tmp_path: Path) -> None:
    path = write_model(tmp_path, "moody", MODEL, X_TO_Y)
    says = path / "says"
    says.write_text("False")
    async with readiness_clients(path) as found:
        watch = found.channel.unary_stream("/grpc.health.v1.Health/Watch")
        call = watch(health_pb2.HealthCheckRequest(service="moody").SerializeToString(), timeout=20)
        for answer in (False, True, False):
            says.write_text(str(answer))
            assert _serving(health_pb2.HealthCheckResponse.FromString(await call.read())) is answer
        call.cancel()
