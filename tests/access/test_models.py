"""`models` of the access file holds for every way to a model: in every row, over every transport."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest

import triglot
from tests.access.access_files import client, write
from tests.access.every_model_call import Answer, grpc_asks, rest_asks
from tests.process import write_model
from tests.state_changes import OWN_PREDICT, PREDICT, REFUSED_ANYWAY, rows_of
from tests.transports.grpc_transport import transport_options

MODEL = """import triglot

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs):
        return {"y": inputs["x"] * 0.5}
"""
ALLOWED, SECRET, GHOST = "allowed-one", "secret-one", "secret-ghost"
FRIEND, BOSS = "token-of-friend", "token-of-boss"
OPERATIONS = ["health", "inspect", "infer", "administer"]


@asynccontextmanager
async def serving(folder: Path, **options: Any) -> AsyncIterator[triglot.Server]:
    """A server with models for the friend, and others."""
    for name in (ALLOWED, SECRET, "secret-two", "secret-never-loaded"):
        write_model(folder / "models" / name, MODEL)
        (folder / "models" / name / "config.pbtxt").write_text("")
    access = write(
        folder / "access.toml",
        client("friend", [FRIEND], OPERATIONS, models='["allowed-*"]'),
        client("boss", [BOSS], OPERATIONS),
    )
    config = triglot.Config(
        **transport_options(
            grpc_port=0,
            rest_port=0,
            access=str(access),
            model_control_mode="explicit",
            load_model=f"{ALLOWED},{SECRET},secret-two",
            grps_online=True,
            shared_memory_prefix="/",
            trace_file=str(folder / "trace.json"),
            predict_route=PREDICT,
            health_route="/own/health",
            monitoring_path="/tf/metrics",
            grps_path=OWN_PREDICT,
            **options,
        )
    )
    async with triglot.Server([folder / "models"], config) as server:
        yield server


@pytest.mark.parametrize("transport", ["h1", "aiohttp"])
async def test_over_rest(tmp_path: Path, transport: str) -> None:
    async with serving(tmp_path, http_transport=transport) as server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.rest_port}"
        _, routes = rows_of(server.config)
        asks = rest_asks(routes)
        assert len(asks) > 100
        naming: set[str] = set()
        for ask in asks:
            seen = await ask.of(session, url, GHOST, BOSS)
            if "secret" in seen.about(GHOST).text:
                naming.add(f"{ask.verb} {ask.target}")
        for ask in asks:
            mine = await ask.of(session, url, ALLOWED, FRIEND)
            assert "secret" not in mine.text, ask
            if ask.of_all:
                expected = 200 if ask.public else 403
                assert mine.status == expected, (ask, mine)
            elif ask.names and not REFUSED_ANYWAY.search(ask.target):
                assert mine.status != 403, (ask, mine)
            if not ask.names:
                continue
            secret = (await ask.of(session, url, SECRET, FRIEND)).about(SECRET)
            ghost = (await ask.of(session, url, GHOST, FRIEND)).about(GHOST)
            assert secret == ghost, ask
            assert "secret" not in secret.text, ask
            if not (ask.public or "/named/" in ask.target or "Malformed request" in secret.text):
                # The answers of a stream tell of errors themselves.
                assert secret.status == 403 or '"code": 403' in secret.text, (ask, secret)
                assert "may not use" in secret.text or ask.verb == "HEAD"
        # Else there would be nothing to hide.
        assert naming >= {
            "GET /metrics",
            "GET /v1/models",
            "GET /v2/models",
            "GET /v2/models/stats",
            "GET /openapi.json",
            "GET /grps/v1/metadata/server",
            "GET /grps/v1/monitor/overview",
            "POST /v2/repository/index",
        }


@pytest.mark.parametrize("transport", ["h2", "aio"])
async def test_over_grpc(tmp_path: Path, transport: str) -> None:
    async with serving(tmp_path, grpc_transport=transport) as server:
        services, _ = rows_of(server.config)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
            asks = grpc_asks(services)
            naming = {ask.method.name for ask in asks if "secret-two" in (await ask.of(channel, GHOST, BOSS)).text}
            assert naming >= {"List", "RepositoryIndex", "ModelStatistics", "ServerMetadata"}
            for ask in asks:
                mine = await ask.of(channel, ALLOWED, FRIEND)
                assert "secret" not in mine.text, ask
                assert is_denied(mine) is ask.of_all, (ask, mine)
                if not ask.names:
                    continue
                secret = (await ask.of(channel, SECRET, FRIEND)).about(SECRET)
                assert secret == (await ask.of(channel, GHOST, FRIEND)).about(GHOST), ask
                assert is_denied(secret), (ask, secret)


def is_denied(answer: Answer) -> bool:
    """Also where answers contain errors: those of grps, and those of a stream."""
    if answer.status is grpc.StatusCode.OK:
        return "code: 403" in answer.text or ("error_message" in answer.text and "may not use" in answer.text)
    return answer.status is grpc.StatusCode.PERMISSION_DENIED


INPUT = {"name": "x", "datatype": "FP32", "shape": [1], "data": [4.0]}
CALLING = """import triglot

class Model(triglot.Model):
    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def infer(self, inputs, call):
        return {"y": call.infer("secret-one", {"x": inputs["x"]})["y"]}
"""


async def posted(session: aiohttp.ClientSession, url: str, body: object, token: str = FRIEND) -> tuple[int, str]:
    async with session.post(url, json=body, headers={"x-api-key": token}) as answer:
        return answer.status, await answer.text()


async def test_the_model_that_a_request_does_not_name(tmp_path: Path) -> None:
    async with (
        serving(tmp_path, default_model=f"{SECRET}-1") as server,
        aiohttp.ClientSession() as session,
    ):
        url = f"http://127.0.0.1:{server.rest_port}"
        predict = f"{url}/grps/v1/infer/predict"
        assert (await posted(session, predict, {"ndarray": [4.0]}, BOSS))[0] == 200
        status, text = await posted(session, predict, {"ndarray": [4.0]})
        assert status == 403
        assert "the default model" in text
        assert "secret" not in text
        # Of those that it may use there is one.
        status, text = await posted(session, url + PREDICT, {"instances": [4.0]})
        assert (status, json.loads(text)) == (200, {"predictions": [2.0]})
        assert (await posted(session, url + PREDICT, {"instances": [4.0]}, BOSS))[0] == 503


async def test_what_models_call_is_theirs_to_call(tmp_path: Path) -> None:
    write_model(tmp_path / "models" / "allowed-caller", CALLING)
    async with serving(tmp_path) as server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.rest_port}/v2"
        assert (await posted(session, f"{url}/repository/models/allowed-caller/load", {}))[0] == 200
        status, text = await posted(session, f"{url}/models/allowed-caller/infer", {"inputs": [INPUT]})
        assert (status, '"data":[2.0]' in text) == (200, True), text
        assert (await posted(session, f"{url}/models/{SECRET}/infer", {"inputs": [INPUT]}))[0] == 403


@pytest.mark.parametrize(("part", "expected"), [(ALLOWED, 200), (SECRET, 403), (GHOST, 403)])
async def test_an_ensemble_of_a_client_is_of_its_models(tmp_path: Path, part: str, expected: int) -> None:
    (tmp_path / "models" / "allowed-ensemble" / "1").mkdir(parents=True)
    tensor = {"data_type": "TYPE_FP32", "dims": [-1]}
    config = {
        "platform": "ensemble",
        "input": [{"name": "x", **tensor}],
        "output": [{"name": "y", **tensor}],
        "ensemble_scheduling": {"step": [{"model_name": part, "input_map": {"x": "x"}, "output_map": {"y": "y"}}]},
    }
    async with serving(tmp_path) as server, aiohttp.ClientSession() as session:
        url = f"http://127.0.0.1:{server.rest_port}/v2/repository/models/allowed-ensemble/load"
        status, text = await posted(session, url, {"parameters": {"config": json.dumps(config)}})
        assert status == expected, text
