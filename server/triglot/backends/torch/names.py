"""Which of a program's inputs or outputs a name means.

Strategy: names in a configuration are read as Triton reads them: they are the program's own, or all of them say
their position (`INPUT__0`), or they stand in the program's order. What the server adds for sequences says its
position whatever clients' tensors are called.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triglot.core.types import TensorSpec

_POSITION = re.compile(r".*__([0-9]{1,6})", re.DOTALL)
_UNNAMED = re.compile(r"input_([0-9]{1,6})")
"""What grps' tensors without a name are called."""


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """An input or output of a program. `optional`: may be left out; `spec`: None where it does not say."""

    name: str
    spec: TensorSpec | None = None
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name} (optional)" if self.optional else self.name


def input_name(position: int) -> str:
    """What an input without a name of its own is called."""
    return f"INPUT__{position}"


def output_name(position: int) -> str:
    """What an output without a name of its own is called."""
    return f"OUTPUT__{position}"


def missing(inputs: Iterable[ProgramTensor], given: Iterable[str]) -> list[str]:
    """The inputs that a call needs, and that are not given."""
    there = set(given)
    return [tensor.name for tensor in inputs if not tensor.optional and tensor.name not in there]


def assign(
    names: Sequence[str], own: Sequence[str], *, in_order: bool = False, added: Sequence[str] = ()
) -> dict[str, str]:
    """The program's own name for each of the names: they are its own, or `<name>__<index>`, all of them.

    `in_order`: other names mean the program's first ones, in its order. `added`: more names, by themselves.
    Raises `ValueError` for names that are neither, and for an index that there is not, or twice.
    """
    assigned = _assign(names, own, in_order) | _assign(added, own, False)
    if len(set(assigned.values())) < len(names) + len(added):
        raise ValueError("two names have the same index")
    return assigned


def _assign(names: Sequence[str], own: Sequence[str], in_order: bool) -> dict[str, str]:
    if set(own).issuperset(names):
        return {name: name for name in names}
    matches = [_POSITION.fullmatch(name) for name in names]
    positions = [int(match[1]) for match in matches if match]
    if len(positions) < len(names):
        if not in_order:
            raise ValueError("expected the program's own names, or <name>__<index> for all")
        positions = list(range(len(names)))
    if any(position >= len(own) for position in positions):
        raise ValueError(f"the program has only {len(own)}")
    return {name: own[position] for name, position in zip(names, positions, strict=True)}


def positional(names: Sequence[str]) -> list[str]:
    """The names of a request's inputs; those that only say that there was none become `INPUT__<index>`."""
    if len(names) == 1 and not names[0]:
        return [input_name(0)]
    matches = [_UNNAMED.fullmatch(name) for name in names]
    return [input_name(int(match[1])) for match in matches if match] if all(matches) else list(names)
