"""Errors that clients get while something is not as usual: full, failed, late, or about to end (spec 1.5, 3.6)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

import triglot
from tests.process import PLAIN_MODELS
from tests.protocol_clients.kserve_async import Answer, Infer, Tensor, grpc_message, rest_body
from tests.protocols.kserve_served import MODELS, Served, serve_models
from tests.waiting import ever_later, until
from triglot.core.errors import Code
from triglot.core.tensor import pack_bytes
from triglot.pb.kserve import inference_pb2 as pb
from triglot.testing import GatedModel


class Waiting(GatedModel):
    """One request may wait behind the one that runs."""

    inputs = [triglot.TensorSpec("x", "BYTES", [1])]
    outputs = [triglot.TensorSpec("y", "BYTES", [1])]
    max_queue_size = 1


REQUEST = Infer("scalar", [Tensor("x", "BYTES", [1], pack_bytes([b"a"]))], id="7")
FULL = "[request id: 7] Exceeds maximum queue size: 1 requests are queued, the most that max_queue_size allows"


@asynccontextmanager
async def busy_house(model: Waiting) -> AsyncIterator[Served]:
    """A server whose one model is this one, under the name of `scalar`, and runs a request."""
    async with serve_models([MODELS / "scalar"], load=lambda *_: model) as served:
        first = asyncio.ensure_future(served.grpc.infer(REQUEST))
        try:
            await model.until_at("infer")
            yield served
        finally:
            model.open_point("infer")
            assert (await first).code is Code.OK


@pytest.mark.parametrize("name", ["grpc", "rest"])
async def test_a_full_queue(name: str) -> None:
    model = Waiting("infer")
    async with busy_house(model) as served:
        client = served.client(name)
        tasks = [asyncio.ensure_future(client.infer(REQUEST)) for _ in range(3)]
        refused = asyncio.as_completed(tasks)
        for _ in range(2):
            assert await next(refused) == Answer(Code.RESOURCE_EXHAUSTED, FULL)
        model.open_point("infer")
        codes = sorted([(await task).code for task in tasks])
        assert codes == [Code.OK, Code.RESOURCE_EXHAUSTED, Code.RESOURCE_EXHAUSTED]


async def test_a_full_queue_says_when_to_come_again() -> None:
    model = Waiting("infer")
    async with busy_house(model) as served:
        body, head = rest_body(REQUEST)
        headers = {"Inference-Header-Content-Length": str(head)}
        path = "/v2/models/scalar/infer"
        calls = [asyncio.ensure_future(served.rest.call("POST", path, body, headers)) for _ in range(2)]
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        status, reply_headers, reply = next(call.result() for call in calls if call.done())
        assert (status, reply_headers["Retry-After"]) == (429, "1")
        assert reply_headers["Content-Type"] == "application/json"
        assert json.loads(reply) == {"error": FULL}
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await served.grpc.stub("ModelInfer")(grpc_message(REQUEST).SerializeToString(), timeout=20)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert ("grpc-retry-pushback-ms", "1000") in list(caught.value.trailing_metadata() or ())
        model.open_point("infer")
        assert sorted([(await call)[0] for call in calls]) == [200, 429]


async def test_a_request_whose_client_gave_up_leaves_the_queue() -> None:
    model = Waiting("infer")
    async with asyncio.timeout(20), busy_house(model) as served:
        waiting = served.server.dataplane.queue_depth
        for later in ever_later(0.05):
            call = served.grpc.stub("ModelInfer")(grpc_message(REQUEST).SerializeToString(), timeout=later)
            late = asyncio.ensure_future(call)
            await until(lambda: waiting() == 1 or late.done())  # noqa: B023 - it is not called later
            has_waited = waiting() == 1
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await late
            assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
            # Its place is free again as soon as the server has heard of it.
            await until(lambda: waiting() == 0)
            if has_waited:
                break
        following = asyncio.ensure_future(served.grpc.infer(REQUEST))
        await until(lambda: waiting() == 1 or following.done())
        model.open_point("infer")
        assert (await following).code is Code.OK


GOOD = (MODELS / "scalar" / "model.py").read_text()
BROKEN = GOOD + "\n    def load(self, folder):\n        raise OSError('the secret is 42')\n"


def make_models(folder: Path) -> None:
    for name, text in {"broken/1": BROKEN, "half/1": GOOD, "half/2": BROKEN, "good/1": GOOD}.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "model.py").write_text(text)


WHY = "it could not be loaded; the server's log says why"


async def test_versions_that_could_not_be_loaded(tmp_path: Path) -> None:
    make_models(tmp_path)
    async with serve_models([tmp_path], exit_on_load_error=False) as served:
        for client in (served.grpc, served.rest):
            x = Tensor("x", "FP64", [], bytes(8))
            assert await client.infer(Infer("broken", [x])) == Answer(
                Code.NOT_FOUND, f"Request for unknown model: 'broken' has no available versions: {WHY}"
            )
            assert await client.infer(Infer("broken", [x], version="1")) == Answer(
                Code.UNAVAILABLE, f"Request for unknown model: 'broken' version 1 is not at ready state: {WHY}"
            )
            assert await client.infer(Infer("half", [x], version="2")) == Answer(
                Code.UNAVAILABLE, f"Request for unknown model: 'half' version 2 is not at ready state: {WHY}"
            )
            assert (await client.infer(Infer("half", [x]))).version == "1"
            assert (await client.infer(Infer("good", [x]))).code is Code.OK
        await assert_readiness(served, server=False, models={"broken": False, "half": True, "good": True})
        assert (await served.rest.call("GET", "/v2/models/broken"))[0] == 404
        status, _, reply = await served.rest.call("GET", "/v2/models/half")
        assert (status, json.loads(reply)["versions"]) == (200, ["1"])


async def assert_readiness(served: Served, *, server: bool, models: dict[str, bool]) -> None:
    _, _, reply = await served.grpc.call("ServerReady", b"")
    assert pb.ServerReadyResponse.FromString(reply).ready is server
    status, headers, body = await served.rest.call("GET", "/v2/health/ready")
    assert (status, headers["Content-Type"]) == (200 if server else 503, "application/json")
    assert json.loads(body) == {"ready": server, "live": True}
    for name, ready in models.items():
        code, _, reply = await served.grpc.call("ModelReady", pb.ModelReadyRequest(name=name).SerializeToString())
        assert (code, pb.ModelReadyResponse.FromString(reply).ready) == (Code.OK, ready)
        status, _, body = await served.rest.call("GET", f"/v2/models/{name}/ready")
        expected = {"name": name, "ready": True} if ready else {"error": f"model '{name}' is not ready"}
        assert (status, json.loads(body)) == (200 if ready else 503, expected)


async def test_a_server_that_is_about_to_stop_is_live_and_not_ready() -> None:
    async with serve_models([MODELS / "scalar"]) as served:
        await assert_readiness(served, server=True, models={"scalar": True})
        await served.server.drain(0)
        await assert_readiness(served, server=False, models={"scalar": False})
        status, _, body = await served.rest.call("GET", "/v2/health/live")
        assert (status, json.loads(body)) == (200, {"live": True})
        answer = await served.grpc.infer(Infer("scalar", [Tensor("x", "FP64", [], bytes(8))]))
        assert answer.code is Code.OK


@pytest.mark.parametrize(("size", "code"), [(10_000, Code.OK), (30_000, Code.RESOURCE_EXHAUSTED)])
async def test_messages_larger_than_the_server_takes(size: int, code: Code) -> None:
    identity = PLAIN_MODELS / "identity_uint8"
    async with serve_models([identity], max_message_size=20_000) as served:
        request = Infer("identity_uint8", [Tensor("x", "UINT8", [1, size], bytes(size))])
        answer = await served.grpc.infer(request)
        assert answer.code is code
        body, head = rest_body(request)
        status, headers, reply = await served.rest.call(
            "POST", "/v2/models/identity_uint8/infer", body, {"Inference-Header-Content-Length": str(head)}
        )
        assert status == (200 if code is Code.OK else 413)
        if code is not Code.OK:
            assert headers["Content-Type"] == "application/json"
            assert "larger than 20000 bytes" in json.loads(reply)["error"]
        small = Infer("identity_uint8", [Tensor("x", "UINT8", [1, 1], b"7")])
        assert (await served.grpc.infer(small)).code is (await served.rest.infer(small)).code is Code.OK
