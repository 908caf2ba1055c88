"""A model that is `async def`, by every protocol."""

from __future__ import annotations

import asyncio
import re
import threading
import time
from typing import Any

import numpy as np
import pytest

import triglot
from tests.transports.live import live, request
from triglot.pb.kserve import inference_pb2 as pb
from triglot.testing import CLIENTS, KServeGrpc

pytestmark = pytest.mark.both_transports

LIMIT = 1.0  # No machine is so busy that one of the quick calls takes as long.
LONG = 1.1


class Doubling(triglot.Model):
    """Notes its threads, and holds the loop for -2."""

    inputs = [triglot.TensorSpec("x", "FP32", [-1])]
    outputs = [triglot.TensorSpec("y", "FP32", [-1])]

    def __init__(self) -> None:
        self.threads: set[int] = set()

    async def infer(self, inputs: Any) -> Any:
        self.threads.add(threading.get_ident())
        if -1 in inputs["x"]:
            raise triglot.InvalidArgument("minus one")
        if -2 in inputs["x"]:
            time.sleep(LONG)  # noqa: ASYNC251 - it is what is looked for
        return {"y": inputs["x"] * 2}


def raw(*values: float) -> bytes:
    return np.array(values, np.float32).tobytes()


async def test_every_protocol_runs_it_on_the_loop() -> None:
    model, x = Doubling(), {"x": np.array([1, 2], np.float32)}
    async with live({"m": model}) as here:

        def ask() -> None:
            for name in CLIENTS:
                with here.client(name) as client:
                    assert client.infer("m", x)["y"].tolist() == [2, 4], name
            with KServeGrpc(here.grpc_address) as grpc_client:
                assert [outputs["y"].tolist() for outputs in grpc_client.infer_stream("m", x)] == [[2, 4]]

        await asyncio.to_thread(ask)
        async with here.session.get(f"{here.url}/models/m/stats") as reply:
            (stats,) = (await reply.json())["model_stats"]
        assert (stats["inference_count"], stats["execution_count"]) == (7, 7)
    assert model.threads == {threading.get_ident()}


async def test_many_at_once_with_errors_among_them() -> None:
    async with live({"m": Doubling()}) as here:
        calls = [here.infer(request("m", raw(-1 if at % 3 == 0 else at))) for at in range(30)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for at, answer in enumerate(answers):
            if at % 3 == 0:
                assert "minus one" in str(answer)
            else:
                assert isinstance(answer, bytes)
                assert pb.ModelInferResponse.FromString(answer).raw_output_contents[0] == raw(at * 2)
        assert here.leases() == 0


async def test_who_holds_the_loop_is_named_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    async with live({"m": Doubling(), "other": Doubling()}, loop_lag_warning=LIMIT) as here:
        for model, value in (("m", -2), ("other", 1), ("m", -2)):
            await here.infer(request(model, raw(value)))
        async with here.session.get(here.url.removesuffix("/v2") + "/metrics") as reply:
            page = await reply.text()
    counts = re.findall(r'^triglot_event_loop_holds_total\{model="(\w+)",version="1"\} (\S+)$', page, re.MULTILINE)
    assert dict(counts) == {"m": "2.0", "other": "0.0"}
    named = [record.getMessage() for record in caplog.records if "blocked the event loop" in record.getMessage()]
    assert len(named) == 1
    assert re.match(r"m version 1 blocked the event loop, and every other call, for \d+\.\d{3} s", named[0])
