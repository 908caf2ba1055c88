"""Checks that hold for all four clients of the tritonclient package, on the models of tests/models_triton.

The server is called "triton" and has loaded all of them.
"""

import numpy as np
from checks import Raises
from samples import assert_same, strings
from tritonclient import utils
from tritonclient.utils import InferenceServerException

MODELS = (
    "accumulator", "auto_onnx", "auto_python", "batched_add_one", "bls_add_sub", "classifier",
    "ensemble_sum_of_words", "ensemble_twice", "identity_fp32", "optional_bias", "repeat_int32", "simple",
    "simple_identity", "simple_int8", "simple_sequence", "wait", "words_to_numbers",
)  # fmt: skip


# --- what is there ---


async def check_the_server(t):
    assert await t.client.is_server_live() is True
    assert await t.client.is_server_ready() is True
    metadata = await t.json("get_server_metadata")
    assert metadata["name"] == "triton"
    wanted = {
        "classification", "sequence", "model_repository", "schedule_policy", "model_configuration",
        "system_shared_memory", "binary_tensor_data", "parameters", "statistics", "trace", "logging",
    }  # fmt: skip
    assert not wanted - set(metadata["extensions"]), metadata["extensions"]
    assert "cuda_shared_memory" not in metadata["extensions"]


async def check_every_model_is_ready(t):
    rows = await t.json("get_model_repository_index")
    rows = rows if t.http else rows["models"]
    assert sorted((row["name"], row["version"], row["state"]) for row in rows) == [
        (name, "1", "READY") for name in MODELS
    ]
    for name in MODELS:
        assert await t.client.is_model_ready(name) is True
        assert await t.client.is_model_ready(name, "1") is True
        metadata = await t.json("get_model_metadata", name)
        assert (metadata["name"], metadata["versions"]) == (name, ["1"])


async def check_metadata_of_models(t):
    metadata = await t.json("get_model_metadata", "simple", "1")
    assert metadata["platform"] == "onnxruntime_onnx"
    assert [
        (tensor["name"], tensor["datatype"], list(map(int, tensor["shape"]))) for tensor in metadata["inputs"]
    ] == [
        ("INPUT0", "INT32", [-1, 16]),
        ("INPUT1", "INT32", [-1, 16]),
    ]
    assert (await t.json("get_model_metadata", "identity_fp32"))["platform"] == "python"
    assert (await t.json("get_model_metadata", "ensemble_twice"))["platform"] == "ensemble"


async def check_config(t):
    simple = await t.config("simple", "1")
    assert (simple["name"], simple["platform"], simple["max_batch_size"]) == ("simple", "onnxruntime_onnx", 8)
    assert simple["backend"] == "onnxruntime"
    described = [
        (tensor["name"], tensor["data_type"], list(map(int, tensor["dims"]))) for tensor in simple["input"]
    ]
    assert described == [("INPUT0", "TYPE_INT32", [16]), ("INPUT1", "TYPE_INT32", [16])]
    assert int(simple["version_policy"]["latest"]["num_versions"]) == 1
    assert "dynamic_batching" not in simple
    assert len(simple["instance_group"]) == 1
    int8 = await t.config("simple_int8")
    assert int8["instance_group"][0]["count"] == 2
    assert list(map(int, int8["dynamic_batching"]["preferred_batch_size"])) == [8]
    batched = await t.config("batched_add_one")
    assert list(map(int, batched["dynamic_batching"]["preferred_batch_size"])) == [4, 16]
    assert int(batched["dynamic_batching"]["max_queue_delay_microseconds"]) == 100000
    assert "sequence_batching" in await t.config("accumulator")
    assert (await t.config("repeat_int32"))["model_transaction_policy"]["decoupled"] is True
    steps = (await t.config("ensemble_twice"))["ensemble_scheduling"]["step"]
    assert [step["model_name"] for step in steps] == ["simple", "simple"]
    bias = (await t.config("optional_bias"))["input"][1]
    assert (bias["name"], bias["optional"]) == ("BIAS", True)


async def check_config_of_models_without_a_file(t):
    onnx = await t.config("auto_onnx")
    assert (onnx["name"], onnx["backend"], onnx["default_model_filename"]) == (
        "auto_onnx", "onnxruntime", "model.onnx",
    )  # fmt: skip
    assert [tensor["name"] for tensor in onnx["input"]] == ["INPUT0", "INPUT1"]
    python = await t.config("auto_python")
    assert (python["max_batch_size"], python["backend"]) == (4, "python")
    assert "dynamic_batching" in python
    assert list(map(int, python["output"][0]["dims"])) == [2]


# --- inference ---


async def check_add_sub(t):
    result = await t.client.infer("simple", t.pair(5, 3), model_version="1", request_id="my id")
    assert_same(result.as_numpy("OUTPUT0"), np.full((1, 16), 8, np.int32))
    assert_same(result.as_numpy("OUTPUT1"), np.full((1, 16), 2, np.int32))
    response = t.response(result)
    assert (response["model_name"], response["model_version"], response["id"]) == ("simple", "1", "my id")
    output = result.get_output("OUTPUT1")
    assert (output["datatype"] if t.http else output.datatype) == "INT32"
    assert result.get_output("nothing") is None


async def check_batches_of_several_rows(t):
    rows = [np.arange(48, dtype=np.int32).reshape(3, 16) * factor for factor in (1, 10)]
    result = await t.client.infer("simple", [t.input(f"INPUT{at}", row) for at, row in enumerate(rows)])
    assert_same(result.as_numpy("OUTPUT0"), rows[0] + rows[1])
    many = [t.input(f"INPUT{at}", np.zeros((9, 16), np.int32)) for at in (0, 1)]
    await t.refused(
        t.client.infer("simple", many),
        "inference request batch-size must be <= 8 for 'simple'",
        grpc="INVALID_ARGUMENT",
        http=400,
    )


async def check_inputs_are_described_and_filled_later(t):
    first, second = (t.empty(f"INPUT{at}", [1, 16], np.int32) for at in (0, 1))
    assert (first.name(), first.datatype(), list(first.shape())) == ("INPUT0", "INT32", [1, 16])
    for tensor in (first, second):
        tensor.set_shape([2, 16])
        tensor.set_data_from_numpy(np.ones((2, 16), np.int32))
    wanted = t.wanted("OUTPUT0")
    assert wanted.name() == "OUTPUT0"
    result = await t.client.infer("simple", [first, second], outputs=[wanted])
    assert_same(result.as_numpy("OUTPUT0"), np.full((2, 16), 2, np.int32))
    assert result.as_numpy("OUTPUT1") is None


async def check_int8(t):
    result = await t.client.infer("simple_int8", t.pair(100, 20, np.int8))
    assert_same(result.as_numpy("OUTPUT0"), np.full((1, 16), 120, np.int8))
    assert_same(result.as_numpy("OUTPUT1"), np.full((1, 16), 80, np.int8))
    # Many at the same time share batches, or not: each has its own answer.
    results = await t.infer_all("simple_int8", [t.pair(at, at // 2, np.int8) for at in range(100)])
    for at, result in enumerate(results):
        assert_same(result.as_numpy("OUTPUT0"), np.full((1, 16), at + at // 2).astype(np.int8))
        assert_same(result.as_numpy("OUTPUT1"), np.full((1, 16), at - at // 2, np.int8))


async def check_strings(t):
    for model in ("simple_identity",):
        text = strings(["Grüße".encode(), b"", b"ends with zero\x00"])
        result = await t.client.infer(model, [t.input("INPUT0", text)])
        assert_same(result.as_numpy("OUTPUT0"), text)


async def check_strings_packed_by_hand(t):
    text = strings([b"one", "zw\u00f6lf".encode(), b""])
    packed = utils.serialize_byte_tensor(text)
    assert utils.serialized_byte_size(packed) == len(packed.item())
    assert_same(utils.deserialize_bytes_tensor(packed.item()).reshape(text.shape), text)
    result = await t.client.infer("simple_identity", [t.input("INPUT0", text)])
    assert_same(result.as_numpy("OUTPUT0"), text)


async def check_datatypes_as_numpy_has_them(t):
    metadata = await t.json("get_model_metadata", "simple_int8")
    assert {utils.triton_to_np_dtype(tensor["datatype"]) for tensor in metadata["inputs"]} == {np.int8}


async def check_python_identity(t):
    values = np.random.default_rng(1).random((3, 1000), np.float32)
    result = await t.client.infer("identity_fp32", [t.input("INPUT0", values)])
    assert_same(result.as_numpy("OUTPUT0"), values)


async def check_ensembles(t):
    inputs = [t.input(name, np.full((2, 16), value, np.int32)) for name, value in (("A", 7), ("B", 3))]
    result = await t.client.infer("ensemble_twice", inputs)
    assert_same(result.as_numpy("TWICE_A"), np.full((2, 16), 14, np.int32))
    assert_same(result.as_numpy("TWICE_B"), np.full((2, 16), 6, np.int32))
    words = [t.input(f"WORDS{at}", strings([word] * 16)) for at, word in enumerate((b"20", b"22"))]
    result = await t.client.infer("ensemble_sum_of_words", words)
    assert_same(result.as_numpy("SUM"), np.full((1, 16), 42, np.int32))


async def check_an_error_of_a_step(t):
    words = [t.input(f"WORDS{at}", strings([word] * 16)) for at, word in enumerate((b"20", b"many"))]
    call = t.client.infer("ensemble_sum_of_words", words)
    await t.refused(call, "invalid literal for int() with base 10: 'many'", grpc="INVALID_ARGUMENT", http=400)


async def bls(t, model_name):
    inputs = [t.input(f"INPUT{at}", np.full(16, value, np.int32)) for at, value in enumerate((9, 4))]
    name = t.input("MODEL_NAME", np.array([model_name.encode()], object))
    return await t.client.infer("bls_add_sub", [name, *inputs])


async def check_bls(t):
    result = await bls(t, "simple")
    assert_same(result.as_numpy("OUTPUT0"), np.full(16, 13, np.int32))
    assert_same(result.as_numpy("OUTPUT1"), np.full(16, 5, np.int32))
    with Raises(InferenceServerException) as caught:
        await bls(t, "nope")
    assert "'nope' is not found" in caught.error.message()
    assert (caught.error.debug_details() is None) is t.http


async def check_optional_inputs_and_parameters(t):
    values, bias = np.array([[1, 2, 3]], np.float32), np.array([[10, 20, 30]], np.float32)
    result = await t.client.infer("optional_bias", [t.input("INPUT0", values)])
    assert_same(result.as_numpy("OUTPUT0"), values)
    both = [t.input("INPUT0", values), t.input("BIAS", bias)]
    result = await t.client.infer("optional_bias", both, parameters={"scale": 2, "note": "x", "share": 0.5})
    assert_same(result.as_numpy("OUTPUT0"), (values + bias) * 2)
    call = t.client.infer("optional_bias", [t.input("BIAS", bias)])
    await t.refused(call, "missing required input(s) ['INPUT0']", grpc="INVALID_ARGUMENT", http=400)


async def check_models_without_a_config(t):
    result = await t.client.infer("auto_onnx", t.pair(1.5, 0.25, np.float32))
    assert_same(result.as_numpy("OUTPUT0"), np.full((1, 16), 1.75, np.float32))
    result = await t.client.infer("auto_python", [t.input("INPUT0", np.array([[1, 2]], np.float32))])
    assert_same(result.as_numpy("OUTPUT0"), np.array([[2, 4]], np.float32))


async def check_classification(t):
    scores = np.array([[1, 4, 2, 3], [9, 0, 0, 0]], np.float32)
    wanted = [t.wanted("prob", class_count=2)]
    result = await t.client.infer("classifier", [t.input("scores", scores)], outputs=wanted)
    found = result.as_numpy("prob")
    assert found.shape == (2, 2)
    texts = [[label.decode().split(":") for label in row] for row in found]
    assert [[(index, label) for _, index, label in row] for row in texts] == [
        [("1", "beagle"), ("3", "black swan")],
        [("0", "tabby cat"), ("1", "beagle")],
    ]
    softmax = np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True)
    values = [[float(value) for value, _, _ in row] for row in texts]
    np.testing.assert_allclose(values, -np.sort(-softmax, axis=1)[:, :2], atol=1e-6)
    assert all(len(value.partition(".")[2]) == 6 for row in texts for value, _, _ in row)


async def check_dynamic_batching(t):
    requests = [[t.input("INPUT0", np.array([[number, -number]], np.int64))] for number in range(8)]
    before = (await t.statistics("batched_add_one"))[0]
    results = await t.infer_all("batched_add_one", requests)
    for number, result in enumerate(results):
        assert_same(result.as_numpy("OUTPUT0"), np.array([[number + 1, 1 - number]], np.int64))
    counts = [result.as_numpy("REQUESTS").item() for result in results]
    after = (await t.statistics("batched_add_one"))[0]
    assert after.get("inference_count", 0) - before.get("inference_count", 0) == 8
    executions = after.get("execution_count", 0) - before.get("execution_count", 0)
    assert executions == round(sum(1 / count for count in counts)), (executions, counts)


# --- sequences ---


async def run_sequence(t, model, sequence_id, values):
    sums = []
    for at, value in enumerate(values):
        result = await t.client.infer(
            model,
            [t.input("INPUT", np.array([[value]], np.int32))],
            sequence_id=sequence_id,
            sequence_start=at == 0,
            sequence_end=at == len(values) - 1,
        )
        sums.append(result.as_numpy("OUTPUT").item())
    return sums


async def check_sequences(t):
    for _ in range(2):
        assert await run_sequence(t, "simple_sequence", 1000 + t.next(), [11, 7, 5]) == [11, 18, 23]
        number = 1000 + t.next()
        assert await run_sequence(t, "accumulator", number, [1, 2, 3]) == [1, 3, 6 + number]
    # The ids of the ONNX model are seen by nobody, and may be texts.
    assert await run_sequence(t, "simple_sequence", "a text", [2, 3]) == [2, 5]


async def check_a_sequence_that_has_not_begun(t):
    call = t.client.infer("accumulator", [t.input("INPUT", np.ones((1, 1), np.int32))], sequence_id=77777)
    await t.refused(call, "must specify the START flag", grpc="INVALID_ARGUMENT", http=400)
