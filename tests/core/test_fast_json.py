"""JSON with orjson and without: the same values, refusals and, but for exponents, texts."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from triglot.core import fast_json
from triglot.core.tensor import Array

pytest.importorskip("orjson")


def outcome(has_orjson: bool, function: Callable[[], Any]) -> str:
    """Return the type and text of a result, or of an error the type that callers handle."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_json, "HAS_ORJSON", has_orjson)
        try:
            return repr(function())
        except ValueError:
            return "ValueError"
        except TypeError:
            return "TypeError"


def both(function: Callable[[], Any]) -> str:
    with_orjson, without = outcome(True, function), outcome(False, function)
    assert without == with_orjson
    return with_orjson


@pytest.mark.parametrize(
    "text",
    [
        "1",
        "-0",
        "-0.0",
        "01",
        "+1",
        "1.",
        ".5",
        "1_0",
        "0x1",
        "1 2",
        "[1,]",
        "[,1]",
        '{"a":1,}',
        "nan",
        "NaN",
        "-Infinity",
        "1e400",
        "-1e400",
        "1e308",
        "1e0308",
        "1e-400",
        "1" + "0" * 400,
        "1" * 5000,
        str(2**63),
        str(2**64 - 1),
        str(2**64),
        str(-(2**63)),
        str(-(2**63) - 1),
        '"\\ud800"',
        '"\\uD83D\\uDE00"',
        '"\\udc00"',
        '"\x01"',
        '"\x7f"',
        '{"a":1,"a":2}',
        "",
        " ",
        "\ufeff1",
        "\x0c1",
        "\u00a01",
        "[" * 100 + "]" * 100,
        "[" * 5000 + "]" * 5000,
        '"' + "[" * 5000 + '"',
        '["\\"' + "[" * 5000 + '\\\\"]',
        "[" + "[]," * 5000 + "[]]",
    ],
)
def test_texts_are_read_and_refused_alike(text: str) -> None:
    both(lambda: fast_json.loads(text))
    both(lambda: fast_json.loads(text.encode()))


@given(st.text(alphabet='{}[]",:0123456789.eE+-ntfa\\u \x00é\ud800', max_size=30))
def test_any_text_is_read_and_refused_alike(text: str) -> None:
    both(lambda: fast_json.loads(text.encode(errors="surrogatepass")))


@pytest.mark.parametrize("text", [b"\xff", b'"\xed\xa0\x80"', "1".encode("utf-16"), "1".encode("utf-32")])
def test_only_utf_8_is_read(text: bytes) -> None:
    assert both(lambda: fast_json.loads(text)) == "ValueError"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ({"a": [1, 2.5, None, True], "é\n\x01": "\x7f"}, '{"a":[1,2.5,null,true],"é\\n\\u0001":"\x7f"}'.encode()),
        ([math.nan, {"a": -math.inf}], b'[null,{"a":null}]'),
        ((1, (2,)), b"[1,[2]]"),
        (2**64 - 1, b"18446744073709551615"),
        ([2**64], TypeError),
        ({"a": -(2**63) - 1}, TypeError),
        ([{1: 2}], TypeError),
        ("\ud800", TypeError),
        (object(), TypeError),
        (b"", TypeError),
    ],
)
def test_values_are_written_alike(value: object, text: bytes | type[Exception]) -> None:
    found = both(lambda: fast_json.dumps(value))
    assert found == (repr(text) if isinstance(text, bytes) else text.__name__)


def test_what_contains_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    assert both(lambda: fast_json.dumps(value)) == "TypeError"


def test_other_types_are_converted_on_demand() -> None:
    assert both(lambda: fast_json.dumps([1j, math.inf], str)) == repr(b'["1j",null]')


@given(
    hnp.arrays(
        st.sampled_from(["?", "i1", "u8", "i8", "f2", "f4", "f8"]), hnp.array_shapes(max_dims=3, max_side=4)
    )
)
def test_arrays_are_written_alike(array: Array) -> None:
    # The texts of exponents differ, their values do not.
    assert both(lambda: json.loads(fast_json.dumps_array(array)))


def test_fp32_is_written_as_short_as_possible() -> None:
    assert both(lambda: fast_json.dumps_array(np.array([[0.1, np.nan]], np.float32))) == repr(b"[[0.1,null]]")
