"""The client's name: in /metrics, in the access log, and in the calls that models see."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

import triglot
from tests.access.access_files import anonymous, client, write
from tests.process import FREE_PORTS, Triglot, write_model
from tests.served_models import X, serving
from triglot.core.call import Call
from triglot.telemetry.loggers import ACCESS

TENSOR = {"name": "x", "datatype": "INT32", "shape": [1], "data": [1]}
FRIEND = client("friend", ["secret-of-friend"], ["infer", "metrics"])
OTHER = client("other", ["secret-of-other"], ["infer"], rate=1)
TABLES = (FRIEND, OTHER, anonymous(["infer"]))
WHO = """
import numpy as np
import triglot

class Who(triglot.Model):
    inputs = [triglot.TensorSpec("x", "INT32", [-1])]
    outputs = [triglot.TensorSpec("client", "BYTES", [1])]
    execution = "process"

    def infer(self, inputs, call):
        return {"client": np.array([call.client], object)}
"""


class Who(triglot.Model):
    """Says who calls."""

    inputs = X
    outputs = [triglot.TensorSpec("client", "BYTES", [1])]

    def infer(self, inputs: Any, call: Call) -> Any:
        return {"client": np.array([call.client], object)}


class WhoOnLoop(Who):
    async def infer(self, inputs: Any, call: Call) -> Any:
        return {"client": np.array([call.client], object)}


async def ask(url: str, token: str = "") -> tuple[int, Any]:
    headers = {"x-api-key": token} if token else {}
    async with (
        aiohttp.ClientSession() as session,
        session.post(url, json={"inputs": [TENSOR]}, headers=headers) as answer,
    ):
        found = await answer.json()
        return answer.status, found["outputs"][0]["data"][0] if answer.status == 200 else found


@pytest.mark.parametrize("model", [Who(), WhoOnLoop()], ids=["thread", "loop"])
async def test_models_in_this_process(tmp_path: Path, model: triglot.Model) -> None:
    access = write(tmp_path / "access.toml", *TABLES)
    async with serving({"who": model}, access=str(access)) as it:
        url = f"http://127.0.0.1:{it.server.rest_port}/v2/models/who/infer"
        assert await ask(url, "secret-of-friend") == (200, "friend")
        assert await ask(url, "secret-of-other") == (200, "other")
        assert await ask(url) == (200, "")


async def test_models_in_processes(tmp_path: Path) -> None:
    access = write(tmp_path / "access.toml", *TABLES)
    write_model(tmp_path / "models" / "who", WHO)
    with Triglot(tmp_path / "models", *FREE_PORTS, "--drain-delay", "0", "--access", access) as server:
        url = f"http://127.0.0.1:{server.ports()[1]}/v2/models/who/infer"
        assert await ask(url, "secret-of-friend") == (200, "friend")
        assert await ask(url, "secret-of-other") == (200, "other")
        assert await ask(url) == (200, "")
        server.stop()


async def test_metrics_and_the_access_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS)
    access = write(tmp_path / "access.toml", *TABLES)
    async with serving({"who": Who()}, access=str(access), log_verbose_level=1) as it:
        address = f"http://127.0.0.1:{it.server.rest_port}"
        url = f"{address}/v2/models/who/infer"
        for _ in range(3):
            await ask(url, "secret-of-friend")
        assert [(await ask(url, "secret-of-other"))[0] for _ in range(2)] == [200, 429]
        await ask(url)
        assert (await ask(url, "secret-of-nobody"))[0] == 401
        assert (await ask(f"{address}/v2/repository/models/who/load", "secret-of-friend"))[0] == 403
        async with (
            aiohttp.ClientSession(headers={"x-api-key": "secret-of-friend"}) as session,
            session.get(f"{address}/metrics") as answer,
        ):
            text = await answer.text()
    found = [line for line in text.splitlines() if line.startswith(("triglot_client_r",))]
    infer = 'operation="infer",protocol="kserve"'
    refused = 'operation="model-control",protocol="kserve"'
    assert {line for line in found if "_created" not in line} == {
        f'triglot_client_requests_total{{client="friend",code="OK",{infer}}} 3.0',
        f'triglot_client_requests_total{{client="other",code="OK",{infer}}} 1.0',
        f'triglot_client_requests_total{{client="other",code="RESOURCE_EXHAUSTED",{infer}}} 1.0',
        f'triglot_client_requests_total{{client="",code="OK",{infer}}} 1.0',
        f'triglot_client_requests_total{{client="",code="UNAUTHENTICATED",{infer}}} 1.0',
        f'triglot_client_requests_total{{client="friend",code="PERMISSION_DENIED",{refused}}} 1.0',
        f'triglot_client_refusals_total{{client="other",code="RESOURCE_EXHAUSTED",{infer}}} 1.0',
        f'triglot_client_refusals_total{{client="",code="UNAUTHENTICATED",{infer}}} 1.0',
        f'triglot_client_refusals_total{{client="friend",code="PERMISSION_DENIED",{refused}}} 1.0',
    }
    lines = [text for text in caplog.messages if text.startswith("kserve REST")]
    assert sum(" model=who version=1 client=friend code=OK " in line for line in lines) == 3
    assert sum(" client=other code=RESOURCE_EXHAUSTED " in line for line in lines) == 1
    assert sum(" client=friend code=PERMISSION_DENIED " in line for line in lines) == 1
    assert sum("client=" not in line for line in lines) == 2
    assert "secret" not in caplog.text + text


async def test_clients_are_unnamed_without_an_access_file(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, ACCESS)
    async with serving({"who": Who()}, log_verbose_level=1) as it:
        address = f"http://127.0.0.1:{it.server.rest_port}"
        assert await ask(f"{address}/v2/models/who/infer", "whatever") == (200, "")
        async with aiohttp.ClientSession() as session, session.get(f"{address}/metrics") as answer:
            text = await answer.text()
    assert "triglot_client_requests_total{" not in text
    assert "client=" not in caplog.text
