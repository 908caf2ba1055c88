"""Trace settings of the server and of single models: which requests are traced, and how (spec 3.11)."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from triglot.config.trace_config import MOST, least_of
from triglot.core.errors import InvalidArgument, Unimplemented

LEVEL, RATE, COUNT, FREQUENCY = "trace_level", "trace_rate", "trace_count", "log_frequency"
FILE, MODE = "trace_file", "trace_mode"
KEYS = (LEVEL, RATE, COUNT, FREQUENCY, FILE, MODE)
OFF, TIMESTAMPS, TENSORS = "OFF", "TIMESTAMPS", "TENSORS"
TRITON, OPENTELEMETRY = "triton", "opentelemetry"
_NUMBERS = {RATE: "rate", COUNT: "count", FREQUENCY: "log-frequency"}
"""The numbers, as the option trace_config calls them."""
_INTEGER = re.compile(r"-?[0-9]{1,10}")

Changes = Mapping[str, Sequence[str] | None]
"""New values by key; None resets a setting."""


@dataclass(frozen=True, slots=True)
class TraceOptions:
    """Trace options at the start of the server.

    Attributes:
        level: Any of `TIMESTAMPS` and `TENSORS`; empty: nothing is traced.
        rate: One of so many requests is traced.
        count: Limit on the number of traces; -1: no limit.
        frequency: Number of traces per file; 0: all traces go to one file.
        mode: Whether traces are written to files or exported as spans.
    """

    file: str = ""
    level: tuple[str, ...] = ()
    rate: int = 1000
    count: int = -1
    frequency: int = 0
    mode: str = TRITON


class Scope:
    """The settings of the server or of a model; a model inherits unset values from its parent, the server.

    The counters of rate and count belong to the scope that sets the value.
    """

    __slots__ = ("_parent", "_seen", "own")

    def __init__(self, own: Mapping[str, Any], parent: Scope | None = None) -> None:
        self.own = dict(own)
        self._parent = parent
        self._seen = 0

    def holder(self, key: str) -> Scope:
        """Return the scope whose value of the key applies."""
        return self if key in self.own or self._parent is None else self._parent

    def value(self, key: str) -> Any:
        """Return the value that applies."""
        return self.holder(key).own[key]

    @property
    def exhausted(self) -> bool:
        """Whether no more requests are traced until a setting changes."""
        return not self.value(LEVEL) or self.value(COUNT) == 0

    def sample(self) -> tuple[str, ...]:
        """Count a request and return the level at which it is traced; empty: not traced."""
        level: tuple[str, ...] = self.value(LEVEL)
        holder = self.holder(COUNT)
        left = holder.own[COUNT]
        if not level or left == 0:
            return ()
        rated = self.holder(RATE)
        rated._seen += 1
        if rated._seen < rated.own[RATE]:
            return ()
        rated._seen = 0
        if left > 0:
            holder.own[COUNT] = left - 1
        return level

    def change(self, values: Mapping[str, Any]) -> None:
        """Set these values."""
        self.own |= values
        self._seen = 0


def scope_of(options: TraceOptions) -> Scope:
    """Return the server's settings at the start."""
    return Scope({LEVEL: options.level, RATE: options.rate, COUNT: options.count, FREQUENCY: options.frequency})


def read_changes(changes: Changes, *, traceable: bool, mode: str = TRITON) -> dict[str, Any]:
    """Return the values of a request; None for those to reset.

    Raise `InvalidArgument` for an unknown key, an invalid value, or a level unless `traceable` (there is a trace
    file or spans are exported); `Unimplemented` for a setting that cannot be changed over the network.
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
    """Return the parts of a level, without OFF. Raise `InvalidArgument`."""
    for text in texts:
        if text not in (OFF, TIMESTAMPS, TENSORS):
            raise InvalidArgument(f"{LEVEL}: expected {OFF}, {TIMESTAMPS} or {TENSORS}, got '{_cut(text)}'")
    if OFF in texts and len(texts) > 1:
        raise InvalidArgument(f"{LEVEL}: expected {OFF} alone, got {_listed(texts)}")
    return tuple(level for level in (TIMESTAMPS, TENSORS) if level in texts)


def _number(key: str, texts: Sequence[str], mode: str) -> int:
    text = _single_value(key, texts)
    least = least_of(_NUMBERS[key], mode)
    if _INTEGER.fullmatch(text) is None or not least <= int(text) <= MOST:
        raise InvalidArgument(f"{key}: expected an integer from {least} to {MOST}, got '{_cut(text)}'")
    return int(text)


def _refuse_file(texts: Sequence[str] | None) -> None:
    if texts is not None:
        raise Unimplemented(f"{FILE} cannot be changed over the network, only by the server's option trace_file")


def _check_mode(texts: Sequence[str] | None, mode: str) -> None:
    wanted = mode if texts is None else _single_value(MODE, texts)
    if wanted not in (TRITON, OPENTELEMETRY):
        raise InvalidArgument(f"{MODE}: expected '{TRITON}' or '{OPENTELEMETRY}', got '{_cut(wanted)}'")
    if wanted != mode:
        raise Unimplemented(f"{MODE} cannot be changed over the network, only by the server's option trace_config")


def _single_value(key: str, texts: Sequence[str]) -> str:
    if len(texts) != 1:
        raise InvalidArgument(f"{key}: expected one value, got {_listed(texts)}")
    return texts[0]


def _listed(texts: Sequence[str]) -> str:
    return ", ".join(f"'{_cut(text)}'" for text in texts[:4]) + (", ..." if len(texts) > 4 else "")


def _cut(text: str) -> str:
    return text if len(text) <= 100 else text[:100] + "..."
