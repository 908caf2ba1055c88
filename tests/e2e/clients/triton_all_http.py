"""Checks of every function of tritonclient.http or tritonclient.http.aio.

python triton_all_http.py GRPC_ADDRESS REST_ADDRESS http|http.aio
"""

import asyncio
import sys

import checks
import numpy as np
import triton_all_common
import triton_all_control
from checks import Raises
from samples import assert_same, strings
from triton_all_subject import close, open_all
from triton_subject import HTTP
from tritonclient.utils import InferenceServerException

SECONDS = 60


async def check_json_in_place_of_binary(t):
    inputs = t.pair(6, 2, binary_data=False)
    outputs = [t.wanted("OUTPUT0", binary_data=False), t.wanted("OUTPUT1", binary_data=True)]
    result = await t.client.infer("simple", inputs, outputs=outputs)
    response = result.get_response()
    assert response["outputs"][0]["data"] == [8] * 16
    assert response["outputs"][1]["parameters"] == {"binary_data_size": 64}
    assert_same(result.as_numpy("OUTPUT1"), np.full((1, 16), 4, np.int32))
    text = [t.input("INPUT0", strings(["Grüße".encode(), b""]), binary_data=False)]
    result = await t.client.infer("simple_identity", text, outputs=[t.wanted("OUTPUT0", binary_data=False)])
    assert result.as_numpy("OUTPUT0").tolist() == [["Grüße", ""]]


async def check_compression(t):
    values = np.zeros((4, 100_000), np.float32)
    for algorithm in ("gzip", "deflate"):
        for options in (
            {"request_compression_algorithm": algorithm},
            {"response_compression_algorithm": algorithm},
            {"request_compression_algorithm": algorithm, "response_compression_algorithm": algorithm},
        ):
            result = await t.client.infer("identity_fp32", [t.input("INPUT0", values)], **options)
            assert_same(result.as_numpy("OUTPUT0"), values)


async def check_bodies_made_and_read_by_hand(t):
    make, read = t.module.InferenceServerClient.generate_request_body, t.module.InferenceServerClient
    body, length = make(t.pair(4, 3), outputs=[t.wanted("OUTPUT0")], request_id="by hand")
    headers = {} if length is None else {"Inference-Header-Content-Length": str(length)}
    status, reply_headers, reply = await _post(t, "/v2/models/simple/infer", body, headers)
    assert status == 200, reply
    size = reply_headers.get("inference-header-content-length")
    result = read.parse_response_body(reply, header_length=int(size))
    assert_same(result.as_numpy("OUTPUT0"), np.full((1, 16), 7, np.int32))
    again = t.module.InferResult.from_response_body(reply, header_length=int(size))
    assert again.get_response()["id"] == "by hand"


async def _post(t, path, body, headers):
    host, _, port = t.address.rpartition(":")

    def run():
        import http.client  # noqa: PLC0415 - gevent, which the client brings, need not know it

        connection = http.client.HTTPConnection(host, int(port), timeout=SECONDS)
        try:
            connection.request("POST", path, body, headers)
            reply = connection.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
        finally:
            connection.close()

    return await asyncio.to_thread(run)


async def check_headers_and_query_parameters(t):
    extra = {"headers": {"X-Header": "1"}, "query_params": {"one": 1, "two": ["a", "b"]}}
    assert await t.client.is_server_live(**extra) is True
    assert await t.client.is_server_ready(**extra) is True
    assert await t.client.is_model_ready("simple", **extra) is True
    assert (await t.client.get_model_metadata("simple", **extra))["name"] == "simple"
    result = await t.client.infer("simple", t.pair(1, 2), **extra)
    assert result.as_numpy("OUTPUT0").tolist() == [[3] * 16]


async def check_infer_with_all_its_arguments(t):
    result = await t.client.infer(
        "simple",
        t.pair(5, 1),
        model_version="1",
        outputs=[t.wanted("OUTPUT1", binary_data=True)],
        request_id="all",
        priority=2,
        timeout=60_000_000,
        headers={"x-header": "1"},
        query_params={"a": "b"},
        request_compression_algorithm="gzip",
        response_compression_algorithm="deflate",
        parameters={"text": "v", "count": 3, "share": 0.5, "flag": True},
    )
    assert result.as_numpy("OUTPUT1").tolist() == [[4] * 16]
    assert result.get_response()["id"] == "all"


async def check_async_infer(t):
    if t.kind == HTTP:
        with t.module.InferenceServerClient(t.address, concurrency=4, max_greenlets=4) as client:
            calls = [client.async_infer("simple", t.pair(at, 1), request_id=str(at)) for at in range(8)]
            results = [call.get_result(block=True, timeout=SECONDS) for call in calls]
        # On the client of the other checks, too.
        again = t.plain.async_infer("simple", t.pair(1, 1)).get_result()
        assert again.as_numpy("OUTPUT0").tolist() == [[2] * 16]
    else:
        async with t.module.InferenceServerClient(t.address, conn_limit=4, conn_timeout=SECONDS) as client:
            calls = [client.infer("simple", t.pair(at, 1), request_id=str(at)) for at in range(8)]
            results = await asyncio.gather(*calls)
    assert [result.get_response()["id"] for result in results] == [str(at) for at in range(8)]
    assert [result.as_numpy("OUTPUT0")[0, 0] for result in results] == list(range(1, 9))


async def check_network_timeouts(t):
    limit = {"network_timeout": 0.3} if t.kind == HTTP else {"conn_timeout": 0.3}
    client = t.module.InferenceServerClient(t.address, **limit)
    inputs = [t.input("SECONDS", np.array([SECONDS], np.float32))]
    try:
        # A time limit of the network is told as the network's own library tells it.
        with Raises(Exception) as caught:
            call = client.infer("wait", inputs)
            if t.kind != HTTP:
                await call
        assert "imed out" in str(caught.error) or isinstance(caught.error, TimeoutError), repr(caught.error)
    finally:
        await close(t, client)
    # The model has noticed, or this one would come too late.
    quick = [t.input("SECONDS", np.array([0], np.float32))]
    result = await asyncio.wait_for(t.client.infer("wait", quick), SECONDS / 2)
    assert result.as_numpy("WAITED")[0] < SECONDS / 2


async def check_decoupled_models_are_for_streams(t):
    inputs = [
        t.input("IN", np.array([1], np.int32)),
        t.input("DELAY", np.zeros(1, np.uint32)),
        t.input("WAIT", np.zeros(1, np.uint32)),
    ]
    with Raises(InferenceServerException) as caught:
        await t.client.infer("repeat_int32", inputs)
    assert "doesn't support models with decoupled transaction policy" in caught.error.message()
    assert caught.error.status() == "501"


async def check_every_public_function_was_called(t):
    client = t.module.InferenceServerClient(t.address)
    await close(t, client)
    assert not t.calls.missing, sorted(t.calls.missing)


if __name__ == "__main__":
    _, address, kind = sys.argv[1:]
    checks.run([triton_all_common, triton_all_control, sys.modules["__main__"]], lambda: open_all(kind, address))
