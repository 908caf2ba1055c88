"""Checks of Classify, Regress and MultiInference with TensorFlow Serving's client."""

import struct

from tensorflow_serving.apis import classification_pb2, inference_pb2, regression_pb2
from tfs_subject import Code, call, failure, multi_request, refused

NODE = "\n\t [[{{node ParseExample/ParseExample}}]]"


def float32(value):
    """The float32 next to a number."""
    return struct.unpack("f", struct.pack("f", value))[0]


def classes_of(result):
    """The labels and scores of each example."""
    return [[(item.label, item.score) for item in classes.classes] for classes in result.classifications]


def values_of(result):
    return [regression.value for regression in result.regressions]


def spec_of_answer(response):
    spec = response.model_spec
    return spec.name, spec.version.value, spec.signature_name


async def check_classify(subject):
    response = await subject.classify("labels", "", {"x": 0.25}, {"x": 1.0})
    assert classes_of(response.result) == [[("low", 0.75), ("high", 0.25)], [("low", 0.0), ("high", 1.0)]]
    assert spec_of_answer(response) == ("labels", 1, "serving_default")


async def check_classify_with_scores_or_labels_alone(subject):
    response = await subject.classify("labels", "scores", {"x": 0.25})
    assert classes_of(response.result) == [[("", 0.75), ("", 0.25)]]
    response = await subject.classify("labels", "classes", {"x": 0.25}, {"x": 0.75})
    assert classes_of(response.result) == [[("low", 0.0)], [("high", 0.0)]]
    response = await subject.classify("half_plus_two", "classify_x_to_y", {"x": 1.0}, {"x": 0.2})
    assert classes_of(response.result) == [[("", 2.5)], [("", float32(2.1))]]


async def check_regress(subject):
    response = await subject.regress("half_plus_two", "regress_x_to_y", {"x": 1.0}, {"x": 5.0, "other": b"?"})
    assert values_of(response.result) == [2.5, 4.5]
    assert spec_of_answer(response) == ("half_plus_two", 123, "regress_x_to_y")
    name = "tensorflow/serving/regress"
    response = await subject.regress(("half_plus_three", 123), name, {"x": 1.0}, {"x": 2.0})
    assert values_of(response.result) == [3.5, 4]
    assert spec_of_answer(response) == ("half_plus_three", 123, name)
    assert values_of((await subject.regress("labels", "regress", {"x": 0.5})).result) == [0.5]


async def check_context(subject):
    """It is part of every example, which may say otherwise."""
    response = await subject.regress("half_plus_two", "regress_x_to_y", {"x": 1.0}, {}, {"y": 2.0}, x=9.0)
    assert values_of(response.result) == [2.5, 6.5, 6.5]
    response = await subject.classify("labels", "scores", {}, x=0.25)
    assert classes_of(response.result) == [[("", 0.75), ("", 0.25)]]


async def check_many_examples(subject):
    examples = [{"x": float(number)} for number in range(10_000)]
    response = await subject.regress("half_plus_two", "regress_x_to_y", *examples)
    assert values_of(response.result) == [number / 2 + 2 for number in range(10_000)]


async def check_nothing_to_classify_or_regress(subject):
    for nothing in (
        subject.regress("half_plus_two", "regress_x_to_y"),
        subject.regress("half_plus_two", "regress_x_to_y", x=1.0),
        subject.classify("labels", ""),
    ):
        await refused(nothing, Code.INVALID_ARGUMENT, "Input is empty.")
    request = regression_pb2.RegressionRequest()
    await refused(call(subject.predictions.Regress, request), Code.INVALID_ARGUMENT, "Missing ModelSpec")
    request.model_spec.name = "half_plus_two"
    request.model_spec.signature_name = "regress_x_to_y"
    await refused(call(subject.predictions.Regress, request), Code.INVALID_ARGUMENT, "Input is empty.")


async def check_examples_that_do_not_fit(subject):
    key = "Name: <unknown>, Key: x, Index: 1.  "
    for bad, text in (
        ({"x": 1}, f"{key}Data types don't match. Data type: int64 but expected type: float"),
        ({"a": 1.0}, "Name: <unknown>, Feature: x (data type: float) is required but could not be found."),
        ({"x": [1.0, 2.0]}, f"{key}Number of float values != expected.  Values size: 2 but output shape: [1]"),
    ):
        asked = subject.regress("half_plus_two", "regress_x_to_y", {"x": 1.0}, bad)
        await refused(asked, Code.INVALID_ARGUMENT, text + NODE)


async def check_signatures_that_do_not_fit(subject):
    single = {"x": 1.0}
    flat = "Expected Tensor shape: [batch_size num_classes] but got [1]"
    for asked, text in (
        (subject.classify("labels", "nope", single), "No signature was found with the name: nope"),
        (subject.regress("labels", "nope", single), "No signature was found with the name: nope"),
        (subject.classify("labels", "flat", single), flat),
        (subject.regress("labels", "", single), "Expected one output Tensor."),
        (subject.classify("multi_io", "", single), "Expected one input Tensor."),
    ):
        await refused(asked, Code.INVALID_ARGUMENT, text)
    for asked in (subject.classify("absent", "", single), subject.regress("absent", "", single)):
        await refused(asked, Code.NOT_FOUND, "Servable not found for request: Latest(absent)")


async def check_a_classification_that_regresses(subject):
    """The signature's own method is not asked for: what counts are its tensors."""
    code, text = await failure(subject.classify("half_plus_two", "regress_x_to_y", {"x": 1.0}))
    start = 'Expected classification signature outputs to contain at least one of "classes" or "scores".'
    assert (code, text[: len(start)]) == (Code.INVALID_ARGUMENT, start), text


# --- MultiInference ---


async def multi(subject, tasks, *examples):
    return await call(subject.predictions.MultiInference, multi_request(tasks, *examples))


async def check_multi_inference(subject):
    tasks = [
        ("half_plus_two", "regress_x_to_y2", "regress"),
        ("half_plus_two", "classify_x_to_y", "classify"),
        ("half_plus_two", "regress_x_to_y", "regress"),
    ]
    first, second, third = (await multi(subject, tasks, {"x": 1.0}, {"x": 3.0})).results
    assert values_of(first.regression_result) == [3.5, 4.5]
    assert classes_of(second.classification_result) == [[("", 2.5)], [("", 3.5)]]
    assert values_of(third.regression_result) == [2.5, 3.5]
    assert [spec_of_answer(result) for result in (first, second, third)] == [
        ("half_plus_two", 123, signature) for _, signature, _ in tasks
    ]


async def check_multi_inference_of_a_version(subject):
    (result,) = (await multi(subject, [(("versions", 1), "regress_x_to_y", "regress")], {"x": 1.0})).results
    assert (values_of(result.regression_result), result.model_spec.version.value) == ([2.5], 1)


async def check_what_multi_inference_refuses(subject):
    good = ("half_plus_two", "regress_x_to_y", "regress")
    for tasks, code, text in (
        ([good, good], Code.INVALID_ARGUMENT, "Duplicate evaluation of signature: regress_x_to_y"),
        (
            [good, ("half_plus_three", "", "regress")],
            Code.INVALID_ARGUMENT,
            "All ModelSpecs in a MultiInferenceRequest must access the same model name.",
        ),
        ([good, ("", "", "regress")], Code.INVALID_ARGUMENT, "Found ModelSpec with an empty model name."),
        (
            [("half_plus_two", "nope", "regress")],
            Code.INVALID_ARGUMENT,
            "Requested signature not found in model graph: nope",
        ),
        (
            [("half_plus_two", "", "predict")],
            Code.UNIMPLEMENTED,
            "Unsupported signature method_name: tensorflow/serving/predict",
        ),
        ([("absent", "", "regress")], Code.NOT_FOUND, "Servable not found for request: Latest(absent)"),
    ):
        await refused(multi(subject, tasks, {"x": 1.0}), code, text)
    await refused(multi(subject, [good]), Code.INVALID_ARGUMENT, "Input is empty.")
    # One task that fails is enough.
    asked = multi(subject, [good, ("half_plus_two", "regress_x2_to_y3", "regress")], {"x": 1.0})
    await refused(asked, Code.INVALID_ARGUMENT, "Expects arg[0] to be float but string is provided")
    request = inference_pb2.MultiInferenceRequest()
    await refused(
        call(subject.predictions.MultiInference, request),
        Code.INVALID_ARGUMENT,
        "ModelSpec has no name specified.",
    )


async def check_classify_without_a_model_name(subject):
    request = classification_pb2.ClassificationRequest(model_spec={"version_label": "stable"})
    await refused(
        call(subject.predictions.Classify, request), Code.INVALID_ARGUMENT, "ModelSpec has no name specified."
    )
