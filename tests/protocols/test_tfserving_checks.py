"""What is checked of a Predict call, in TensorFlow Serving's words (tfs 3.2), and signatures as messages."""

from __future__ import annotations

import numpy as np
import pytest

from tests.protocols.wire_bytes import PADDING
from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, object_array
from triglot.core.types import TensorSpec
from triglot.model.signature import Signature
from triglot.pb.tfserving import predict_pb2, signature_pb2
from triglot.pb.tfserving import tensor_pb2 as pb
from triglot.protocols.tfserving.codec import decode_predict
from triglot.protocols.tfserving.service import check_predict, signature_def, signature_def_map
from triglot.protocols.tfserving.tensor import TYPES

FLOATS = pb.TensorProto(dtype=pb.DT_FLOAT, tensor_shape={"dim": [{"size": 1}]}, float_val=[2])
STRING = pb.TensorProto(dtype=pb.DT_STRING, string_val=[b"a"])
BAD = pb.TensorProto(dtype=pb.DT_FLOAT, tensor_shape={"dim": [{"size": 3}]}, tensor_content=bytes(4))


def spec(name: str, datatype: str = "FP32") -> TensorSpec:
    return TensorSpec(name, datatype, [-1])


ONE = Signature([spec("x")], [spec("y"), spec("b"), spec("a")])
TWO = Signature([spec("x"), spec("k", "BYTES")], [spec("y")])
OPTIONAL = Signature(
    [spec("x"), spec("k"), spec("d")], [spec("y")], defaults={"k": np.ones(1, "f4"), "d": np.ones(1, "f4")}
)
NONE = Signature([], [spec("y")])


def check(signature: Signature, inputs: dict[str, pb.TensorProto], *output_filter: str) -> None:
    """Check a request that has come over the wire, in both ways of reading it."""
    message = predict_pb2.PredictRequest(inputs=inputs, output_filter=output_filter)
    texts = []
    for data in (message.SerializeToString(), message.SerializeToString() + PADDING):
        try:
            check_predict(decode_predict(data), signature, lambda: signature_def("s", signature, {}))
            texts.append("")
        except InvalidArgument as error:
            texts.append(error.message)
    assert texts[0] == texts[1]
    if texts[0]:
        raise InvalidArgument(texts[0])


def refusal(signature: Signature, inputs: dict[str, pb.TensorProto], *output_filter: str) -> str:
    with pytest.raises(InvalidArgument) as caught:
        check(signature, inputs, *output_filter)
    return caught.value.message


def of_type(dtype: pb.DataType | str, *shape: int) -> pb.TensorProto:
    return pb.TensorProto(dtype=dtype, tensor_shape={"dim": [{"size": dim} for dim in shape]})


def test_requests_that_fit() -> None:
    check(ONE, {"x": FLOATS})
    check(ONE, {"x": FLOATS}, "a", "y", "b")
    check(TWO, {"x": FLOATS, "k": STRING}, "y")
    check(NONE, {})
    for names in ("x", "xk", "xd", "dkx"):
        check(OPTIONAL, dict.fromkeys(names, FLOATS))


def test_shapes_are_not_looked_at() -> None:
    for shape in ((), (0,), (2, 3), (1,) * 32):
        check(ONE, {"x": of_type(pb.DT_FLOAT, *shape)})


SIZES = [
    (ONE, "", "0!=1 len({}) != len({x}). Sent extra: {}. Missing but required: {x}."),
    (ONE, "ba", "2!=1 len({a,b}) != len({x}). Sent extra: {a,b}. Missing but required: {x}."),
    (ONE, "xa", "2!=1 len({a,x}) != len({x}). Sent extra: {a}. Missing but required: {}."),
    (TWO, "x", "1!=2 len({x}) != len({k,x}). Sent extra: {}. Missing but required: {k}."),
    (TWO, "z", "1!=2 len({z}) != len({k,x}). Sent extra: {z}. Missing but required: {k,x}."),
    (NONE, "x", "1!=0 len({x}) != len({}). Sent extra: {x}. Missing but required: {}."),
    (OPTIONAL, "xabc", "4!=3 len({a,b,c,x}) != len({d,k,x}). Sent extra: {a,b,c}. Missing but required: {d,k}."),
]


@pytest.mark.parametrize(("signature", "names", "text"), SIZES)
def test_numbers_of_inputs(signature: Signature, names: str, text: str) -> None:
    # Whether the tensors can be read does not matter yet, nor what is asked for.
    for tensor in (FLOATS, BAD):
        inputs = dict.fromkeys(names, tensor)
        assert refusal(signature, inputs, "no") == f"input size does not match signature: {text}"


@pytest.mark.parametrize(
    ("signature", "names", "text"),
    [
        (ONE, "z", "x(feed name: x:0) not found {}{z}, or default input alias set: "),
        (TWO, "za", "k(feed name: k:0) not found {}{a,z}, or default input alias set: "),
        (TWO, "xz", "k(feed name: k:0) not found {}{x,z}, or default input alias set: "),
        (OPTIONAL, "kd", "x(feed name: x:0) not found {}{d,k}, or default input alias set: d,k"),
        (OPTIONAL, "", "x(feed name: x:0) not found {}{}, or default input alias set: d,k"),
    ],
)
def test_inputs_that_are_missing(signature: Signature, names: str, text: str) -> None:
    between = "in request and no default value provided. Inputs expected to be in the request "
    expected = f"Signature input alias: {text.replace('{}', between, 1)}"
    assert refusal(signature, dict.fromkeys(names, FLOATS), "no") == expected


def test_unknown_inputs() -> None:
    assert refusal(OPTIONAL, {"x": FLOATS, "z": BAD, "a": FLOATS}, "no") == (
        "Inputs contains invalid name. Used request inputs: x, request input: a,x,z"
    )
    assert refusal(OPTIONAL, {"x": FLOATS, "k": FLOATS, "a": FLOATS}) == (
        "Inputs contains invalid name. Used request inputs: k,x, request input: a,k,x"
    )


@pytest.mark.parametrize("tensor", [BAD, pb.TensorProto(float_val=[2]), of_type(pb.DT_FLOAT, -1)])
def test_tensors_that_cannot_be_read(tensor: pb.TensorProto) -> None:
    assert refusal(ONE, {"x": tensor}, "no") == "tensor parsing error: x"
    assert refusal(TWO, {"x": tensor, "k": FLOATS}) == "tensor parsing error: x"
    assert refusal(OPTIONAL, {"x": FLOATS, "k": tensor}) == "tensor parsing error: k"


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["no"], "output tensor alias not found in signature: no Outputs expected to be in the set {a,b,y}."),
        (["y", ""], "output tensor alias not found in signature:  Outputs expected to be in the set {a,b,y}."),
        (["y", "y"], "duplicate output tensor alias: y"),
        (["a", "y", "b", "a", "no"], "duplicate output tensor alias: a"),
        (
            ["a", "no", "a"],
            "output tensor alias not found in signature: no Outputs expected to be in the set {a,b,y}.",
        ),
    ],
)
def test_outputs_that_cannot_be_asked_for(names: list[str], text: str) -> None:
    assert refusal(ONE, {"x": FLOATS}, *names) == text
    # The types come after it.
    assert refusal(ONE, {"x": STRING}, *names) == text


NAMES = {
    "FLOAT": "float",
    "DOUBLE": "double",
    "INT32": "int32",
    "UINT8": "uint8",
    "INT16": "int16",
    "INT8": "int8",
    "STRING": "string",
    "COMPLEX64": "complex64",
    "INT64": "int64",
    "BOOL": "bool",
    "HALF": "half",
    "BFLOAT16": "bfloat16",
    "UINT16": "uint16",
    "COMPLEX128": "complex128",
    "UINT32": "uint32",
    "UINT64": "uint64",
    "QINT8": "qint8",
    "QUINT8": "quint8",
    "QINT16": "qint16",
    "QUINT16": "quint16",
    "QINT32": "qint32",
}


@pytest.mark.parametrize("datatype", DATATYPES)
def test_types(datatype: str) -> None:
    signature = Signature([spec("x", datatype)], [spec("y")])
    wanted = NAMES[pb.DataType.Name(TYPES[datatype]).removeprefix("DT_")]
    for name in {*NAMES, "RESOURCE", "VARIANT", "FLOAT8_E5M2", "INT4"}:
        sent = NAMES.get(name, name.lower())
        inputs = {"x": of_type(f"DT_{name}", 1)}
        if sent == wanted:
            check(signature, inputs)
        else:
            assert refusal(signature, inputs) == f"Expects arg[0] to be {wanted} but {sent} is provided"


def test_the_first_argument_of_another_type_is_named() -> None:
    names = [f"x{at}" for at in range(9)]
    signature = Signature([spec(name) for name in reversed(names)], [spec("y")])
    inputs = dict.fromkeys(names, FLOATS) | dict.fromkeys(names[4:], STRING)
    assert refusal(signature, inputs) == "Expects arg[4] to be float but string is provided"
    assert refusal(TWO, {"x": STRING, "k": STRING}) == "Expects arg[1] to be float but string is provided"
    assert refusal(TWO, {"x": STRING, "k": FLOATS}) == "Expects arg[0] to be string but float is provided"
    # Inputs that the model has values for are arguments, too.
    assert refusal(OPTIONAL, {"x": STRING}) == "Expects arg[2] to be float but string is provided"


def test_a_signature_as_a_message() -> None:
    signature = Signature(
        [TensorSpec("x", "FP32", [-1, 3]), TensorSpec("k", "BYTES", []), TensorSpec("h", "BF16", None)],
        [TensorSpec("y", "COMPLEX64", [0])],
        method="regress",
        defaults={"k": object_array([b"a\0"], ())},
    )
    two, unknown = {"dim": [{"size": -1}, {"size": 3}]}, {"unknown_rank": True}
    info = signature_pb2.TensorInfo
    inputs = {
        "x": info(name="x:0", dtype=pb.DT_FLOAT, tensor_shape=two),
        "k": info(name="k:0", dtype=pb.DT_STRING, tensor_shape={}),
        "h": info(name="h:0", dtype=pb.DT_BFLOAT16, tensor_shape=unknown),
    }
    made = signature_def("s", signature, {})
    assert made == signature_pb2.SignatureDef(
        inputs=inputs,
        outputs={"y": info(name="y:0", dtype=pb.DT_COMPLEX64, tensor_shape={"dim": [{}]})},
        method_name="tensorflow/serving/regress",
        defaults={"k": pb.TensorProto(dtype=pb.DT_STRING, tensor_shape={}, string_val=[b"a\0"])},
    )
    assert made.inputs["k"].HasField("tensor_shape")


def test_all_signatures_of_a_model() -> None:
    """As the model's file has them, those among them that cannot be called, or else made from what is declared."""
    info = signature_pb2.TensorInfo
    in_file = signature_pb2.SignatureDef(method_name="m", inputs={"x": info(name="in_x:0", dtype=pb.DT_FLOAT_REF)})
    start = signature_pb2.SignatureDef(outputs={"start": info(name="NoOp", tensor_shape={"unknown_rank": True})})
    given = {"a": in_file.SerializeToString(), "__saved_model_init_op": start.SerializeToString()}
    made = signature_def_map({"a": ONE, "b": TWO}, given).signature_def
    assert dict(made) == {"a": in_file, "b": signature_def("b", TWO, {}), "__saved_model_init_op": start}
    assert signature_def("a", ONE, given) == in_file
    assert dict(signature_def_map({}, {}).signature_def) == {}
