"""Checks of tritonclient.http and tritonclient.http.aio.

python triton_http.py GRPC_ADDRESS REST_ADDRESS http|http.aio
"""

import importlib
import sys

import checks
import numpy as np
import triton_common
from samples import assert_same, sample, text_sample
from triton_subject import open_subject
from tritonclient.utils import InferenceServerException


def carried_by_json(datatype):
    return text_sample() if datatype == "BYTES" else sample(datatype)


def assert_equal(got, sent):
    """Like assert_same for what came as JSON: NaN has no bits there, and BYTES are text."""
    assert got.shape == sent.shape
    assert got.dtype == sent.dtype
    if sent.dtype == object:
        assert got.tolist() == [[element.decode() for element in row] for row in sent]
    else:
        np.testing.assert_array_equal(got, sent)


async def infer(t, datatype, array, *, binary_in, binary_out, **options):
    return await t.client.infer(
        f"identity_{datatype.lower()}",
        [t.input("x", array, binary_data=binary_in)],
        outputs=[t.module.InferRequestedOutput("y", binary_data=binary_out)],
        **options,
    )


async def check_json_to_json(t, text_datatype):
    array = carried_by_json(text_datatype)
    result = await infer(t, text_datatype, array, binary_in=False, binary_out=False)
    (output,) = result.get_response()["outputs"]
    assert set(output) == {"name", "datatype", "shape", "data"}
    assert_equal(result.as_numpy("y"), array)


async def check_binary_to_json(t, text_datatype):
    array = carried_by_json(text_datatype)
    result = await infer(t, text_datatype, array, binary_in=True, binary_out=False)
    assert_equal(result.as_numpy("y"), array)


async def check_json_to_binary(t, text_datatype):
    array = carried_by_json(text_datatype)
    result = await infer(t, text_datatype, array, binary_in=False, binary_out=True)
    assert_same(result.as_numpy("y"), array)


async def check_binary_to_binary(t, datatype):
    array = sample(datatype)
    result = await infer(t, datatype, array, binary_in=True, binary_out=True)
    assert_same(result.as_numpy("y"), array)
    (output,) = result.get_response()["outputs"]
    assert set(output) == {"name", "datatype", "shape", "parameters"}
    assert set(output["parameters"]) == {"binary_data_size"}


async def check_empty_json(t, text_datatype):
    empty = np.empty((0, 3), dtype=sample(text_datatype).dtype)
    for binary_in in (False, True):
        for binary_out in (False, True):
            result = await infer(t, text_datatype, empty, binary_in=binary_in, binary_out=binary_out)
            assert_same(result.as_numpy("y"), empty)


async def check_fp16_and_bf16_outputs_have_no_json(t):
    for datatype in ("FP16", "BF16"):
        call = infer(t, datatype, sample(datatype), binary_in=True, binary_out=False)
        text = f"output 'y': {datatype} has no JSON form; request it as binary data"
        await t.refused(call, text, grpc=None, http=400)


async def check_fp16_and_bf16_inputs_have_no_json(t):
    call = infer(t, "FP16", np.ones((1, 1), dtype=np.float16), binary_in=False, binary_out=True)
    await t.refused(call, "FP16 has no JSON form", grpc=None, http=400)
    with checks.Raises(InferenceServerException) as caught:
        t.input("x", sample("BF16"), binary_data=False)
    assert "BF16 inputs must be sent as binary data" in caught.error.message()


async def check_large_json(t):
    """Large bodies go another way through the server than small ones."""
    for datatype in ("FP32", "FP64", "INT64", "UINT64", "BOOL", "BYTES"):
        array = np.tile(carried_by_json(datatype), (500, 4))
        result = await infer(t, datatype, array, binary_in=False, binary_out=False)
        assert_equal(result.as_numpy("y"), array)


async def check_outputs_omitted_come_as_binary(t):
    result = await t.client.infer("half_plus_two", t.floats(1, 2))
    (output,) = result.get_response()["outputs"]
    assert output["parameters"] == {"binary_data_size": 8}


async def check_non_utf8_has_no_json(t):
    call = infer(t, "BYTES", sample("BYTES"), binary_in=True, binary_out=False)
    text = "output 'y' has a BYTES element that is not UTF-8; request it as binary data"
    await t.refused(call, text, grpc=None, http=400)


async def check_no_id_in_the_reply_without_one(t):
    result = await t.client.infer("half_plus_two", t.floats(1))
    assert "id" not in result.get_response()


async def check_request_compression(t):
    for binary in (True, False):
        await compressed(t, "request", binary_in=binary, binary_out=binary)


async def check_16_mib_compressed(t):
    tensor = np.zeros((2048, 2048), dtype=np.float32)
    tensor[1::7] = 1.5
    assert_same(await t.identity("FP32", tensor, request_compression_algorithm="gzip"), tensor)


async def check_response_compression(t):
    for binary in (True, False):
        await compressed(t, "response", binary_in=True, binary_out=binary)


async def compressed(t, what, **binary):
    """Small and large tensors come back whatever the compression of `what`."""
    for algorithm in ("gzip", "deflate"):
        for array in (np.zeros((512, 512), dtype=np.float32), np.ones((1, 2), dtype=np.float32)):
            result = await infer(t, "FP32", array, **binary, **{f"{what}_compression_algorithm": algorithm})
            assert_same(result.as_numpy("y"), array)


async def check_accept_encoding_of_the_aio_client(t):
    """It offers br but inflates only gzip and deflate; so does this, with any of the four clients."""
    headers = {"Accept-Encoding": "gzip, deflate, br"}
    for size in (1, 512):
        array = np.zeros((size, size), dtype=np.float32)
        result = await infer(t, "FP32", array, binary_in=True, binary_out=True, headers=dict(headers))
        assert_same(result.as_numpy("y"), array)


async def check_query_parameters(t):
    result = await t.client.infer("half_plus_two", t.floats(1), query_params={"a": "b c", "d": [1, 2]})
    assert result.as_numpy("y").tolist() == [2.5]


if __name__ == "__main__":
    _, address, kind = sys.argv[1:]
    module = importlib.import_module(f"tritonclient.{kind}")
    checks.run(
        [triton_common, sys.modules["__main__"]],
        lambda: open_subject(kind, module, address),
    )
