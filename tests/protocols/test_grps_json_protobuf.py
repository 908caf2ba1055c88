"""grps' JSON bodies are read as protobuf's own JSON mapping reads them; damaged ones alike by both readers."""

from __future__ import annotations

from typing import Any

from google.protobuf import json_format
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.grps_messages import BLANKS, read, refusal, same_message
from triglot.core.errors import InvalidArgument
from triglot.pb.grps import grps_pb2 as pb
from triglot.protocols.grps.codec import decode_message
from triglot.protocols.grps.json_reader import read_message

INTEGERS = st.sampled_from(
    [0, 1, -1, 300, 2**31 - 1, 2**31, -(2**31), 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63)]
)
NUMBERS = INTEGERS | st.sampled_from([0.5, 1.0, -0.0, 1e39, 3.4028234663852886e38, 1e-50, 1e300, 2.0**40])
STRINGS = st.sampled_from(["1", "-5", "2147483648", "NaN", "Infinity", "-Infinity", "a", "", "aGk=", "é", "nan x"])
ODD = st.sampled_from([None, True, [], [1], {}, {"k": 1}])
LEAVES = NUMBERS | STRINGS | ODD
LISTS = st.lists(NUMBERS, max_size=4) | st.lists(LEAVES, max_size=3) | ODD
MAPS = st.dictionaries(st.sampled_from(["k", "é", ""]), LEAVES, max_size=2) | ODD
NAMES = ["flat_uint8", "flat_int8", "flat_int16", "flat_int32", "flat_int64", "flat_float16", "flat_float32"]
NAMES += ["flat_float64", "flat_string"]


@st.composite
def tensors(draw: st.DrawFn) -> dict[str, Any]:
    number = draw(st.integers(1, 9))
    members = {"dtype": draw(st.sampled_from([number, str(number), pb.DataType.Name(number)]))}
    members[NAMES[number - 1]] = draw(LISTS)
    members["shape"] = draw(st.just([2, 3]) | LISTS)
    members["name"] = draw(st.just("x") | STRINGS | ODD)
    return members


BODIES = (
    st.fixed_dictionaries({"gtensors": st.fixed_dictionaries({"tensors": st.lists(tensors(), max_size=2) | ODD})})
    | st.fixed_dictionaries(
        {
            "gmap": st.dictionaries(
                st.sampled_from(["s_s", "s_b", "s_i32", "s_i64", "s_f", "s_d"]), MAPS, max_size=2
            )
        }
    )
    | st.fixed_dictionaries({"str_data": STRINGS, "model": STRINGS | st.none()})
)


@given(BODIES)
def test_it_takes_what_protobuf_takes(body: dict[str, Any]) -> None:
    try:
        parsed = json_format.ParseDict(body, pb.GrpsMessage())
        expected = decode_message(parsed.SerializeToString())
    except (json_format.ParseError, ValueError, TypeError, AttributeError, OverflowError):
        expected = None
    if expected is None or _has_damaged_base64(body):
        refusal(body)
    else:
        assert same_message(read(body), expected)


def _has_damaged_base64(body: dict[str, Any]) -> bool:
    """Whether protobuf's Python skips characters, and reads bytes that were not sent."""
    texts = body.get("gmap", {}).get("s_b")
    return isinstance(texts, dict) and "é" in texts.values()


PIECES = [
    b'{"',
    b'":',
    b"}",
    b"[",
    b"]",
    b",",
    b'"',
    b"\\",
    b"\\u0041",
    b"\\ud800",
    b"\xff",
    b"\0",
    b"1",
    b"-",
    b"e9",
]
PIECES += [b"NaN", b"null", b"true", b"str_data", b"ndarray", b"gtensors", b"tensors", b"dtype", b"gmap", b" "]
SEEDS = [b'{"ndarray":[[1,2],[3,4]],"model":"a"}', b'{"gtensors":{"tensors":[{"dtype":7,"flat_float32":[1,2]}]}}']
SEEDS += [b'{"gmap":{"s_f":{"k":1},"s_b":{"k":"aGk="}}}', b'{"str_data":"x"}']


@given(st.sampled_from(SEEDS), st.data())
def test_damaged_bodies_are_read_or_refused_alike(seed: bytes, data: st.DataObject) -> None:
    body = seed
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(body)))
        skipped = data.draw(st.integers(0, 3))
        body = body[:at] + data.draw(st.sampled_from(PIECES)) + body[at + skipped :]
    try:
        message = read_message(body)
    except InvalidArgument:
        refusal(body)
    else:
        assert same_message(message, read_message(body + BLANKS))
