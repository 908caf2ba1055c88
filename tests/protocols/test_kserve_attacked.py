"""What clients of KServe V2 must not be able to bring about."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.protocols.kserve_served import Served, serve_models
from triglot.protocols.kserve.codec import MAX_PARAMETERS

TRITON = Path(__file__).resolve().parents[1] / "models_triton"
SECONDS = 20
MODEL = "identity_fp32"


async def post(served: Served, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    """The status and the JSON of the answer."""
    async with asyncio.timeout(SECONDS):
        status, _, reply = await served.rest.call("POST", f"/v2/{path}", json.dumps(body).encode())
    return status, json.loads(reply)


@pytest.mark.parametrize("call", ["generate", "generate_stream"])
@pytest.mark.parametrize("nested", [False, True])
async def test_parameters_of_generate_are_limited(call: str, nested: bool) -> None:
    async with serve_models([TRITON / MODEL]) as served:
        for more in (0, 1):
            parameters: dict[str, Any] = {f"p{at}": at for at in range(MAX_PARAMETERS.count + more)}
            body = {"INPUT0": 1.5} | ({"parameters": parameters} if nested else parameters)
            if more:
                expected = {"error": f"the request has more than {MAX_PARAMETERS.count} parameters"}
                assert await post(served, f"models/{MODEL}/{call}", body) == (400, expected)
            elif call == "generate":
                status, answer = await post(served, f"models/{MODEL}/{call}", body)
                assert (status, answer["OUTPUT0"]) == (200, 1.5)


RAISE = "; raise the server's --max-requested-instances"


@pytest.mark.parametrize(
    "groups",
    [
        [{"count": 600}, {"count": 401}],
        [{}] * 1001,
        [{"kind": "KIND_GPU", "count": 501, "gpus": [0, 1]}],
        # A Python model's own code finds out which GPUs there are.
        [{"kind": "KIND_GPU", "gpus": [2**31 - 1]}, {"kind": "KIND_GPU"}],
        [{"kind": "KIND_GPU", "gpus": [500]}, {"kind": "KIND_GPU"}],
    ],
)
async def test_instances_of_all_groups_are_limited(groups: list[Any], tmp_path: Path) -> None:
    shutil.copytree(TRITON / MODEL, tmp_path / MODEL)
    async with serve_models([tmp_path], model_control_mode="explicit") as served:
        assert (await post(served, f"repository/models/{MODEL}/load", {}))[0] == 200
        async with asyncio.timeout(SECONDS):
            _, _, reply = await served.rest.call("GET", f"/v2/models/{MODEL}/config")
        config = json.dumps(json.loads(reply) | {"instance_group": groups})
        status, answer = await post(served, f"repository/models/{MODEL}/load", {"parameters": {"config": config}})
        assert (status, RAISE in answer["error"]) == (400, True), answer
        status, answer = await post(served, f"models/{MODEL}/generate", {"INPUT0": 2.5})
        assert (status, answer["OUTPUT0"]) == (200, 2.5)
