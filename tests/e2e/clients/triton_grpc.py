"""Checks of tritonclient.grpc and tritonclient.grpc.aio.

python triton_grpc.py GRPC_ADDRESS REST_ADDRESS grpc|grpc.aio
"""

import importlib
import sys

import checks
import numpy as np
import triton_common
from samples import assert_same, sample
from triton_subject import open_subject


async def check_compression(t):
    for algorithm in ("gzip", "deflate"):
        for tensor in (sample("FP32"), np.zeros((512, 512), dtype=np.float32)):
            assert_same(await t.identity("FP32", tensor, compression_algorithm=algorithm), tensor)


async def check_client_timeout(t):
    result = await t.client.infer("half_plus_two", t.floats(1), client_timeout=60)
    assert result.as_numpy("y").tolist() == [2.5]
    assert await t.client.is_server_live(client_timeout=60) is True
    assert await t.client.is_model_ready("half_plus_two", client_timeout=60) is True


async def check_client_timeout_that_passed(t):
    # More than can come and go in a millisecond.
    large = t.input("x", np.zeros((4096, 1024), dtype=np.float32))
    for _ in range(3):
        call = t.client.infer("identity_fp32", [large], client_timeout=0.001)
        await t.refused(call, "Deadline Exceeded", grpc="DEADLINE_EXCEEDED", http=None)
    result = await t.client.infer("half_plus_two", t.floats(1))
    assert result.as_numpy("y").tolist() == [2.5]


async def check_reply_has_one_raw_entry_per_output(t):
    for array in (sample("FP32"), np.empty((0, 2), dtype=np.float32)):
        response = (await t.client.infer("identity_fp32", [t.input("x", array)])).get_response()
        assert len(response.raw_output_contents) == len(response.outputs) == 1
        assert not response.outputs[0].HasField("contents")


async def check_messages_have_no_unknown_fields(t):
    replies = [
        await t.client.get_server_metadata(),
        await t.client.get_model_metadata("half_plus_two"),
        (await t.client.infer("half_plus_two", t.floats(1))).get_response(),
    ]
    for reply in replies:
        known = type(reply)()
        known.CopyFrom(reply)
        known.DiscardUnknownFields()
        assert known.ByteSize() == reply.ByteSize(), type(reply).__name__


if __name__ == "__main__":
    address, _, kind = sys.argv[1:]
    module = importlib.import_module(f"tritonclient.{kind}")
    checks.run(
        [triton_common, sys.modules["__main__"]],
        lambda: open_subject(kind, module, address),
    )
