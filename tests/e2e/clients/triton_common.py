"""Checks that hold for all four clients of the tritonclient package."""

import numpy as np
from checks import Raises
from samples import assert_same, sample, strings
from tritonclient.utils import InferenceServerException

UNKNOWN_MODEL = "Request for unknown model: 'nope' is not found"
UNKNOWN_VERSION = "Request for unknown model: 'half_plus_two' version 7 is not found"


async def check_live(t):
    assert await t.client.is_server_live() is True


async def check_ready(t):
    assert await t.client.is_server_ready() is True


async def check_model_ready(t):
    assert await t.client.is_model_ready("half_plus_two") is True
    assert await t.client.is_model_ready("half_plus_two", "1") is True


async def check_unknown_model_is_not_ready(t):
    assert await t.client.is_model_ready("nope") is False
    assert await t.client.is_model_ready("half_plus_two", "7") is False
    assert await t.client.is_model_ready("no such model/here") is False


async def check_server_metadata(t):
    metadata = await t.json("get_server_metadata")
    assert metadata["name"] == "triglot"
    assert metadata["version"]
    assert {"binary_tensor_data", "parameters"} <= set(metadata["extensions"])


async def check_model_metadata(t):
    for version in ("", "1"):
        metadata = await t.json("get_model_metadata", "half_plus_two", version)
        assert metadata["name"] == "half_plus_two"
        # Clients parse the version as an integer.
        assert metadata["versions"] == ["1"]
        assert metadata["platform"]
        for key, name in (("inputs", "x"), ("outputs", "y")):
            (tensor,) = metadata[key]
            assert (tensor["name"], tensor["datatype"]) == (name, "FP32")
            assert list(map(int, tensor["shape"])) == [-1]


async def check_model_metadata_datatype(t, datatype):
    metadata = await t.json("get_model_metadata", f"identity_{datatype.lower()}")
    assert [tensor["datatype"] for key in ("inputs", "outputs") for tensor in metadata[key]] == [datatype] * 2
    assert list(map(int, metadata["inputs"][0]["shape"])) == [-1, -1]


async def check_model_metadata_of_unknown(t):
    call = t.client.get_model_metadata
    await t.refused(call("nope"), UNKNOWN_MODEL, grpc="NOT_FOUND", http=404)
    await t.refused(call("half_plus_two", "7"), UNKNOWN_VERSION, grpc="NOT_FOUND", http=404)


async def check_infer(t):
    result = await t.client.infer("half_plus_two", t.floats(1, 2, 5))
    assert_same(result.as_numpy("y"), np.array([2.5, 3, 4.5], dtype=np.float32))
    assert result.as_numpy("x") is None
    response = t.response(result)
    assert (response["model_name"], response["model_version"]) == ("half_plus_two", "1")


async def check_infer_version(t):
    result = await t.client.infer("half_plus_three", t.floats(1), model_version="1")
    assert result.as_numpy("y").tolist() == [3.5]
    assert t.response(result)["model_version"] == "1"


async def check_infer_datatype(t, datatype):
    assert_same(await t.identity(datatype, sample(datatype)), sample(datatype))


async def check_infer_empty_tensor(t, datatype):
    for shape in ((0, 3), (2, 0), (0, 0)):
        empty = np.empty(shape, dtype=sample(datatype).dtype)
        assert_same(await t.identity(datatype, empty), empty)


async def check_infer_text(t):
    text = strings([b"", "straße".encode()])[0]
    result = await t.client.infer("uppercase", [t.input("text", text)])
    assert_same(result.as_numpy("upper"), strings([b"", b"STRASSE"])[0])


async def check_infer_image(t):
    images = np.linspace(0, 1, 2 * 8 * 8, dtype=np.float32).reshape(2, 1, 8, 8)
    results = [
        await t.client.infer("digits", [t.input("image", batch)]) for batch in (images, images[:1], images[1:])
    ]
    scores, first, second = (result.as_numpy("probabilities") for result in results)
    assert scores.dtype == np.float32
    assert scores.shape == (2, 10)
    np.testing.assert_allclose(scores.sum(axis=1), [1, 1], rtol=1e-4)
    np.testing.assert_allclose(scores, np.concatenate([first, second]), rtol=1e-4)


async def check_request_id_is_echoed(t):
    result = await t.client.infer("half_plus_two", t.floats(1), request_id="id-7 ü")
    assert t.response(result)["id"] == "id-7 ü"


async def check_no_request_id_is_invented(t):
    result = await t.client.infer("half_plus_two", t.floats(1))
    assert not t.response(result).get("id")


async def check_outputs_listed(t):
    wanted = [t.module.InferRequestedOutput("y")]
    result = await t.client.infer("half_plus_two", t.floats(2), outputs=wanted)
    assert_same(result.as_numpy("y"), np.array([3], dtype=np.float32))


async def check_outputs_unknown(t):
    call = t.client.infer("half_plus_two", t.floats(2), outputs=[t.module.InferRequestedOutput("z")])
    text = "[request id: <id_unknown>] unexpected inference output 'z' for model 'half_plus_two'"
    await t.refused(call, text, grpc="INVALID_ARGUMENT", http=400)


async def check_outputs_listed_twice(t):
    call = t.client.infer("half_plus_two", t.floats(2), outputs=[t.module.InferRequestedOutput("y")] * 2)
    await t.refused(call, "output 'y' already exists in request", grpc="INVALID_ARGUMENT", http=400)


async def check_custom_parameters(t):
    parameters = {"text": "v", "count": -(2**40), "share": 1.5, "flag": True}
    result = await t.client.infer("half_plus_two", t.floats(2), parameters=parameters)
    assert result.as_numpy("y").tolist() == [3]


async def check_priority_and_timeout(t):
    result = await t.client.infer("half_plus_two", t.floats(2), priority=1, timeout=60_000_000)
    assert result.as_numpy("y").tolist() == [3]


async def check_sequence(t):
    for sequence_id in (5, "session"):
        for start, end in ((True, False), (False, False), (False, True)):
            result = await t.client.infer(
                "half_plus_two", t.floats(2), sequence_id=sequence_id, sequence_start=start, sequence_end=end
            )
            assert result.as_numpy("y").tolist() == [3]


async def check_reserved_parameter_is_refused_by_the_client(t):
    with Raises(InferenceServerException) as caught:
        await t.client.infer("half_plus_two", t.floats(2), parameters={"triton_x": 1})
    assert "reserved" in caught.error.message()


async def check_headers(t):
    headers = {"x-request-id": "a", "authorization": "Bearer nothing"}
    assert await t.client.is_server_live(headers=headers) is True
    result = await t.client.infer("half_plus_two", t.floats(2), headers=headers)
    assert result.as_numpy("y").tolist() == [3]


async def check_16_mib(t):
    tensor = np.arange(4 * 2**20, dtype=np.float32).reshape(2048, 2048)
    assert_same(await t.identity("FP32", tensor), tensor)


async def check_16_mib_of_text(t):
    tensor = strings([b"x" * 2**23, b"y" * 2**23])
    assert_same(await t.identity("BYTES", tensor), tensor)


async def check_100_at_once(t):
    results = await t.infer_all("half_plus_two", [t.floats(at, -at) for at in range(100)])
    expected = [[at / 2 + 2, -at / 2 + 2] for at in range(100)]
    assert [result.as_numpy("y").tolist() for result in results] == expected


async def check_error_unknown_model(t):
    call = t.client.infer("nope", t.floats(1))
    await t.refused(call, UNKNOWN_MODEL, grpc="NOT_FOUND", http=404)


async def check_error_unknown_model_of_many(t):
    call = t.infer_all("nope", [t.floats(1)] * 3)
    await t.refused(call, UNKNOWN_MODEL, grpc="NOT_FOUND", http=404)


async def check_error_unknown_model_with_odd_name(t):
    name = "no such/model ü%"
    call = t.client.infer(name.replace("/", "_"), t.floats(1))
    text = "Request for unknown model: 'no such_model ü%' is not found"
    await t.refused(call, text, grpc="NOT_FOUND", http=404)


async def check_error_unknown_version(t):
    call = t.client.infer("half_plus_two", t.floats(1), model_version="7")
    await t.refused(call, UNKNOWN_VERSION, grpc="NOT_FOUND", http=404)


async def check_error_wrong_datatype(t):
    wrong = [t.input("x", np.array([1], dtype=np.float64))]
    call = t.client.infer("half_plus_two", wrong, request_id="7")
    text = "[request id: 7] inference input 'x' data-type is 'FP64', but model 'half_plus_two' expects 'FP32'"
    await t.refused(call, text, grpc="INVALID_ARGUMENT", http=400)


async def check_error_wrong_shape(t):
    call = t.client.infer("half_plus_two", [t.input("x", np.ones((1, 4), dtype=np.float32))])
    text = (
        "[request id: <id_unknown>] unexpected shape for input 'x' for model 'half_plus_two'. "
        "Expected [-1], got [1,4]."
    )
    await t.refused(call, text, grpc="INVALID_ARGUMENT", http=400)


async def check_error_rank_0(t):
    call = t.client.infer("half_plus_two", [t.input("x", np.array(1, dtype=np.float32))])
    await t.refused(call, "Expected [-1], got [].", grpc="INVALID_ARGUMENT", http=400)


async def check_error_input_name(t):
    call = t.client.infer("half_plus_two", [t.input("z", np.ones(1, dtype=np.float32))])
    text = "unexpected inference input 'z' for model 'half_plus_two'"
    await t.refused(call, text, grpc="INVALID_ARGUMENT", http=400)


async def check_error_input_count(t):
    x, z = t.floats(1)[0], t.input("z", np.ones(1, dtype=np.float32))
    call = t.client.infer("half_plus_two", [x, z])
    text = "expected 1 inputs but got 2 inputs for model 'half_plus_two'"
    await t.refused(call, text, grpc="INVALID_ARGUMENT", http=400)


async def check_error_input_twice(t):
    call = t.client.infer("half_plus_two", t.floats(1) * 2)
    await t.refused(call, "input 'x' already exists in request", grpc="INVALID_ARGUMENT", http=400)


async def check_error_no_input(t):
    call = t.client.infer("half_plus_two", [])
    text = "missing required input(s) ['x']. Please provide all required input(s)."
    await t.refused(call, text, grpc="INVALID_ARGUMENT", http=400)


async def check_error_decoupled(t):
    call = t.client.infer("token_stream", [t.input("text", strings([b"a b"])[0])])
    interface = "HTTP end point" if t.http else "ModelInfer RPC"
    text = f"{interface} doesn't support models with decoupled transaction policy"
    await t.refused(call, text, grpc="UNIMPLEMENTED", http=501)


async def check_error_of_the_model(t):
    call = t.client.infer("uppercase", [t.input("text", strings([b"\xff"])[0])])
    await t.refused(call, "text must be UTF-8", grpc="INVALID_ARGUMENT", http=400)
