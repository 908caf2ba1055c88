"""Answers of TensorFlow Serving's REST interface, to the byte while they are small."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from triglot.core.errors import InvalidArgument
from triglot.core.tensor import DATATYPES, Array, datatype_of, object_array
from triglot.core.types import OutputTensor
from triglot.protocols.tfserving.rest_examples import encode_classifications, encode_regressions
from triglot.protocols.tfserving.rest_predict import EXACT_ELEMENTS, encode_error, encode_predict


def output(name: str, values: Any, datatype: str) -> OutputTensor:
    if datatype == "BYTES":
        shape = np.array(values, dtype=object).shape
        return OutputTensor(name, datatype, object_array(list(np.array(values, dtype=object).reshape(-1)), shape))
    return OutputTensor(name, datatype, np.array(values, DATATYPES[datatype].dtype))


@pytest.mark.parametrize(
    ("values", "datatype", "row", "text"),
    [
        ([[2.5, 3.0], [3.5, 4.0]], "FP32", True, '{\n    "predictions": [[2.5, 3.0], [3.5, 4.0]\n    ]\n}'),
        ([2.5, 3, 4.5], "FP32", True, '{\n    "predictions": [2.5, 3.0, 4.5\n    ]\n}'),
        (
            [math.inf, -math.inf, math.nan],
            "FP32",
            True,
            '{\n    "predictions": [Infinity, -Infinity, NaN\n    ]\n}',
        ),
        ([[[], []]], "FP64", True, '{\n    "predictions": [[[], []]\n    ]\n}'),
        ([[]], "FP16", True, '{\n    "predictions": [[]\n    ]\n}'),
        ([], "FP32", True, '{\n    "predictions": []\n}'),
        ([True, False], "BOOL", True, '{\n    "predictions": [true, false\n    ]\n}'),
        ([255, 0], "UINT8", True, '{\n    "predictions": [255, 0\n    ]\n}'),
        ([-(2**63), 2**63 - 1], "INT64", True, f'{{\n    "predictions": [{-(2**63)}, {2**63 - 1}\n    ]\n}}'),
        ([2**64 - 1], "UINT64", True, f'{{\n    "predictions": [{2**64 - 1}\n    ]\n}}'),
        (
            [b"foo", b'b"\\/\n\x01\xc3\xa9'],
            "BYTES",
            True,
            '{\n    "predictions": ["foo", "b\\"\\\\/\\n\\u0001é"\n    ]\n}',
        ),
        (3.0, "FP32", False, '{\n    "outputs": 3.0\n}'),
        ([], "FP32", False, '{\n    "outputs": []\n}'),
        ([3.0], "FP32", False, '{\n    "outputs": [\n        3.0\n    ]\n}'),
        (
            [[1, 2], [3, 4]],
            "INT32",
            False,
            '{\n    "outputs": [\n        [\n            1,\n            2\n        ],\n        [\n            3'
            ",\n            4\n        ]\n    ]\n}",
        ),
        ([[], []], "INT32", False, '{\n    "outputs": [\n        [],\n        []\n    ]\n}'),
    ],
)
def test_one_output(values: Any, datatype: str, row: bool, text: str) -> None:
    assert encode_predict([output("y", values, datatype)], row).decode() == text


@pytest.mark.parametrize(
    ("values", "row", "text"),
    [
        (b"a", False, '{\n    "outputs": {\n        "b64": "YQ=="\n    }\n}'),
        ([b"hello"], True, '{\n    "predictions": [{\n            "b64": "aGVsbG8="\n        }\n    ]\n}'),
        (
            [[b"a", b""]],
            True,
            '{\n    "predictions": [[{\n                "b64": "YQ=="\n            }, {\n                "b64": ""'
            "\n            }]\n    ]\n}",
        ),
        (
            [[b"a"]],
            False,
            '{\n    "outputs": [\n        [\n            {\n                "b64": "YQ=="\n            }\n'
            "        ]\n    ]\n}",
        ),
    ],
)
def test_outputs_named_bytes_are_base64(values: Any, row: bool, text: str) -> None:
    assert encode_predict([output("img_bytes", values, "BYTES")], row).decode() == text


NUMBERS = output("int_tensor", [[1, 2], [3, 4]], "INT32")
ROWS = """{
    "predictions": [
        {
            "int_tensor": [1, 2],
            "s_bytes": {
                "b64": "YQ=="
            },
            "é": []
        },
        {
            "int_tensor": [3, 4],
            "s_bytes": {
                "b64": "Yg=="
            },
            "é": []
        }
    ]
}"""
COLUMNS = """{
    "outputs": {
        "str_tensor": "a",
        "int_tensor": [
            [
                1,
                2
            ],
            [
                3,
                4
            ]
        ]
    }
}"""


def test_several_outputs() -> None:
    strings, empty = output("s_bytes", [b"a", b"b"], "BYTES"), output("é", [[], []], "FP32")
    assert encode_predict([NUMBERS, strings, empty], True).decode() == ROWS
    assert encode_predict([output("str_tensor", b"a", "BYTES"), NUMBERS], False).decode() == COLUMNS


def test_one_output_may_keep_its_name() -> None:
    y = output("y", [1.5, 2], "FP32")
    assert json.loads(encode_predict([y], True, named=True)) == {"predictions": [{"y": 1.5}, {"y": 2.0}]}
    assert json.loads(encode_predict([y], False, named=True)) == {"outputs": {"y": [1.5, 2.0]}}


def test_strings_go_out_as_they_are() -> None:
    assert encode_predict([output("y", [b"\xff"], "BYTES")], True) == b'{\n    "predictions": ["\xff"\n    ]\n}'


@pytest.mark.parametrize(
    ("outputs", "row", "error"),
    [
        ([], True, "Cannot convert empty tensor map to JSON"),
        ([], False, "Cannot convert empty tensor map to JSON"),
        ([output("y", 1.0, "FP32")], True, "Tensor name: y has no shape information "),
        (
            [output("a", [1, 2], "FP32"), output("b", [1], "FP32")],
            True,
            "Tensor name: b has inconsistent batch size: 1 expecting: 2",
        ),
        ([output("y", [1.0], "FP16")], True, "Failed to write JSON value for tensor type: half"),
        ([output("y", [1.0], "BF16")], False, "Failed to write JSON value for tensor type: bfloat16"),
        ([output("y", [1], "UINT16")], True, "Failed to write JSON value for tensor type: uint16"),
        ([output("y", [1] * 5000, "UINT16")], True, "Failed to write JSON value for tensor type: uint16"),
        ([output("y", [1j], "COMPLEX64")], True, "Failed to write JSON value for tensor type: complex64"),
        ([output("y", [1j], "COMPLEX128")], True, "Failed to write JSON value for tensor type: complex128"),
    ],
)
def test_what_cannot_be_written(outputs: list[OutputTensor], row: bool, error: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        encode_predict(outputs, row)
    assert caught.value.message == error


ARRAYS = st.sampled_from([name for name in DATATYPES if DATATYPES[name].dtype.kind in "fiub"]).flatmap(
    lambda name: hnp.arrays(
        DATATYPES[name].dtype, hnp.array_shapes(min_dims=1, max_dims=4, min_side=0, max_side=4)
    )
)


def reads_back(text: bytes, key: str, array: Array) -> None:
    values = json.loads(text)[key]
    np.testing.assert_array_equal(np.array(values, array.dtype).reshape(array.shape), array)
    assert array.ndim == 0 or len(values) == len(array)


@given(ARRAYS, st.booleans())
def test_what_is_written_is_the_array(array: Array, row: bool) -> None:
    datatype = datatype_of(array)
    if datatype in ("FP16", "UINT16"):
        return
    key = "predictions" if row else "outputs"
    reads_back(encode_predict([OutputTensor("y", datatype, array)], row), key, array)
    # Other layouts and byte orders have the same text.
    swapped = OutputTensor("y", datatype, array.T.copy().T.astype(array.dtype.newbyteorder(">")))
    assert encode_predict([swapped], row) == encode_predict([OutputTensor("y", datatype, array)], row)


@pytest.mark.parametrize("dtype", ["f4", "f8", "i4", "u8", "?"])
@pytest.mark.parametrize("shape", [(EXACT_ELEMENTS + 1,), (1, 33_000), (17_000, 2), (2, 3, 6_000)])
def test_large_answers_have_the_same_values(dtype: str, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(7).normal(size=shape)
    array = (
        (random > 0 if dtype == "?" else random * 100).astype(dtype)
        if dtype[0] != "u"
        else np.abs(random).astype(dtype)
    )
    other = OutputTensor("z", "INT32", np.zeros(shape[:1], np.int32))
    large = OutputTensor("y", datatype_of(array), array)
    for row, key in ((True, "predictions"), (False, "outputs")):
        text = encode_predict([large], row)
        assert text.startswith(b'{\n    "%s": [' % key.encode())
        reads_back(text, key, array)
    rows = json.loads(encode_predict([large, other], True))["predictions"]
    np.testing.assert_array_equal(np.array([item["y"] for item in rows], dtype), array)
    reads_back(json.dumps(json.loads(encode_predict([large, other], False))["outputs"]).encode(), "y", array)


def test_large_answers_keep_their_tokens() -> None:
    array = np.zeros((3, EXACT_ELEMENTS), np.float32)
    array[1, :3] = math.nan, math.inf, -math.inf
    text = encode_predict([OutputTensor("y", "FP32", array)], True)
    assert b"[NaN,Infinity,-Infinity,0.0" in text
    reads_back(text, "predictions", array)


def test_the_largest_exact_answer() -> None:
    array = np.arange(EXACT_ELEMENTS, dtype=np.float32)
    numbers = ", ".join([f"{number}.0" for number in range(EXACT_ELEMENTS)])
    text = encode_predict([OutputTensor("y", "FP32", array)], True)
    assert text.decode() == f'{{\n    "predictions": [{numbers}\n    ]\n}}'


def test_classifications() -> None:
    results: list[list[tuple[bytes, float]]] = [
        [(b"car", 0.2), (b'"b\xff', float(np.float32(0.7)))],
        [],
        [(b"", 7.0)],
    ]
    assert encode_classifications(results) == (
        b'{\n    "results": [[["car", 0.2], ["\\"b\xff", 0.7]], [], [["", 7.0]]\n    ]\n}'
    )
    with pytest.raises(InvalidArgument, match="Cannot convert empty ClassificationResults to JSON"):
        encode_classifications([])


def test_regressions() -> None:
    assert encode_regressions(np.array([3.5, 4.0, 1 / 3], np.float32)) == (
        b'{\n    "results": [3.5, 4.0, 0.333333343]\n}'
    )
    assert encode_regressions([math.nan]) == b'{\n    "results": [NaN]\n}'
    with pytest.raises(InvalidArgument, match="Cannot convert empty RegressionResults to JSON"):
        encode_regressions([])


def test_errors() -> None:
    assert encode_error('JSON Value: {\n    "a": 1\n} \x01é') == (
        b'{\n    "error": "JSON Value: {\\n    \\"a\\": 1\\n} \\u0001\xc3\xa9"\n}'
    )
    assert json.loads(encode_error("\ud800")) == {"error": "?"}
