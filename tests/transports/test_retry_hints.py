"""When a client may retry: never "0", which gRPC's C core takes for "do not retry", and never too early."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from typing import Any

import grpc.aio
import pytest

from tests.scheduling.scripted_models import Inputs, Plain
from tests.served_models import SECONDS, Function, serving
from tests.transports.live import METHOD, live, request
from tests.transports.test_h2_rest import BODY
from tests.transports.tls_server import HOST
from triglot.core.errors import QueueFull, Unavailable, retry_hint

pytestmark = pytest.mark.both_transports

HINTS: dict[float, tuple[str | None, str | None]] = {
    1e-9: ("1", "1"),
    0.0001: ("1", "1"),
    0.0004999: ("1", "1"),
    0.0011: ("2", "1"),
    0.07: ("70", "1"),
    1: ("1000", "1"),
    1.2: ("1200", "2"),
    2.5: ("2500", "3"),
    1e308: ("1000000000", "1000000"),
    0: (None, None),
    -0.001: (None, None),
    -5: (None, None),
}
"""Milliseconds over gRPC and seconds over REST, None for no hint, by `retry_after`."""


@pytest.mark.parametrize("given", HINTS)
async def test_hints_of_models_are_rounded_up(given: float) -> None:
    def infer(_: Any) -> Any:
        raise QueueFull("later", retry_after=given)

    async with serving({"twice": Function(infer)}) as here:
        options = [("grpc.enable_retries", 0)]
        async with grpc.aio.insecure_channel(f"{HOST}:{here.server.grpc_port}", options) as channel:
            call = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(request("twice", bytes(4), datatype="INT32"), timeout=SECONDS)
        over_grpc = dict(refused.value.trailing_metadata() or ()).get("grpc-retry-pushback-ms")

        def post() -> str | None:
            url = f"http://{HOST}:{here.server.rest_port}/v2/models/twice/infer"
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(url, BODY, SECONDS)
            assert json.loads(refused.value.read())["error"]
            return refused.value.headers["Retry-After"]

        assert (over_grpc, await asyncio.to_thread(post)) == HINTS[given]


def test_an_error_without_a_hint() -> None:
    assert retry_hint(QueueFull("later"), 1000) is None


async def test_a_client_may_try_again_by_itself() -> None:
    """gRPC's own retries are only for a call that ended before anything of an answer came."""
    asked = 0

    def infer(inputs: Inputs) -> dict[str, object]:
        nonlocal asked
        asked += 1
        if asked == 1:
            raise Unavailable("not yet", retry_after=0.01)
        return {"y": inputs["x"]}

    policy = {
        "maxAttempts": 3,
        "initialBackoff": "0.01s",
        "maxBackoff": "0.01s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    options = [("grpc.service_config", json.dumps({"methodConfig": [{"name": [{}], "retryPolicy": policy}]}))]
    async with (
        live({"later": Plain(infer)}) as server,
        grpc.aio.insecure_channel(f"127.0.0.1:{server.server.grpc_port}", options=options) as channel,
    ):
        await channel.unary_unary(METHOD + "ModelInfer")(request("later", b"\0\0\0\0"))
    assert asked == 2
