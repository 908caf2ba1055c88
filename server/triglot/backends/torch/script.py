"""TorchScript programs."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from triglot.backends.torch.names import ProgramTensor, output_name
from triglot.core.errors import ModelLoadError

RESULTS = "expected a Tensor, a Tuple or List of Tensors, or a Dict[str, Tensor]"
_ATTRIBUTE = re.compile(r': [^=]*Tensor[^=]* = prim::GetAttr\[name="([^"]+)"\]')


def read_script(file: Path, device: torch.device | None) -> ScriptProgram:
    """Return the program of `file`, moved to `device`; None leaves it where it was saved.

    Raise `ModelLoadError` if torch cannot load it, and for inputs and outputs that are not tensors.
    """
    try:
        with warnings.catch_warnings():
            # "torch.jit is deprecated", but these files need it.
            warnings.simplefilter("ignore", DeprecationWarning)
            module = torch.jit.load(str(file), device)
        return ScriptProgram(module.eval(), device)
    except (RuntimeError, ValueError) as error:
        raise ModelLoadError(f"{file}: cannot load the TorchScript program: {error}") from error


class ScriptProgram:
    """A module with a `forward` of tensors, whose datatypes and shapes are unknown.

    Raise `ValueError` for any other `forward`.
    """

    def __init__(self, module: Any, device: torch.device | None) -> None:
        if not hasattr(module, "forward"):
            raise ValueError("the program has no method forward")
        self._module = module
        schema = module.forward.schema
        self.inputs = _inputs(schema.arguments[1:])
        self.outputs = _outputs(schema.returns[0].type)
        state = [*module.named_parameters(), *module.named_buffers()]
        first = state[0][1].device if state else torch.device("cpu")
        self.device = first if device is None else device
        self._memory = {tensor.untyped_storage().data_ptr() for _, tensor in state}
        graph = str(module.inlined_graph)
        known = {name.rpartition(".")[2] for name, _ in state}
        self._may_own_any = "prim::SetAttr" in graph or not known.issuperset(_ATTRIBUTE.findall(graph))

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Call `forward`. Raise its exceptions, and `TypeError` for a result without tensors."""
        placed = {name: tensor.to(self.device) for name, tensor in tensors.items()}
        return _named(self._module(placed) if self.inputs is None else self._module(**placed))

    def may_own(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor may share memory with a parameter, a buffer or any attribute of the module."""
        return self._may_own_any or tensor.untyped_storage().data_ptr() in self._memory

    def close(self) -> None:
        """Releases the module."""
        self._module = None


def _inputs(arguments: Sequence[Any]) -> Sequence[ProgramTensor] | None:
    """Return the arguments that are tensors; None for a single argument that is a dict of tensors.

    Others keep their defaults. Raise `ValueError` for others without a default.
    """
    needed = [argument for argument in arguments if not argument.has_default_value()]
    if len(needed) == 1 and needed[0].type.annotation_str == "Dict[str, Tensor]":
        return None
    for argument in needed:
        if not _takes_tensor(argument.type):
            raise ValueError(
                f"its argument {argument.name!r} is {argument.type.annotation_str}; expected Tensors, or one "
                f"Dict[str, Tensor], and a default for anything else"
            )
    return [
        ProgramTensor(argument.name, optional=argument.has_default_value())
        for argument in arguments
        if _takes_tensor(argument.type)
    ]


def _takes_tensor(kind: Any) -> bool:
    return bool(torch._C.TensorType.get().isSubtypeOf(kind))


def _outputs(kind: Any) -> Sequence[ProgramTensor] | None:
    """Return the outputs; None for a type without a fixed number of tensors.

    Raise `ValueError` for a type that contains anything but tensors.
    """
    if kind.kind() == "AnyType" or kind.annotation_str in ("List[Tensor]", "Dict[str, Tensor]"):
        return None
    parts = kind.elements() if kind.kind() == "TupleType" else [kind]
    if not parts or not all(part.annotation_str in ("Tensor", "Optional[Tensor]") for part in parts):
        raise ValueError(f"its result is {kind.annotation_str}; {RESULTS}")
    return [
        ProgramTensor(output_name(position), optional=part.annotation_str != "Tensor")
        for position, part in enumerate(parts)
    ]


def _named(result: Any) -> Mapping[str, torch.Tensor]:
    """Return the tensors of a result by name, without None values."""
    if isinstance(result, Mapping):
        named = dict(result)
    else:
        values = result if isinstance(result, tuple | list) else [result]
        named = {output_name(position): value for position, value in enumerate(values) if value is not None}
    for name, value in named.items():
        if not isinstance(name, str) or not isinstance(value, torch.Tensor):
            raise TypeError(f"result {name!r} is {type(value).__name__}; {RESULTS}")
    return named
