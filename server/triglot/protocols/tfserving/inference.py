"""Classify and Regress: examples ⇄ labels and scores, or numbers (tfs 3.3). Pure functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import Array, MessageBytes, bytes_elements
from triglot.core.types import OutputTensor
from triglot.model.signature import Signature, shape_text
from triglot.pb.tfserving import inference_pb2 as pb
from triglot.pb.tfserving import model_pb2, signature_pb2, tensor_pb2
from triglot.protocols.tfserving.codec import ModelSpec, decode_spec
from triglot.protocols.tfserving.tensor import TYPES
from triglot.protocols.wire import MessageRules, length_prefix, parse, scan, serialize

INPUTS, CLASSES, SCORES, OUTPUTS = "inputs", "classes", "scores", "outputs"
_INPUT, _EXAMPLES, _CONTEXT = 2, 1, 2
_PLAIN, _WITH_CONTEXT = 1, 2
MAX_EXAMPLES = 1024 * 1024
MAX_REPEATED_BYTES = 64 * 1024 * 1024
"""Most bytes of a context, copied into all examples, in total."""
Define = Callable[[], signature_pb2.SignatureDef]
Classes = list[tuple[bytes, float]]
"""Label and score of each class of one example."""


@dataclass(frozen=True, slots=True)
class ExamplesRequest:
    """A Classify or Regress call: serialized `tensorflow.Example` messages, each with the context merged in."""

    spec: ModelSpec | None
    examples: list[bytes]


@dataclass(frozen=True, slots=True)
class MultiRequest:
    """A MultiInference call: (model, method name) of each task, and the examples that all tasks share."""

    tasks: list[tuple[ModelSpec, str]]
    examples: list[bytes]


def decode_examples(request_class: Any, data: MessageBytes) -> ExamplesRequest:
    """Return the request of a serialized ClassificationRequest or RegressionRequest. Raise `InvalidArgument`."""
    rest, cuts = scan(data, MessageRules(cut=frozenset({_INPUT})))
    return ExamplesRequest(decode_spec(parse(request_class, rest)), _examples(cuts))


def decode_multi(data: MessageBytes) -> MultiRequest:
    """Return the request of a serialized MultiInferenceRequest. Raise `InvalidArgument`."""
    rest, cuts = scan(data, MessageRules(cut=frozenset({_INPUT})))
    message = parse(pb.MultiInferenceRequest, rest)
    tasks = [(decode_spec(task) or ModelSpec(""), task.method_name) for task in message.tasks]
    return MultiRequest(tasks, _examples(cuts))


def _examples(cuts: list[tuple[int, memoryview]]) -> list[bytes]:
    """Return an Input's serialized examples, each after the context, whose features an example may override."""
    kinds = scan(b"".join([payload for _, payload in cuts]), MessageRules(cut=frozenset({_PLAIN, _WITH_CONTEXT})))[
        1
    ]
    if not kinds:
        return []
    # The last member of a oneof counts, with all its parts.
    kind = kinds[-1][0]
    start = max([at + 1 for at, (number, _) in enumerate(kinds) if number != kind], default=0)
    joined = b"".join([payload for _, payload in kinds[start:]])
    rules = MessageRules(cut=frozenset({_EXAMPLES, _CONTEXT} if kind == _WITH_CONTEXT else {_EXAMPLES}))
    parts = scan(joined, rules, MAX_EXAMPLES)[1]
    context = b"".join([payload for number, payload in parts if number == _CONTEXT])
    examples = [payload for number, payload in parts if number == _EXAMPLES]
    if len(context) * len(examples) > MAX_REPEATED_BYTES:
        raise InvalidArgument(
            f"a context of {len(context)} bytes is too large to repeat for {len(examples)} examples"
        )
    return [b"".join([context, payload]) for payload in examples]


def encode_examples(spec: model_pb2.ModelSpec, examples: Sequence[bytes]) -> bytes:
    """Return a serialized ClassificationRequest or RegressionRequest; they have the same fields."""
    listed = b"".join([length_prefix(_EXAMPLES, len(example)) + example for example in examples])
    kind = length_prefix(_PLAIN, len(listed)) + listed
    return serialize(pb.ClassificationRequest(model_spec=spec)) + length_prefix(_INPUT, len(kind)) + kind


def check_examples(examples: Sequence[bytes]) -> None:
    """Raise `InvalidArgument` if there are none."""
    if not examples:
        raise InvalidArgument("Input is empty.")


def classify_outputs(signature: Signature, define: Define) -> list[str]:
    """Return the outputs to request. Raise `InvalidArgument` for a signature that cannot classify."""
    _check_one_input(signature)
    if len(signature.outputs) not in (1, 2):
        raise InvalidArgument(f"Expected one or two output Tensors, found {len(signature.outputs)}")
    _check_input_name(signature, "classification", define)
    names = [name for name in (CLASSES, SCORES) if name in signature.output_rules]
    if not names:
        raise InvalidArgument(
            f'Expected classification signature outputs to contain at least one of "{CLASSES}" or "{SCORES}". '
            f"Signature was: {define()}"
        )
    return names


def regress_outputs(signature: Signature, define: Define) -> list[str]:
    """Return the output to request. Raise `InvalidArgument` for a signature that cannot regress."""
    _check_one_input(signature)
    if len(signature.outputs) != 1:
        raise InvalidArgument("Expected one output Tensor.")
    _check_input_name(signature, "regression", define)
    if OUTPUTS not in signature.output_rules:
        raise InvalidArgument(f"No regression outputs found in SignatureDef: {define()}")
    return [OUTPUTS]


def _check_one_input(signature: Signature) -> None:
    if len(signature.inputs) != 1:
        raise InvalidArgument("Expected one input Tensor.")


def _check_input_name(signature: Signature, kind: str, define: Define) -> None:
    if INPUTS not in signature.input_rules:
        raise InvalidArgument(f"No {kind} inputs found in SignatureDef: {define()}")


def _type_error(what: str, wanted: str, output: OutputTensor, gap: str = " ") -> InvalidArgument:
    return InvalidArgument(
        f"Expected {what} of {wanted}.{gap}Got: {tensor_pb2.DataType.Name(TYPES[output.datatype])}"
    )


def classifications(outputs: Sequence[OutputTensor], count: int) -> list[Classes]:
    """Return the classes of each of `count` examples. Raise `InvalidArgument` for outputs that do not fit."""
    by_name = {output.name: output for output in outputs}
    classes, scores = by_name.get(CLASSES), by_name.get(SCORES)
    for name, output, datatype, type_text in (
        (CLASSES, classes, "BYTES", "DT_STRING"),
        (SCORES, scores, "FP32", "DT_FLOAT"),
    ):
        if output is not None:
            _check_classes(name, output, datatype, type_text, count)
    if classes is not None and scores is not None and classes.array.shape[1] != scores.array.shape[1]:
        raise InvalidArgument(
            "Tensors class and score should match in dim_size(1). Got "
            f"{classes.array.shape[1]} vs. {scores.array.shape[1]}"
        )
    width = (classes or scores or outputs[0]).array.shape[1]
    labels = [b""] * (count * width) if classes is None else bytes_elements(classes.array)
    values = [0.0] * (count * width) if scores is None else scores.array.ravel().tolist()
    pairs = list(zip(labels, values, strict=True))
    return [pairs[at * width : (at + 1) * width] for at in range(count)]


def _check_classes(name: str, output: OutputTensor, datatype: str, type_text: str, count: int) -> None:
    shape = output.array.shape
    if len(shape) != 2:
        raise InvalidArgument(f"Expected Tensor shape: [batch_size num_classes] but got {shape_text(shape)}")
    if output.datatype != datatype:
        raise _type_error(f"{name} Tensor", type_text, output)
    if shape[0] != count:
        raise InvalidArgument(f"Expected {name} output batch size of {count}. Got: {shape[0]}")


def regressions(outputs: Sequence[OutputTensor], count: int) -> Array:
    """Return a number for each of `count` examples: FP32, of shape [count].

    Raise `InvalidArgument` for an output that does not fit.
    """
    output = outputs[0]
    shape = output.array.shape
    if len(shape) != 1 and (len(shape) != 2 or shape[1] != 1):
        raise InvalidArgument(
            "Expected output Tensor shape to be either [batch_size] or [batch_size, 1] but got "
            f"{shape_text(shape)}"
        )
    if shape[0] != count:
        raise InvalidArgument(f"Input batch size did not match output batch size: {count} vs. {shape[0]}")
    if output.datatype != "FP32":
        raise _type_error("output Tensor", "DT_FLOAT", output, "  ")
    return output.array.reshape(-1)


def classification_message(examples: Sequence[Classes]) -> pb.ClassificationResult:
    """Return the result message; bytes of a label that are not UTF-8 are replaced."""
    message = pb.ClassificationResult()
    for classes in examples:
        added = message.classifications.add()
        for label, score in classes:
            added.classes.add(label=label.decode(errors="replace"), score=score)
    return message


def regression_message(values: Array) -> pb.RegressionResult:
    """Return the result message; `values` is FP32, of shape [examples]."""
    message = pb.RegressionResult()
    for value in values.tolist():
        message.regressions.add(value=value)
    return message
