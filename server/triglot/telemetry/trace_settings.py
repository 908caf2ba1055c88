"""What is traced of which requests: the settings of the server, and of single models (spec 3.11)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triglot.core.errors import InvalidArgument, Unimplemented

LEVEL, RATE, COUNT, FREQUENCY = "trace_level", "trace_rate", "trace_count", "log_frequency"
FILE, MODE = "trace_file", "trace_mode"
KEYS = (LEVEL, RATE, COUNT, FREQUENCY, FILE, MODE)
OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
TRITON, OPENTELEMETRY = "triton", "opentelemetry"
LEAST = {RATE: 1, COUNT: -1, FREQUENCY: 0}
MOST = 2**31 - 1
_INTEGER = re.compile(r"-?[0-9]{1,10}")

Changes = Mapping[str, Sequence[str] | None]
"""New values by key; None takes back what was set."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """What the server starts with. `level`: of `TIMESTAMPS` and `TENSORS`; empty: nothing is traced.

    One of `rate` requests is traced, `count` in all (-1: no limit), and a file is begun after `frequency` traces
    (0: one file has all). `mode`: what is made of them, files or spans.
    """

    file: str = ""
    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    frequency: int = 0
    mode: str = TRITON


class Scope:
    """The server's settings, or a model's; what it does not hold itself is its parent's.

    What counts down and up belongs to the scope that holds the number.
    """

    __slots__ = ("_parent", "_seen", "own")

    def __init__(self, own: Mapping[str, Any], parent: Scope | None = None) -> None:
        self.own = dict(own)
        self._parent = parent
        self._seen = 0

    def holder(self, key: str) -> Scope:
        """Whose value of the key it is."""
        return self if key in self.own or self._parent is None else self._parent

    def value(self, key: str) -> Any:
        """The value that counts."""
        return self.holder(key).own[key]

    @property
    def over(self) -> bool:
        """Whether it traces no more requests until somebody changes it."""
        return not self.value(LEVEL) or self.value(COUNT) == 0

    def sample(self) -> tuple[str, ...]:
        """The level at which the next request is traced; empty: not at all."""
        level: tuple[str, ...] = self.value(LEVEL)
        counted = self.holder(COUNT)
        left = counted.own[COUNT]
        if not level or left == 0:
            return ()
        rated = self.holder(RATE)
        rated._seen += 1
        if rated._seen < rated.own[RATE]:
            return ()
        rated._seen = 0
        if left > 0:
            counted.own[COUNT] = left - 1
        return level

    def change(self, values: Mapping[str, Any]) -> None:
        """Take these values."""
        self.own |= values
        self._seen = 0


def scope_of(options: TraceOptions) -> Scope:
    """The server's settings at the start."""
    return Scope({LEVEL: options.level, RATE: options.rate, COUNT: options.count, FREQUENCY: options.frequency})


def read_changes(changes: Changes, *, traceable: bool, mode: str = TRITON) -> dict[str, Any]:
    """The values of a request; None for those that are to be taken back.

    Raises `InvalidArgument` for an unknown key, a wrong value, and a level unless `traceable`: there is a file, or
    spans are exported; `Unimplemented` for what cannot be changed over the network.
    """
    values: dict[str, Any] = {}
    for key, texts in changes.items():
        if key not in KEYS:
            raise InvalidArgument(f"unknown trace setting '{_cut(key)}', expected {', '.join(KEYS)}")
        if key == FILE:
            _refuse_file(texts)
        elif key == MODE:
            _check_mode(texts, mode)
        elif texts is None:
            values[key] = None
        else:
            values[key] = read_level(texts) if key == LEVEL else _number(key, texts, mode)
    if TENSORS in (values.get(LEVEL) or ()) and mode == OPENTELEMETRY:
        raise InvalidArgument(f"{LEVEL}: expected {TIMESTAMPS} or {OFF} with {MODE} {mode}, got {TENSORS}")
    if values.get(LEVEL) and not traceable:
        raise InvalidArgument(f"{LEVEL}: requires a {FILE}; start the server with the option trace_file")
    return values


def read_level(texts: Sequence[str]) -> tuple[str, ...]:
    """The parts of a level, without OFF. Raises `InvalidArgument`."""
    for text in texts:
        if text not in (OFF, TIMESTAMPS, TENSORS):
            raise InvalidArgument(f"{LEVEL}: expected {OFF}, {TIMESTAMPS} or {TENSORS}, got '{_cut(text)}'")
    if OFF in texts and len(texts) > 1:
        raise InvalidArgument(f"{LEVEL}: expected {OFF} alone, got {_listed(texts)}")
    return tuple(level for level in (TIMESTAMPS, TENSORS) if level in texts)


def _number(key: str, texts: Sequence[str], mode: str) -> int:
    text = _one(key, texts)
    least = 0 if key == RATE and mode == OPENTELEMETRY else LEAST[key]
    if _INTEGER.fullmatch(text) is None or not least <= int(text) <= MOST:
        raise InvalidArgument(f"{key}: expected an integer from {least} to {MOST}, got '{_cut(text)}'")
    return int(text)


def _refuse_file(texts: Sequence[str] | None) -> None:
    if texts is not None:
        raise Unimplemented(f"{FILE} cannot be changed over the network, only by the server's option trace_file")


def _check_mode(texts: Sequence[str] | None, mode: str) -> None:
    wanted = mode if texts is None else _one(MODE, texts)
    if wanted not in (TRITON, OPENTELEMETRY):
        raise InvalidArgument(f"{MODE}: expected '{TRITON}' or '{OPENTELEMETRY}', got '{_cut(wanted)}'")
    if wanted != mode:
        raise Unimplemented(f"{MODE} cannot be changed over the network, only by the server's option trace_config")


def _one(key: str, texts: Sequence[str]) -> str:
    if len(texts) != 1:
        raise InvalidArgument(f"{key}: expected one value, got {_listed(texts)}")
    return texts[0]


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(f"'{_cut(text)}'" for text in texts[:4]) + (", ..." if len(texts) > 4 else "")


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "..."
