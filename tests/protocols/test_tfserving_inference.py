"""Classify, Regress and MultiInference: examples as they come, and what may be made of outputs (tfs 3.3, 3.4)."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.wire_bytes import UNKNOWN_FIELDS, field, fixed64_field, group, varint_field
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, Array, datatype_of, object_array
from triglot.core.types import OutputTensor, TensorSpec
from triglot.model.signature import Signature
from triglot.pb.tfserving import example_pb2
from triglot.pb.tfserving import inference_pb2 as pb
from triglot.protocols.tfserving.codec import ModelSpec
from triglot.protocols.tfserving.inference import (
    MAX_REPEATED_BYTES,
    ExamplesRequest,
    check_examples,
    classification_message,
    classifications,
    classify_outputs,
    decode_examples,
    decode_multi,
    regress_outputs,
    regression_message,
    regressions,
)
from triglot.protocols.tfserving.service import signature_def
from triglot.protocols.wire import MAX_FIELDS

SPEC = field(1, field(1, "m") + field(3, "s"))
REQUESTS = [pb.ClassificationRequest, pb.RegressionRequest]
DECODERS: list[Any] = [decode_multi, *[partial(decode_examples, request) for request in REQUESTS]]


def example(**features: float) -> bytes:
    """A serialized Example of single floats."""
    message = example_pb2.Example()
    for name, value in features.items():
        message.features.feature[name].float_list.value.append(value)
    return message.SerializeToString()


def examples_of(data: bytes) -> list[bytes]:
    """The examples of a serialized Input, the same for all three calls."""
    single = [decode_examples(request, field(2, data)).examples for request in REQUESTS]
    assert single == [decode_multi(field(2, data)).examples] * 2
    return single[0]


def plain(*examples: bytes | str) -> bytes:
    """An Input of a plain list."""
    return field(1, b"".join(field(1, example) for example in examples))


def with_context(context: bytes | str, *examples: bytes | str) -> bytes:
    return field(2, b"".join(field(1, example) for example in examples) + field(2, context))


@pytest.mark.parametrize("request_class", REQUESTS)
def test_requests(request_class: Any) -> None:
    first, two = example(x=1), example(x=2)
    message = request_class(model_spec={"name": "m", "version": {"value": 7}})
    for data in (first, two):
        message.input.example_list.examples.add().ParseFromString(data)
    request = decode_examples(request_class, message.SerializeToString())
    assert request == ExamplesRequest(ModelSpec("m", 7), [first, two])
    assert decode_examples(request_class, b"") == ExamplesRequest(None, [])
    assert decode_examples(request_class, field(1, "")) == ExamplesRequest(ModelSpec(""), [])


def test_tasks() -> None:
    message = pb.MultiInferenceRequest()
    message.tasks.add(model_spec={"name": "m", "version_label": "stable", "signature_name": "s"}, method_name="a")
    message.tasks.add(method_name="b")
    message.input.example_list.examples.add().ParseFromString(example(x=1))
    request = decode_multi(message.SerializeToString())
    assert request.tasks == [(ModelSpec("m", None, "stable", "s"), "a"), (ModelSpec(""), "b")]
    assert request.examples == [example(x=1)]
    assert (decode_multi(b"").tasks, decode_multi(b"").examples) == ([], [])


def test_the_context_is_part_of_each_example() -> None:
    """And what both have is the example's, for that is how messages are merged."""
    merged = examples_of(with_context(example(x=9, c=3), example(x=1), example(y=2)))
    features = [example_pb2.Example.FromString(serialized).features.feature for serialized in merged]
    values = [
        {name: list(feature.float_list.value) for name, feature in example_features.items()}
        for example_features in features
    ]
    assert values == [{"x": [1], "c": [3]}, {"x": [9], "c": [3], "y": [2]}]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"", []),
        (plain(), []),
        (plain("", "a"), [b"", b"a"]),
        (with_context("", "a", "b"), [b"a", b"b"]),
        (field(2, field(1, "a")), [b"a"]),
        (with_context("c"), []),
        (with_context("c", "", "b"), [b"c", b"cb"]),
        # The context may come in parts, and anywhere.
        (field(2, field(2, "c") + field(1, "a") + field(2, "d") + field(1, "b")), [b"cda", b"cdb"]),
        (field(2, field(2, "c")) + with_context("d", "a"), [b"cda"]),
        # So may the list.
        (plain("a") + plain("b"), [b"a", b"b"]),
        (plain("a") + field(1, "") + group(9, field(1, "no")) + plain("b"), [b"a", b"b"]),
        # Of the two lists, the last one counts, and nothing of it that was said before the other one.
        (plain("a") + with_context("c", "b"), [b"cb"]),
        (with_context("c", "b") + plain("a"), [b"a"]),
        (plain("a") + with_context("c", "b") + plain("d"), [b"d"]),
        (with_context("c", "b") + plain("a") + with_context("d", "e") + with_context("", "f"), [b"de", b"df"]),
        (with_context("c", "b") + field(1, ""), []),
        # What is not known is not an example.
        (field(1, field(2, "c") + field(1, "a")), [b"a"]),
        (varint_field(1, 1) + plain("a") + fixed64_field(2) + varint_field(2, 7), [b"a"]),
        (field(1, varint_field(1, 1) + field(1, "a") + group(3, field(1, "no"))), [b"a"]),
    ],
)
def test_lists_of_examples(data: bytes, expected: list[bytes]) -> None:
    assert examples_of(data) == expected
    assert examples_of(varint_field(9, 1) + data) == expected


def test_an_input_in_parts() -> None:
    data = field(2, plain("a")) + SPEC + field(2, plain("b")) + field(2, with_context("c")) + field(2, "")
    assert decode_examples(pb.RegressionRequest, data).examples == []
    data += field(2, with_context("d", "e"))
    assert decode_examples(pb.RegressionRequest, data) == ExamplesRequest(
        ModelSpec("m", None, None, "s"), [b"cde"]
    )


@given(st.lists(st.binary(max_size=20), max_size=4), st.none() | st.binary(max_size=20), UNKNOWN_FIELDS)
def test_examples_are_passed_on_as_they_are(examples: list[bytes], context: bytes | None, unknown: bytes) -> None:
    """Whether they are any is the model's business."""
    if context is None:
        assert examples_of(unknown + plain(*examples)) == examples
    else:
        assert examples_of(with_context(context, *examples) + unknown) == [
            context + example for example in examples
        ]


@pytest.mark.parametrize(
    "data",
    [field(1, "?"), field(2, "?"), field(2, field(1, "?")), field(2, field(2, "\x0a\x05")), b"\x12", b"\x80"],
)
def test_bytes_that_are_no_request(data: bytes) -> None:
    for decode in DECODERS:
        with pytest.raises(InvalidArgument, match="not a valid"):
            decode(SPEC + data)


@given(st.binary(max_size=100) | st.binary(max_size=100).map(lambda data: field(2, field(2, data))))
def test_any_bytes_decode_or_are_refused(data: bytes) -> None:
    for decode in DECODERS:
        try:
            decode(data)
        except InvalidArgument:
            pass


def test_many_examples() -> None:
    count = MAX_FIELDS + 8
    assert len(examples_of(plain(*["a"] * count))) == count


def test_the_number_of_inputs_is_bounded() -> None:
    with pytest.raises(InvalidArgument, match=f"more than {MAX_FIELDS} protobuf fields"):
        examples_of(field(1, "") * (MAX_FIELDS + 1))


def test_what_a_context_adds_is_bounded() -> None:
    context, most = bytes(1024 * 1024), MAX_REPEATED_BYTES // (1024 * 1024)
    assert sum(map(len, examples_of(with_context(context, *[""] * most)))) == MAX_REPEATED_BYTES
    with pytest.raises(
        InvalidArgument, match=f"^a context of 1048576 bytes is too large to repeat for {most + 1} examples$"
    ):
        examples_of(with_context(context, *[""] * (most + 1)))


def test_no_examples() -> None:
    with pytest.raises(InvalidArgument, match=r"^Input is empty\.$"):
        check_examples([])
    check_examples([b""])


def signature(inputs: str, outputs: str) -> Signature:
    specs = [[TensorSpec(name, "FP32", [-1]) for name in names.split()] for names in (inputs, outputs)]
    return Signature(specs[0], specs[1])


CLASSIFY, REGRESS = ("classification", classify_outputs), ("regression", regress_outputs)


def refused(call: Any, inputs: str, outputs: str) -> str:
    bound = signature(inputs, outputs)
    with pytest.raises(InvalidArgument) as caught:
        call[1](bound, lambda: signature_def("s", bound, {}))
    text = caught.value.message
    assert text.endswith(f": {signature_def('s', bound, {})}"[:4096]) == (
        ": inputs {" in text or ": outputs {" in text
    )
    return text.split(": inputs {")[0]


@pytest.mark.parametrize(
    ("outputs", "wanted"),
    [
        ("classes scores", ["classes", "scores"]),
        ("scores classes", ["classes", "scores"]),
        ("scores", ["scores"]),
        ("classes", ["classes"]),
        ("scores other", ["scores"]),
    ],
)
def test_signatures_that_classify(outputs: str, wanted: list[str]) -> None:
    bound = signature("inputs", outputs)
    assert classify_outputs(bound, lambda: signature_def("s", bound, {})) == wanted


def test_signatures_that_regress() -> None:
    bound = signature("inputs", "outputs")
    assert regress_outputs(bound, lambda: signature_def("s", bound, {})) == ["outputs"]


@pytest.mark.parametrize(
    ("call", "inputs", "outputs", "text"),
    [
        (CLASSIFY, "", "no", "Expected one input Tensor."),
        (CLASSIFY, "inputs more", "a b c", "Expected one input Tensor."),
        (CLASSIFY, "inputs", "", "Expected one or two output Tensors, found 0"),
        (CLASSIFY, "x", "classes scores more", "Expected one or two output Tensors, found 3"),
        (CLASSIFY, "x", "no", "No classification inputs found in SignatureDef"),
        (
            CLASSIFY,
            "inputs",
            "outputs",
            "Expected classification signature outputs to contain at least one of "
            '"classes" or "scores". Signature was',
        ),
        (REGRESS, "", "no", "Expected one input Tensor."),
        (REGRESS, "inputs more", "a b", "Expected one input Tensor."),
        (REGRESS, "inputs", "", "Expected one output Tensor."),
        (REGRESS, "x", "outputs more", "Expected one output Tensor."),
        (REGRESS, "x", "no", "No regression inputs found in SignatureDef"),
        (REGRESS, "inputs", "no", "No regression outputs found in SignatureDef"),
    ],
)
def test_signatures_that_are_for_something_else(call: Any, inputs: str, outputs: str, text: str) -> None:
    assert refused(call, inputs, outputs) == text


def output(name: str, array: Array) -> OutputTensor:
    return OutputTensor(name, datatype_of(array), array)


def labels(*rows: list[bytes]) -> OutputTensor:
    return output("classes", object_array([label for row in rows for label in row], (len(rows), len(rows[0]))))


def scores(*rows: list[float]) -> OutputTensor:
    return output("scores", np.array(rows, "f4"))


def test_classes_and_scores() -> None:
    two, values = labels([b"a", b"b"], [b"", b"\xff"]), scores([0.5, 0], [-1, 2])
    expected = [[(b"a", 0.5), (b"b", 0.0)], [(b"", -1.0), (b"\xff", 2.0)]]
    assert classifications([two, values], 2) == classifications([values, two], 2) == expected
    assert classifications([two], 2) == [[(b"a", 0.0), (b"b", 0.0)], [(b"", 0.0), (b"\xff", 0.0)]]
    assert classifications([values], 2) == [[(b"", 0.5), (b"", 0.0)], [(b"", -1.0), (b"", 2.0)]]
    assert classifications([scores([], [], [])], 3) == [[], [], []]
    text = output("classes", np.array([["é", "b"]]))
    assert classifications([text], 1) == [[("é".encode(), 0.0), (b"b", 0.0)]]


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([output("scores", np.ones(2, "f8"))], "[batch_size num_classes] but got [2]"),
        ([output("classes", np.ones((), "f4"))], "[batch_size num_classes] but got []"),
        ([labels([b""]), output("scores", np.ones((1, 2, 3), "f4"))], "[batch_size num_classes] but got [1,2,3]"),
    ],
)
def test_classes_of_another_rank(outputs: list[OutputTensor], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        classifications(outputs, 2 if len(outputs) == 1 else 1)
    assert caught.value.message == f"Expected Tensor shape: {text}"


@pytest.mark.parametrize(
    ("outputs", "text"),
    [
        ([output("classes", np.ones((1, 2), "f4"))], "Expected classes Tensor of DT_STRING. Got: DT_FLOAT"),
        ([output("scores", np.ones((1, 2), "f8"))], "Expected scores Tensor of DT_FLOAT. Got: DT_DOUBLE"),
        ([labels([b""])], "Expected classes output batch size of 2. Got: 1"),
        ([labels([b""], [b""]), scores([1], [1], [1])], "Expected scores output batch size of 2. Got: 3"),
        (
            [labels([b""], [b""]), scores([1, 2], [1, 2])],
            "Tensors class and score should match in dim_size(1). Got 1 vs. 2",
        ),
        ([scores([1]), labels([b""])], "Expected classes output batch size of 2. Got: 1"),
    ],
)
def test_classes_that_do_not_fit(outputs: list[OutputTensor], text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        classifications(outputs, 2)
    assert caught.value.message == text


@pytest.mark.parametrize("shape", [(3,), (3, 1)])
def test_numbers(shape: tuple[int, ...]) -> None:
    assert regressions([output("outputs", np.arange(3, dtype="f4").reshape(shape))], 3).tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("shape", "datatype", "text"),
    [
        ((), "FP64", "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got []"),
        (
            (3, 2),
            "FP32",
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got [3,2]",
        ),
        (
            (3, 1, 1),
            "FP32",
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got [3,1,1]",
        ),
        ((2, 1), "FP64", "Input batch size did not match output batch size: 3 vs. 2"),
        ((3, 1), "FP64", "Expected output Tensor of DT_FLOAT.  Got: DT_DOUBLE"),
        ((3,), "FP16", "Expected output Tensor of DT_FLOAT.  Got: DT_HALF"),
    ],
)
def test_numbers_that_do_not_fit(shape: tuple[int, ...], datatype: str, text: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        regressions([output("outputs", np.ones(shape, DATATYPES[datatype].dtype))], 3)
    assert caught.value.message == text


def test_results_as_messages() -> None:
    result = classification_message([[(b"a", 0.5), ("é".encode(), 0.0)], [(b"a\xff", float("inf"))], []])
    classes = [
        [(classified.label, classified.score) for classified in row.classes] for row in result.classifications
    ]
    assert classes == [[("a", 0.5), ("é", 0.0)], [("a\ufffd", float("inf"))], []]
    numbers = regression_message(np.array([0, 1.5, float("-inf")], "f4"))
    assert [regression.value for regression in numbers.regressions] == [0, 1.5, float("-inf")]
