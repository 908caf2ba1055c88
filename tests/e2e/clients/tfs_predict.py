"""Checks of Predict with TensorFlow Serving's client."""

import asyncio
import threading

import grpc
import numpy as np
import tensorflow as tf
from samples import assert_same, sample, strings
from tensorflow_serving.apis import predict_pb2
from tfs_subject import (
    FIELDS,
    SECONDS,
    Code,
    answer_of,
    as_content,
    as_values,
    bare_tensor,
    call,
    failure,
    predict_request,
    refused,
    start,
)

CALLERS, ROUNDS = 16, 20
MODELS = {"FP16": "half", "FP32": "float", "FP64": "double", "BF16": "bfloat16", "BYTES": "string"}
MIB_16 = 16 * 2**20


async def echoed(subject, name, proto, array):
    """Asserts that the model gives back what it was given, in the dtype's own field; `proto` holds `array`."""
    alias = {"string_identity": "s", "int32_identity": "default"}.get(name, "x")
    response = await subject.predict(name, **{alias: proto})
    output = response.outputs[alias]
    filled = {field.name for field, _ in output.ListFields()} - {"dtype", "tensor_shape"}
    assert filled == ({FIELDS[tf.as_dtype(output.dtype)]} if array.size else set()), filled
    assert output.HasField("tensor_shape")
    assert_same(tf.make_ndarray(output), array)


# --- tensors ---


async def check_every_datatype(subject, datatype):
    name = f"{MODELS.get(datatype, datatype.lower())}_identity"
    array = sample(datatype)
    for part in (array, array[:1, :1], array[0, 1], array[:0], array.T, array[np.newaxis, :, ::2]):
        value = np.ascontiguousarray(np.asarray(part, array.dtype)).reshape(np.shape(part))
        await echoed(subject, name, tf.make_tensor_proto(value), value)
        await echoed(subject, name, as_values(value), value)
        if datatype != "BYTES":
            await echoed(subject, name, as_content(value), value)


async def check_complex_numbers(subject):
    for kind in ("complex64", "complex128"):
        array = np.array([[1 + 2j, complex("nan+infj")], [complex("-0-0j"), -1e-30j]], kind)
        for value in (array, array[:1, :1], array[0, 1].reshape(()), array[:0]):
            for proto in (tf.make_tensor_proto(value), as_values(value), as_content(value)):
                await echoed(subject, f"{kind}_identity", proto, value)


async def check_quantized_numbers(subject):
    for kind in ("qint8", "quint8", "qint16", "quint16", "qint32"):
        dtype = tf.as_dtype(kind).as_numpy_dtype
        numbers = np.iinfo(dtype[0])
        array = np.array([[numbers.min, numbers.max], [0, 1]], dtype[0])
        for value in (array, array[:1, :1], array[0, 1].reshape(()), array[:0]):
            for proto in (as_values(value), as_content(value)):
                proto.dtype = tf.as_dtype(kind).as_datatype_enum
                await echoed(subject, f"{kind}_identity", proto, value.view(dtype))


async def check_python_values(subject):
    """As they stand in TensorFlow Serving's own examples."""
    for name, proto, array in (
        ("float_identity", tf.make_tensor_proto(1.5), np.array(1.5, np.float32)),
        ("float_identity", tf.make_tensor_proto([1.5], shape=[1]), np.array([1.5], np.float32)),
        ("float_identity", tf.make_tensor_proto(2.0, shape=[2, 2]), np.full([2, 2], 2, np.float32)),
        ("double_identity", tf.make_tensor_proto([[1, 2]], tf.float64), np.array([[1, 2]], np.float64)),
        ("int32_identity", tf.make_tensor_proto([1, 2]), np.array([1, 2], np.int32)),
        ("int64_identity", tf.make_tensor_proto(7, tf.int64), np.array(7)),
        ("bool_identity", tf.make_tensor_proto([True, False]), np.array([True, False])),
        ("string_identity", tf.make_tensor_proto("text"), np.array(b"text", object)),
        ("string_identity", tf.make_tensor_proto(["ä", "b"]), strings(["ä".encode(), b"b"])[0]),
        ("string_identity", tf.make_tensor_proto(b"\xff\xd8", shape=[1]), strings([b"\xff\xd8"])[0]),
        ("half_identity", tf.make_tensor_proto([0.1], tf.float16), np.array([0.1], np.float16)),
    ):
        await echoed(subject, name, proto, array)


async def check_short_lists_of_values(subject):
    proto = bare_tensor(np.zeros(4, np.float32))
    await echoed(subject, "float_identity", proto, np.zeros(4, np.float32))
    proto.float_val.extend([1, 2])
    await echoed(subject, "float_identity", proto, np.array([1, 2, 2, 2], np.float32))
    proto.float_val.extend([3, 4, 5, 6])
    await echoed(subject, "float_identity", proto, np.array([1, 2, 3, 4], np.float32))


async def check_16_mib_as_content_and_as_values(subject):
    array = np.random.default_rng(0).standard_normal(MIB_16 // 4, np.float32)
    for proto in (as_content(array), as_values(array)):
        output = (await subject.predict("float_identity", x=proto)).outputs["x"]
        assert not output.tensor_content
        assert_same(np.array(output.float_val, np.float32), array)
    assert_same(tf.make_ndarray(output), array)


async def check_16_mib_of_strings(subject):
    texts = [bytes([number % 256]) * 4096 for number in range(MIB_16 // 4096)]
    await echoed(subject, "string_identity", tf.make_tensor_proto(texts), strings(texts)[0])


async def check_compressed_requests(subject):
    request = predict_request("half_plus_two", x=np.zeros(10_000, np.float32))
    response = await call(subject.predictions.Predict, request, compression=grpc.Compression.Gzip)
    assert set(response.outputs["y"].float_val) == {2.0}


# --- which model, version, signature, output ---


async def check_float_val(subject):
    response = await subject.predict("half_plus_two", x=np.array([1, 2, 5], np.float32))
    assert list(response.outputs) == ["y"]
    output = response.outputs["y"]
    assert list(output.float_val) == [2.5, 3, 4.5]
    assert output.dtype == tf.float32.as_datatype_enum
    assert [dim.size for dim in output.tensor_shape.dim] == [3]
    spec = response.model_spec
    assert (spec.name, spec.version.value, spec.signature_name) == ("half_plus_two", 123, "serving_default")
    assert not spec.HasField("version_label")


async def check_versions_and_labels(subject):
    for version, number, first in (
        (None, 2, 3.5),
        (1, 1, 2.5),
        (2, 2, 3.5),
        ("stable", 1, 2.5),
        ("canary", 2, 3.5),
    ):
        response = await subject.predict(("versions", version), x=np.array([1], np.float32))
        assert list(response.outputs["y"].float_val) == [first], version
        spec = response.model_spec
        assert (spec.WhichOneof("version_choice"), spec.version.value) == ("version", number)


async def check_signatures(subject):
    x = np.array([[2]], np.float32)
    response = await subject.predict("half_plus_two", "regress_x2_to_y3", inputs=x)
    assert list(response.outputs["outputs"].float_val) == [4]
    assert response.model_spec.signature_name == "regress_x2_to_y3"
    examples = [tf.train.Example(features=None).SerializeToString()]
    await refused(
        subject.predict("half_plus_two", "classify_x_to_y", inputs=examples),
        Code.INVALID_ARGUMENT,
        "Name: <unknown>, Feature: x (data type: float) is required but could not be found."
        "\n\t [[{{node ParseExample/ParseExample}}]]",
    )


async def check_signatures_without_inputs(subject):
    values = [
        (await subject.predict("counter", name, **inputs)).outputs["output"].float_val[0]
        for name, inputs in (
            ("reset_counter", {}),
            ("incr_counter", {}),
            ("incr_counter_by", {"delta": 2.5}),
            ("get_counter", {}),
        )
    ]
    assert values == [0, 1, 3.5, 3.5]


async def check_output_filter(subject):
    inputs = {"int_tensor": [1, 2], "str_tensor": ["a"]}
    assert set((await subject.predict("multi_io", **inputs)).outputs) == {"int_tensor", "str_tensor"}
    response = await subject.predict("multi_io", output_filter=["str_tensor"], **inputs)
    assert [(name, list(output.string_val)) for name, output in response.outputs.items()] == [
        ("str_tensor", [b"a"])
    ]
    outputs = "Outputs expected to be in the set {int_tensor,str_tensor}."
    for output_filter, text in (
        (["y"], f"output tensor alias not found in signature: y {outputs}"),
        (["str_tensor", "str_tensor"], "duplicate output tensor alias: str_tensor"),
    ):
        asked = subject.predict("multi_io", output_filter=output_filter, **inputs)
        await refused(asked, Code.INVALID_ARGUMENT, text)


async def check_defaults(subject):
    assert await subject.y("tf2_vocabulary", [1, 2]) == ([12, 14], 1)
    response = await subject.predict("tf2_vocabulary", x=[1.0], offset=[0.5])
    assert list(response.outputs["y"].float_val) == [2.5]


async def check_a_table_of_words(subject):
    response = await subject.predict("tf2_vocabulary", "words", sentences=["One TWO two", ""])
    assert tf.make_ndarray(response.outputs["numbers"]).tolist() == [[1, 2, 2], [-1, -1, -1]]
    assert tf.make_ndarray(response.outputs["counts"]).tolist() == [3, 0]


async def check_fields_that_change_nothing(subject):
    request = predict_request("half_plus_two", x=[1.0])
    request.predict_streamed_options.request_state = predict_pb2.PredictStreamedOptions.SPLIT
    request.client_id = b"me"
    request.request_options.max_cache_length = 7
    assert list((await call(subject.predictions.Predict, request)).outputs["y"].float_val) == [2.5]


# --- errors ---


async def check_missing_models(subject):
    for model, code, text in (
        ("absent", Code.NOT_FOUND, "Servable not found for request: Latest(absent)"),
        (("absent", 7), Code.NOT_FOUND, "Servable not found for request: Specific(absent, 7)"),
        (("versions", 3), Code.NOT_FOUND, "Servable not found for request: Specific(versions, 3)"),
        (("versions", -1), Code.NOT_FOUND, "Servable not found for request: Specific(versions, -1)"),
        (("versions", "best"), Code.INVALID_ARGUMENT, "Unrecognized servable version label: best"),
        (("absent", "best"), Code.INVALID_ARGUMENT, "Unrecognized servable version label: best"),
        ("", Code.INVALID_ARGUMENT, "ModelSpec has no name specified."),
    ):
        await refused(subject.predict(model, x=[1.0]), code, text)
    nothing = predict_pb2.PredictRequest()
    await refused(call(subject.predictions.Predict, nothing), Code.INVALID_ARGUMENT, "Missing ModelSpec")


async def check_inputs_that_do_not_fit(subject):
    template = (
        "input size does not match signature: {} len({{{}}}) != len({{x}}). Sent extra: {{{}}}. Missing but "
        "required: {{{}}}."
    )
    for model, inputs, text in (
        ("half_plus_two", {}, template.format("0!=1", "", "", "x")),
        ("half_plus_two", {"x": [1.0], "a": [1.0]}, template.format("2!=1", "a,x", "a", "")),
        (
            "half_plus_two",
            {"X": [1.0]},
            "Signature input alias: x(feed name: x:0) not found in request and no default value provided. Inputs "
            "expected to be in the request {X}, or default input alias set: ",
        ),
        (
            "tf2_vocabulary",
            {"offset": [1.0]},
            "Signature input alias: x(feed name: serving_default_x:0) not found in request and no default value "
            "provided. Inputs expected to be in the request {offset}, or default input alias set: offset",
        ),
        (
            "tf2_vocabulary",
            {"x": [1.0], "z": [1.0]},
            "Inputs contains invalid name. Used request inputs: x, request input: x,z",
        ),
        ("half_plus_two", {"x": [1]}, "Expects arg[0] to be float but int32 is provided"),
        (
            "multi_io",
            {"int_tensor": [1], "str_tensor": [1.0]},
            "Expects arg[1] to be string but float is provided",
        ),
    ):
        await refused(subject.predict(model, **inputs), Code.INVALID_ARGUMENT, text)


async def check_tensors_that_cannot_be_read(subject):
    good = as_content(np.ones(2, np.float32))
    long, short, negative, nothing = (type(good).FromString(good.SerializeToString()) for _ in range(4))
    long.tensor_content += b"\0\0\0\0"
    short.tensor_content = short.tensor_content[:4]
    negative.tensor_shape.dim[0].size = -1
    nothing.dtype = 0
    for bad in (long, short, negative, nothing):
        await refused(subject.predict("half_plus_two", x=bad), Code.INVALID_ARGUMENT, "tensor parsing error: x")


async def check_a_missing_signature(subject):
    for name, text in (
        ("nope", 'Serving signature key "nope" not found.'),
        # Texts are cut.
        ("n" * 2000, f'Serving signature key "{"n" * 1001}...TRUNCATED'),
        ("ä" * 2000, f'Serving signature key "{"ä" * 500}...TRUNCATED'),
    ):
        await refused(subject.predict("half_plus_two", name, x=[1.0]), Code.FAILED_PRECONDITION, text)
    text = 'Serving signature key "serving_default" not found.'
    await refused(subject.predict("counter", x=[1.0]), Code.FAILED_PRECONDITION, text)


async def check_an_error_of_the_model(subject):
    assert await subject.y("tf2_checked", [4, 9]) == ([2, 3], 1)
    code, text = await failure(subject.predict("tf2_checked", x=[-1.0]))
    assert code is Code.INVALID_ARGUMENT
    assert text.startswith("assertion failed: [x must not be negative."), text
    assert text.endswith("}}]]"), text


# --- time, and many at a time ---


async def check_deadlines(subject):
    def run(steps, seconds):
        return call(subject.predictions.Predict, predict_request("slow", steps=steps), seconds)

    assert list((await run(1000, SECONDS)).outputs["done"].int_val) == [1000]
    code, _ = await failure(run(200_000, 0.02))
    assert code is Code.DEADLINE_EXCEEDED
    # The next is answered all the same.
    assert list((await run(10, SECONDS)).outputs["done"].int_val) == [10]


async def check_a_cancelled_call(subject):
    start(subject.predictions.Predict, predict_request("slow", steps=50_000)).cancel()
    assert await subject.y("half_plus_two", [1]) == ([2.5], 123)


async def check_many_callers(subject):
    wrong = []

    def requests_of(caller):
        for step in range(ROUNDS):
            x = np.full(caller * 1000 + 1, step, np.float32)
            model, plus = (("half_plus_two", 2), ("half_plus_three", 3), (("versions", "stable"), 2))[step % 3]
            yield predict_request(model, x=x), x * 0.5 + plus

    def compare(response, expected):
        if tf.make_ndarray(response.outputs["y"]).tolist() != expected.tolist():
            wrong.append(response)

    def ask(caller):
        for request, expected in requests_of(caller):
            compare(subject.predictions.Predict(request, timeout=SECONDS), expected)

    async def ask_asynchronously(caller):
        for request, expected in requests_of(caller):
            compare(await subject.predictions.Predict(request, timeout=SECONDS), expected)

    if isinstance(subject.channel, grpc.aio.Channel):
        await asyncio.gather(*map(ask_asynchronously, range(CALLERS)))
    else:
        threads = [threading.Thread(target=ask, args=(caller,)) for caller in range(CALLERS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert not wrong, wrong


async def check_many_calls_in_flight(subject):
    requests = [predict_request("half_plus_two", x=[float(number)]) for number in range(100)]
    running = [start(subject.predictions.Predict, request) for request in requests]
    answers = [await answer_of(call) for call in running]
    assert [list(answer.outputs["y"].float_val) for answer in answers] == [
        [number / 2 + 2] for number in range(100)
    ]
