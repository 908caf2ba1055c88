"""What is remembered of small messages, and how much: messages here are a name, one byte of value, and an end."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from triglot.protocols.templates import MAX_OF_LENGTH, MAX_TEMPLATES, RARELY, TemplateDecoder, Variables

Named = tuple[bytes, int]
END = b"."


class Decoder:
    """The decoder, and the messages that it did not know."""

    def __init__(self) -> None:
        self.parsed: list[bytes] = []
        self._decoder = TemplateDecoder(self._decode, self._find, small=1024)

    def _decode(self, data: bytes) -> Named:
        self.parsed.append(data)
        return data[:-2], data[-2]

    def _find(self, data: bytes, named: Named) -> Variables[Named]:
        name = named[0]
        return Variables([slice(len(data) - 2, len(data) - 1)], lambda like: (name, like[-2]))

    def check(self, name: bytes, value: int) -> None:
        """It means what it says."""
        assert self._decoder(name + bytes([value]) + END) == (name, value)


@pytest.fixture
def decoder() -> Decoder:
    return Decoder()


def take_turns(decoder: Decoder, kinds: int, name: Callable[[int], bytes], rounds: int = 3) -> None:
    for value in range(rounds):
        for kind in range(kinds):
            decoder.check(name(kind), value)


def of_one_length(kind: int) -> bytes:
    return b"model_%06d" % kind


def of_own_length(kind: int) -> bytes:
    return b"m" * kind


def test_clients_of_several_models_with_names_of_one_length_take_turns(decoder: Decoder) -> None:
    take_turns(decoder, MAX_OF_LENGTH, of_one_length)
    assert len(decoder.parsed) == MAX_OF_LENGTH


def test_messages_that_are_all_different_are_rarely_remembered(decoder: Decoder) -> None:
    take_turns(decoder, MAX_OF_LENGTH + 2 * RARELY, of_one_length, rounds=1)
    parsed = len(decoder.parsed)
    assert parsed == MAX_OF_LENGTH + 2 * RARELY
    # Two of them took the places of the oldest.
    take_turns(decoder, 2, of_one_length, rounds=1)
    assert len(decoder.parsed) == parsed + 2
    for kind in (*range(2, MAX_OF_LENGTH), MAX_OF_LENGTH + RARELY - 1, MAX_OF_LENGTH + 2 * RARELY - 1):
        decoder.check(of_one_length(kind), 7)
    assert len(decoder.parsed) == parsed + 2


def test_new_kinds_find_their_place_in_time(decoder: Decoder) -> None:
    take_turns(decoder, MAX_OF_LENGTH, of_one_length)
    for value in range(RARELY):
        decoder.check(b"model_newest", value)
    parsed = len(decoder.parsed)
    decoder.check(b"model_newest", RARELY)
    assert len(decoder.parsed) == parsed


def test_all_is_forgotten_when_it_is_too_much(decoder: Decoder) -> None:
    take_turns(decoder, MAX_TEMPLATES + 1, of_own_length, rounds=1)
    parsed = len(decoder.parsed)
    decoder.check(of_own_length(MAX_TEMPLATES), 5)
    assert len(decoder.parsed) == parsed
    decoder.check(of_own_length(0), 5)
    assert len(decoder.parsed) == parsed + 1
