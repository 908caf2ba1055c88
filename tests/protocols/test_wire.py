"""Protobuf bytes, cut and counted before anything is parsed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.protocols.wire_bytes import (
    UNKNOWN_FIELDS,
    field,
    fixed32_field,
    fixed64_field,
    group,
    number,
    packed,
    varint_field,
)
from triglot.core.errors import InvalidArgument
from triglot.core.varint import varint
from triglot.pb.kserve import inference_pb2 as pb
from triglot.protocols.kserve.codec import decode_infer
from triglot.protocols.wire import (
    MAX_FIELDS,
    Limit,
    MessageRules,
    length_prefix,
    parse,
    read_varint,
    scan,
    serialize,
)

CUT_7 = MessageRules(cut=frozenset({7}))


def scanned(data: bytes, rules: MessageRules = CUT_7) -> tuple[bytes, list[bytes]]:
    rest, cuts = scan(data, rules)
    assert {tag for tag, _ in cuts} <= rules.cut
    return rest, [bytes(cut) for _, cut in cuts]


@pytest.mark.parametrize(
    ("value", "encoding"),
    [(0, "00"), (1, "01"), (127, "7f"), (128, "8001"), (300, "ac02"), (2**64 - 1, "ff" * 9 + "01")],
)
def test_numbers(value: int, encoding: str) -> None:
    data = bytes.fromhex(encoding)
    assert varint(value) == number(value) == data
    assert read_varint(data + b"\xff", 0, len(data) + 1) == (value, len(data))
    assert read_varint(b"\xff" + data, 1, len(data) + 1) == (value, len(data) + 1)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 9, b"\x80" * 10 + b"\x01", b"\xff" * 20])
def test_numbers_that_do_not_end(data: bytes) -> None:
    with pytest.raises(InvalidArgument, match="truncated varint at byte 0"):
        read_varint(data, 0, len(data))


def test_a_number_ends_with_its_message() -> None:
    with pytest.raises(InvalidArgument, match="truncated varint at byte 1"):
        read_varint(b"\x00\x80\x01", 1, 2)


@given(st.integers(1, 2**29 - 1), st.integers(0, 2**31 - 1))
def test_length_prefix(tag: int, length: int) -> None:
    assert length_prefix(tag, length) == number(tag << 3 | 2) + number(length)


def test_a_message_without_cut_fields_is_given_back_itself() -> None:
    data = field(1, "m") + varint_field(8, 7) + group(9, field(7, "inside"))
    assert scan(data, CUT_7)[0] is data
    assert scan(data, CUT_7)[1] == []
    assert scan(b"", CUT_7) == (b"", [])


def test_cut_fields_are_views_of_the_message() -> None:
    data = field(7, "one") + field(1, "m") + field(7, "") + field(7, "three") + field(2, "1")
    rest, cuts = scan(data, CUT_7)
    assert rest == field(1, "m") + field(2, "1")
    assert [(tag, bytes(cut)) for tag, cut in cuts] == [(7, b"one"), (7, b""), (7, b"three")]
    assert all(cut.obj is data for _, cut in cuts)


def test_only_length_delimited_fields_are_cut() -> None:
    data = varint_field(7, 1) + fixed32_field(7) + fixed64_field(7) + group(7) + field(7, "cut")
    assert scanned(data) == (data[: -len(field(7, "cut"))], [b"cut"])


def test_fields_of_nested_messages_are_not_cut() -> None:
    data = field(5, field(7, "kept"))
    assert scanned(data, MessageRules(cut=frozenset({7}), nested={5: MessageRules()})) == (data, [])


@given(st.lists(st.tuples(st.booleans(), st.binary(max_size=9), UNKNOWN_FIELDS), max_size=8))
def test_what_is_cut_and_what_is_kept(parts: list[tuple[bool, bytes, bytes]]) -> None:
    data = b"".join(field(7, payload) if cut else unknown for cut, payload, unknown in parts)
    rest, cuts = scanned(data)
    assert rest == b"".join(unknown for cut, _, unknown in parts if not cut)
    assert cuts == [payload for cut, payload, _ in parts if cut]


MALFORMED = {
    "unfinished tag": b"\x80",
    "truncated varint": b"\x08\x80",
    "no length": b"\x0a",
    "unfinished length": b"\x0a\x80",
    "length over the end": b"\x0a\x02a",
    "huge length": b"\x0a" + number(2**63),
    "short fixed32": fixed32_field(1)[:-1],
    "short fixed64": fixed64_field(1)[:-1],
    "field number 0": b"\x02\x00",
    "field number too large": number(2**29 << 3) + b"\x00",
    "wire type 6": b"\x0e",
    "wire type 7": b"\x0f",
    "end without a group": b"\x0c",
    "group without an end": b"\x0b",
    "another group's end": b"\x0b\x14",
    "length over the group's end": b"\x0b\x0a\x7f\x0c",
    "wire type 6 in a group": b"\x0b\x0e\x0c",
    "short fixed64 in a group": b"\x0b\x09\x00",
    "groups too deep": b"\x0b" * 5000 + b"\x0c" * 5000,
}


@pytest.mark.parametrize("data", MALFORMED.values(), ids=MALFORMED.keys())
@pytest.mark.parametrize("nested", [False, True])
def test_malformed_messages(data: bytes, nested: bool) -> None:
    rules = MessageRules(nested={5: MessageRules()})
    with pytest.raises(InvalidArgument, match=r"the request is not a valid protobuf message: .* at byte \d+"):
        scan(field(5, data) if nested else field(1, "m") + data, rules)
    with pytest.raises(InvalidArgument, match=r"the request is not a valid inference\.ModelInferRequest: "):
        parse(pb.ModelInferRequest, field(5, data) if nested else field(1, "m") + data)


@pytest.mark.parametrize("depth", [1, 50, 90])
def test_groups_within_groups(depth: int) -> None:
    data = b"\xfb\x06" * depth + b"\xfc\x06" * depth
    assert scan(data, CUT_7) == (data, [])
    assert parse(pb.ModelInferRequest, data) == parse(pb.ModelInferRequest, data)


REPEATED = MessageRules(repeats={5: Limit("inputs", 3)})
DIMS = MessageRules(varints={3: Limit("dims", 3)})


@pytest.mark.parametrize(
    ("name", "rules", "data"),
    [
        ("inputs", REPEATED, lambda count: field(5, "") * count),
        ("inputs", REPEATED, lambda count: (field(1, "m") + field(5, "x")) * count),
        ("dims", DIMS, lambda count: field(3, packed([1] * count))),
        ("dims", DIMS, lambda count: field(3, packed([-1] * count))),
        ("dims", DIMS, lambda count: varint_field(3, 1) * count),
        ("dims", DIMS, lambda count: varint_field(3, 2**63) + field(3, packed(range(count - 1)))),
        ("dims", DIMS, lambda count: field(3, packed([300])) * count),
        ("inputs", MessageRules(nested={2: REPEATED}), lambda count: field(2, field(5, "") * count)),
    ],
)
def test_limits(name: str, rules: MessageRules, data: Callable[[int], bytes]) -> None:
    assert scan(data(3), rules) == (data(3), [])
    for count in (4, 5, 1000):
        with pytest.raises(InvalidArgument) as caught:
            scan(data(count), rules)
        assert caught.value.message == f"the request has more than 3 {name}"


def test_a_nested_limit_holds_for_each_message_by_itself() -> None:
    data = field(2, field(5, "") * 3) * 5
    assert scan(data, MessageRules(nested={2: REPEATED})) == (data, [])


def test_the_first_limit_is_found_before_what_comes_after_it() -> None:
    with pytest.raises(InvalidArgument, match="more than 3 inputs"):
        scan(field(5, "") * 4 + b"\x80", REPEATED)


@given(st.binary(max_size=200))
def test_any_bytes_are_scanned_or_refused(data: bytes) -> None:
    rules = MessageRules(cut=frozenset({7}), nested={5: DIMS, 6: REPEATED}, repeats={4: Limit("x", 3)})
    try:
        rest, cuts = scan(data, rules)
    except InvalidArgument:
        return
    assert len(rest) + sum(len(cut) for _, cut in cuts) <= len(data)


def test_a_part_of_a_message_is_scanned_in_place() -> None:
    inner = field(7, "one") + field(1, "m")
    data = field(3, inner)
    rest, cuts = scan(memoryview(data)[-len(inner) :], CUT_7)
    assert (rest, [bytes(cut) for _, cut in cuts]) == (field(1, "m"), [b"one"])
    assert cuts[0][1].obj is data


def test_parse_and_serialize() -> None:
    message = pb.ModelReadyRequest(name="m", version="1")
    assert serialize(message) == field(1, "m") + field(2, "1")
    assert parse(pb.ModelReadyRequest, serialize(message)) == message
    with pytest.raises(InvalidArgument, match=r"not a valid inference\.ModelReadyRequest"):
        parse(pb.ModelReadyRequest, field(1, b"\xff"))


@pytest.mark.parametrize(
    "piece",
    [b"\x0a\x00", b"\x7a\x00", b"\x78\x01", b"\x2a\x02\x7a\x00", b"\x7b\x78\x01\x7c", b"\x2a\x02\x2a\x00"],
    ids=["empty strings", "unknown", "unknown numbers", "unknown inside", "groups", "contents"],
)
def test_the_number_of_fields_is_bounded(piece: bytes) -> None:
    """Each costs the same time on the event loop, whatever it means."""
    with pytest.raises(InvalidArgument, match="the request has more than"):
        decode_infer(piece * (MAX_FIELDS + 1))
