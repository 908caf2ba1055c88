"""Maps names of tensors to a program's inputs and outputs.

Names in a configuration have the same meaning as in Triton: they are the program's own, or all have their position
(`INPUT__0`), or they are in the program's order. Controls and states of sequences have their position, regardless
of the other names.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from triglot.core.types import TensorSpec

_POSITION = re.compile(r".*__([0-9]{1,6})", re.DOTALL)
_UNNAMED = re.compile(r"input_([0-9]{1,6})")
"""Names that the server gives to unnamed grps tensors."""


@dataclass(frozen=True, slots=True)
class ProgramTensor:
    """An input or output of a program. `optional`: it may be omitted; `spec`: None if unknown."""

    name: str
    spec: TensorSpec | None = None
    optional: bool = False

    def __str__(self) -> str:
        return f"{self.name} (optional)" if self.optional else self.name


def input_name(position: int) -> str:
    """Return the name of an unnamed input."""
    return f"INPUT__{position}"


def output_name(position: int) -> str:
    """Return the name of an unnamed output."""
    return f"OUTPUT__{position}"


def missing(inputs: Iterable[ProgramTensor], given: Iterable[str]) -> list[str]:
    """Return the required inputs that are not `given`."""
    present = set(given)
    return [tensor.name for tensor in inputs if not tensor.optional and tensor.name not in present]


def assign(
    names: Sequence[str], own: Sequence[str], *, in_order: bool = False, added: Sequence[str] = ()
) -> dict[str, str]:
    """Map the names to the program's own ones: all are its own, or all are `<name>__<index>`.

    `in_order`: other names stand for the program's first ones, in its order. `added`: further names, mapped
    separately. Raise `ValueError` for names that are neither, and for an index that does not exist or is a
    duplicate.
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
    """Return the names of a request's inputs; placeholders for unnamed ones become `INPUT__<index>`."""
    if len(names) == 1 and not names[0]:
        return [input_name(0)]
    matches = [_UNNAMED.fullmatch(name) for name in names]
    return [input_name(int(match[1])) for match in matches if match] if all(matches) else list(names)
