"""`:predict` bodies of any form: small, large and beyond strict JSON they mean the same."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.predict_bodies import BLANKS, FLOAT, FORMS, repr_of, signature
from triglot.core.errors import ServingError
from triglot.protocols.json import text
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
def test_numbers_of_large_bodies_never_become_objects(body: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text, "read_object", None)  # Reads plain values.
        decoded = decode_predict(json.dumps(body).encode(), signature(FLOAT))
    np.testing.assert_array_equal(np.asarray(decoded.inputs[0].data).reshape(IMAGE.shape), IMAGE)


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


@given(bodies())
def test_every_reader_reads_a_body_alike(body: tuple[str, dict[str, str]]) -> None:
    """Blanks make a body large; text behind it is beyond strict JSON."""
    encoded, inputs = body[0].encode(), body[1]
    assert len({outcome(encoded + form, inputs) for form in FORMS}) == 1


def outcome(body: bytes, inputs: dict[str, str]) -> str:
    try:
        return repr_of(decode_predict(body, signature(inputs)))
    except ServingError as error:
        return f"{error.code}: {error.message}"


@given(st.binary(max_size=30) | st.lists(st.sampled_from(list(b'{}[]",:1.x'))).map(bytes), st.integers(0, 40))
def test_any_bytes_are_read_or_refused(junk: bytes, at: int) -> None:
    valid = b'{"instances":[{"x":[1.0,2]}]}'
    for body in (junk, valid[:at] + junk + valid[at:], b'{"inputs":' + junk + b"}"):
        for form in (b"", BLANKS):
            try:
                decoded = decode_predict(body + form, signature(FLOAT))
            except ServingError:
                continue
            assert [tensor.name for tensor in decoded.inputs] == ["x"]
