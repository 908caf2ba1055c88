"""`:predict` bodies of TensorFlow Serving: what they mean, in every way of reading them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.protocols.predict_bodies import BLANKS, FLOAT, FORMS, MULTI, STRING, decode, signature, values
from triglot.core.errors import InvalidArgument, ModelNotFound
from triglot.core.tensor import DATATYPES
from triglot.core.types import TensorSpec
from triglot.model.signature import INSTANCES, Signature
from triglot.protocols.json.arrays import MAX_AT_ONCE
from triglot.protocols.tfserving.rest_predict import decode_predict


@pytest.mark.parametrize(
    ("body", "inputs", "expected"),
    [
        ('{"instances":[[1.0,2.0],[3.0,4.0]]}', FLOAT, {"x": [[1, 2], [3, 4]]}),
        ('{"instances":[1.0,2]}', FLOAT, {"x": [1, 2]}),
        ('{"instances":[{"x":[1]},{"x":[2]}]}', FLOAT, {"x": [[1], [2]]}),
        ('{"instances":[[],[]]}', FLOAT, {"x": [[], []]}),
        ('{"inputs":{"x":[2.0]}}', FLOAT, {"x": [2]}),
        ('{"inputs":{"x":[2.0],"zzz":[9]}}', FLOAT, {"x": [2]}),
        ('{"inputs":{"x":2.0,"zzz":null}}', FLOAT, {"x": 2}),
        ('{"inputs":2.0}', FLOAT, {"x": 2}),
        ('{"inputs":[]}', FLOAT, {"x": []}),
        ('{"inputs":[[1],[2]],"other":{"a":[1]}}', FLOAT, {"x": [[1], [2]]}),
        ('{"inputs":[1],"inputs":[2,3]}', FLOAT, {"x": [1]}),
        ('{"instances":[{"x":1,"x":2},{"x":3}]}', FLOAT, {"x": [1, 3]}),
        ('{"instances":[1e39,-1e39,1e-400,-0,-0.0]}', FLOAT, {"x": [np.inf, -np.inf, 0.0, 0.0, -0.0]}),
        ('{"instances":[18446744073709551616]}', FLOAT, {"x": [2.0**64]}),
        ('{"instances":[16777217,0.1]}', {"x": "FP64"}, {"x": [16777217, 0.1]}),
        ('{"instances":[300,-1]}', {"x": "UINT8"}, {"x": [44, 255]}),
        ('{"instances":[40000]}', {"x": "INT16"}, {"x": [-25536]}),
        ('{"instances":[128]}', {"x": "INT8"}, {"x": [-128]}),
        ('{"instances":[-2147483648,2147483647]}', {"x": "INT32"}, {"x": [-(2**31), 2**31 - 1]}),
        ('{"instances":[-9223372036854775808]}', {"x": "INT64"}, {"x": [-(2**63)]}),
        ('{"instances":[4294967295,0]}', {"x": "UINT32"}, {"x": [2**32 - 1, 0]}),
        ('{"instances":[18446744073709551615]}', {"x": "UINT64"}, {"x": [2**64 - 1]}),
        ('{"instances":[[true],[false]]}', {"x": "BOOL"}, {"x": [[True], [False]]}),
        ('{"instances":["foo","b,a:r\\n"]}', STRING, {"s": [b"foo", b"b,a:r\n"]}),
        ('{"instances":["b,a:r","[]"]}', STRING, {"s": [b"b,a:r", b"[]"]}),
        ('{"instances":[{"b64":"aGVsbG8="},"é"]}', STRING, {"s": [b"hello", "é".encode()]}),
        ('{"instances":[{"s":{"b64":"aGVs bG8="}}]}', STRING, {"s": [b"hello"]}),
        ('{"inputs":{"b64":"YQ=="}}', STRING, {"s": b"a"}),
        ('{"inputs":{"b64":"YQ=="}}', {"b64": "BYTES"}, {"b64": b"a"}),
        ('{"inputs":{"b64":7}}', {"b64": "INT32"}, {"b64": 7}),
        ('{"instances":[{"b64":7}]}', {"b64": "INT32"}, {"b64": [7]}),
        ('{"inputs":[]}', {"x": "FP16"}, {"x": []}),
        (
            '{"instances":[{"int_tensor":[1,2],"str_tensor":"a"},{"str_tensor":"b","int_tensor":[3,4]}]}',
            MULTI,
            {"int_tensor": [[1, 2], [3, 4]], "str_tensor": [b"a", b"b"]},
        ),
        (
            '{"inputs":{"str_tensor":"a","int_tensor":[[1,2],[3,4]]}}',
            MULTI,
            {"int_tensor": [[1, 2], [3, 4]], "str_tensor": b"a"},
        ),
    ],
)
def test_what_bodies_hold(body: str, inputs: dict[str, str], expected: dict[str, Any]) -> None:
    decoded = decode(body, inputs)
    assert repr(values(decoded)) == repr(
        {name: np.array(value, DATATYPES[inputs[name]].dtype).tolist() for name, value in expected.items()}
    )
    assert decoded.row == ("instances" in body)
    assert [np.asarray(tensor.data).ndim for tensor in decoded.inputs] == [1] * len(inputs)


@pytest.mark.parametrize("token", ["NaN", "Infinity", "-Infinity", "Inf", "-Inf", "-NaN"])
def test_bare_tokens_are_numbers(token: str) -> None:
    expected = np.array([float(token), 1, 0], np.float32)
    np.testing.assert_array_equal(
        np.asarray(decode(f'{{"instances":[{token},1.0,0]}}', FLOAT).inputs[0].data), expected
    )


def test_strings_need_not_be_utf8() -> None:
    assert values(decode(b'{"instances":["\xff\xfe"]}', STRING)) == {"s": [b"\xff\xfe"]}


def test_a_byte_order_mark_is_skipped() -> None:
    assert values(decode(b'\xef\xbb\xbf{"instances":[1.0]}', FLOAT)) == {"x": [1.0]}


def test_the_signature_is_asked_for_by_name() -> None:
    asked: list[str] = []

    def find(name: str) -> Signature:
        asked.append(name)
        return signature(FLOAT)(name)

    for form in FORMS:
        for members in ("", '"signature_name":"","signature_name":"b",', '"signature_name":"é:s",'):
            asked.clear()
            decoded = decode_predict(f'{{{members}"instances":[1.0]}}'.encode() + form, find)
            assert decoded.signature_name == asked[-1] == ("é:s" if "é" in members else "")


def missing(_: str) -> Signature:
    raise ModelNotFound("Servable not found for request: Latest(m)")


@pytest.mark.parametrize("form", [b"", BLANKS])
def test_a_missing_model_comes_after_the_json_and_before_the_values(form: bytes) -> None:
    for body in (b'{"instances":[null]}', b"{}", b'{"instances":[1.0]}'):
        with pytest.raises(ModelNotFound, match="Servable not found"):
            decode_predict(body + form, missing)
    for body in (b'{"instances":[1.0]', b"[]", b'{"signature_name":1}'):
        with pytest.raises(InvalidArgument, match="JSON"):
            decode_predict(body + form, missing)


def test_errors_of_a_long_lists_json_come_before_a_missing_model() -> None:
    numbers = b"1.5," * (MAX_AT_ONCE // 2)
    with pytest.raises(ModelNotFound):
        decode_predict(b'{"instances":[%b2]}' % numbers, missing)
    with pytest.raises(InvalidArgument, match="JSON"):
        decode_predict(b'{"instances":[%b,%b2]}' % (numbers, numbers), missing)


def test_the_signature_that_counts_is_the_first_one_named() -> None:
    def find(name: str) -> Signature:
        return missing(name) if name == "second" else signature(FLOAT)(name)

    for form in FORMS:
        # The last one's text stands for a member, if escapes are not seen.
        for last in ("second", "\\u0022\\u002c\\u0022\\u0022\\u003a\\u0022"):
            body = f'{{"signature_name":"first","signature_name":"{last}","instances":[1.0]}}'.encode() + form
            assert decode_predict(body, find).signature_name == "first"


@pytest.mark.parametrize(
    ("body", "row", "tensors"),
    [
        (b'{"instances": [[1, 2.5], [3, 4]]}', True, [("", "FP32", (2, 2), [1.0, 2.5, 3.0, 4.0])]),
        (b'{"instances": [{"a": 1, "b": "x"}]}', True, [("a", "FP32", (1,), [1.0]), ("b", "BYTES", (1,), [b"x"])]),
        (b'{"inputs": {"a": [[true]], "b": 2}}', False, [("a", "BOOL", (1, 1), [True]), ("b", "FP32", (), [2.0])]),
        (b'{"inputs": {"b64": "eHk="}}', False, [("", "BYTES", (), [b"xy"])]),
    ],
)
def test_a_model_that_declares_nothing_takes_what_comes(body: bytes, row: bool, tensors: list[Any]) -> None:
    decoded = decode_predict(body, lambda _: Signature((), (), any_tensors=True))
    assert decoded.row is row
    found = [
        (tensor.name, tensor.datatype, tensor.shape, np.asarray(tensor.data).tolist()) for tensor in decoded.inputs
    ]
    assert found == tensors


def test_a_model_that_takes_any_inputs_gets_the_values_that_were_sent() -> None:
    """As JSON, where they are no tensors; of equal keys the last one counts, as in Python."""
    known = Signature([TensorSpec("x", "FP32", None)], [], any_inputs=True)
    for form in FORMS:
        body = b'{"instances":[{"id":123456789012345678901,"a":1,"a":[NaN,"x"]},2]}' + form
        (tensor,) = decode_predict(body, lambda _: known).inputs
        assert tensor.name == INSTANCES
        assert np.asarray(tensor.data).tolist() == [b'{"id": 123456789012345678901, "a": [NaN, "x"]}', b"2"]
