"""The quick reader of `:predict` bodies agrees with the exact one, and reads what clients send."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from predict_bodies import BLANKS, FLOAT, JUNK, MULTI, STRING, repr_of, signature

from triglot.core.errors import ServingError
from triglot.protocols.json.limits import DEFAULT_LIMITS
from triglot.protocols.tfserving.json_quick import read_quickly
from triglot.protocols.tfserving.rest_predict import decode_predict

pytestmark = pytest.mark.usefixtures("json_library")

IMAGE = np.arange(2 * 30 * 40 * 3, dtype=np.float32).reshape(2, 30, 40, 3) / 7


@pytest.mark.parametrize(
    "body",
    [
        {"instances": IMAGE.tolist()},
        {"signature_name": "s:,", "inputs": IMAGE.tolist()},
        {"inputs": {"x": IMAGE.tolist()}},
        {"inputs": {"x": IMAGE.tolist(), "z": 1}},
        {"instances": [{"x": part} for part in IMAGE.tolist()]},
    ],
)
def test_large_regular_bodies_are_read_quickly(body: dict[str, Any]) -> None:
    text = json.dumps(body).encode()
    quick = read_quickly(text, signature(FLOAT), DEFAULT_LIMITS)
    assert quick is not None
    np.testing.assert_array_equal(np.asarray(quick.inputs[0].data).reshape(IMAGE.shape), IMAGE)
    assert repr_of(quick) == repr_of(decode_predict(text + JUNK, signature(FLOAT)))


@pytest.mark.parametrize(
    ("body", "inputs"),
    [
        ('{"instances":[1.0,2.0,5.0]}', FLOAT),
        ('{"inputs":{"x":[2.0]}}', FLOAT),
        ('{"instances":[{"x":1},{"x":2}]}', FLOAT),
        ('{"instances":["a, b","c: d"]}', STRING),
        ('{"instances":[{"b64":"YQ=="},{"b64":"YWI="}]}', STRING),
        (
            '{"instances":[{"int_tensor":[1],"str_tensor":"a, b"},{"int_tensor":[2],"str_tensor":{"b64":""}}]}',
            MULTI,
        ),
        ('{"inputs":{"str_tensor":[["a","b"]],"int_tensor":3}}', MULTI),
    ],
)
def test_what_clients_send_is_read_quickly(body: str, inputs: dict[str, str]) -> None:
    for form in (b"", BLANKS):
        assert read_quickly(body.encode() + form, signature(inputs), DEFAULT_LIMITS) is not None


NUMBERS = ["0", "-0", "1", "-1", "1.5", "-0.0", "1E2", "300", "2147483648", "9223372036854775808"]
NUMBERS += ["18446744073709551616", "1e39", "0.1", "123456789012345678901234567890", "NaN", "-Infinity", "Inf"]
STRINGS = ['"a"', '"é"', '"a,b"', '"[x]"', '"\\u0041"', '{"b64":"YQ=="}', '{"b64":"Y:"}']
OTHERS = ["true", "null", "{}", '{"x":1}', "[]", "[1]", "[[1]]"]


@st.composite
def nested(draw: st.DrawFn, shape: tuple[int, ...], leaves: st.SearchStrategy[str], odd: bool) -> str:
    """The text of an array; an odd one has now and then something else somewhere."""
    if odd and draw(st.integers(0, 15)) == 0:
        return draw(st.sampled_from(NUMBERS + STRINGS + OTHERS))
    if not shape:
        return draw(leaves)
    length = shape[0] + (draw(st.sampled_from([0, 0, 0, 0, 1])) if odd else 0)
    return f"[{','.join([draw(nested(shape[1:], leaves, odd)) for _ in range(length)])}]"


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, str]]:
    names = draw(st.sampled_from([["x"], ["x"], ["b64"], ["x", "y"]]))
    inputs, arrays = {}, {}
    odd = draw(st.booleans())
    for name in names:
        numeric = draw(st.booleans())
        plain = st.sampled_from(NUMBERS[:4]) if draw(st.booleans()) else st.sampled_from(NUMBERS)
        datatypes = (
            ["FP32", "FP64", "INT8", "INT32", "INT64", "UINT32", "UINT64"] if numeric else ["BYTES", "BOOL"]
        )
        inputs[name] = draw(st.sampled_from(datatypes))
        leaves = plain if numeric else st.sampled_from(STRINGS if inputs[name] == "BYTES" else ["true", "false"])
        arrays[name] = nested(tuple(draw(st.lists(st.integers(0, 3), max_size=3))), leaves, odd)

    def members() -> str:
        keys = names + (draw(st.lists(st.sampled_from([*names, "z"]), max_size=1)) if odd else [])
        return "{" + ",".join([f'"{key}":{draw(arrays.get(key, arrays[names[0]]))}' for key in keys]) + "}"

    form = draw(st.sampled_from(["inputs", "instances", "named", "rows"]))
    if form in ("inputs", "instances"):
        text = f'"{form}":{draw(arrays[names[0]])}'
    elif form == "named":
        text = f'"inputs":{members()}'
    else:
        text = f'"instances":[{",".join([members() for _ in range(draw(st.integers(0, 3)))])}]'
    extra = draw(
        st.sampled_from(["", '"signature_name":"s",', '"z":"{,",', '"z":[1],', '"instances":1,'] if odd else [""])
    )
    return "{" + extra + text + "}", inputs


@pytest.mark.parametrize(
    "body",
    [
        # As many numbers as a regular array of the same beginning has.
        '{"instances":[[1,2],[3,[4]]]}',
        '{"instances":[[1,2],[[3],4]]}',
        '{"instances":[[1,2],[3],[4,5,6]]}',
        '{"inputs":{"x":[[[1],[2]],[[3],[[4]]]]}}',
        '{"inputs":[1,[2],3,[]]}',
        # The exact reader knows what becomes of them.
        '{"instances":[[1,2]],"instances":[[1,2]]}',
        '{"inputs":{"x":[1],"x":[1]}}',
        '{"instances":[[1,2]],"z":[1]}',
        '{"instances":[[1,2]],"z":{"y":[1]}}',
    ],
)
@pytest.mark.parametrize("form", [b"", BLANKS])
def test_what_is_not_regular_is_left_to_the_exact_reader(body: str, form: bytes) -> None:
    assert read_quickly(body.encode() + form, signature(FLOAT), DEFAULT_LIMITS) is None


@pytest.mark.parametrize("form", [b"", BLANKS])
def test_brackets_in_strings_prove_nothing(form: bytes) -> None:
    """But no harm is done: the structure of the whole text is looked at then."""
    for name in ("[", "]", "[["):
        body = f'{{"signature_name":"{name}","instances":[[1,2],[3,4]]}}'.encode() + form
        quick = read_quickly(body, signature(FLOAT), DEFAULT_LIMITS)
        assert quick is not None
        assert (quick.signature_name, quick.inputs[0].shape) == (name, (2, 2))
        ragged = body.replace(b"[3,4]", b"[3,[4]]")
        assert read_quickly(ragged, signature(FLOAT), DEFAULT_LIMITS) is None


@given(bodies(), st.sampled_from([b"", BLANKS]))
def test_the_quick_reader_agrees_with_the_exact_one(body: tuple[str, dict[str, str]], form: bytes) -> None:
    text, inputs = body[0].encode(), body[1]
    quick = read_quickly(text + form, signature(inputs), DEFAULT_LIMITS)
    if quick is not None:
        assert repr_of(quick) == repr_of(decode_predict(text + JUNK, signature(inputs)))


@given(st.binary(max_size=30) | st.lists(st.sampled_from(list(b'{}[]",:1.x'))).map(bytes), st.integers(0, 40))
def test_any_bytes_are_read_or_refused(junk: bytes, at: int) -> None:
    whole = b'{"instances":[{"x":[1.0,2]}]}'
    for body in (junk, whole[:at] + junk + whole[at:], b'{"inputs":' + junk + b"}"):
        for form in (b"", BLANKS):
            try:
                decoded = decode_predict(body + form, signature(FLOAT))
            except ServingError:
                continue
            assert [tensor.name for tensor in decoded.inputs] == ["x"]
