"""Programs saved by torch.export."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils._pytree import tree_flatten, tree_unflatten

from triglot.backends.torch.archive import check_pickles
from triglot.backends.torch.model import RefusedInputs
from triglot.backends.torch.names import ProgramTensor, output_name
from triglot.backends.torch.tensors import DATATYPE_OF, EXPECTED
from triglot.core.errors import ModelLoadError
from triglot.core.types import TensorSpec
from triglot.model.signature import shape_text

_GUARDS = ("Guard failed: ", "Expected input at ")
"""Prefixes of the errors of torch's own shape checks: since 2.8, and before."""
_loading = threading.Lock()
"""Held while torch.export reads a program: it keeps its state in a global variable."""


def read_exported(file: Path, device: torch.device | None) -> ExportedProgram:
    """Return the program of `file`, moved to `device`; None leaves it where it was saved.

    Raise `ModelLoadError` if torch cannot load or move it, and for unsupported inputs and outputs.
    """
    try:
        check_pickles(file)
        with _loading, file.open("rb") as stream:
            # torch warns of a path with another suffix.
            program = torch.export.load(str(file) if file.suffix == ".pt2" else stream)
            if device is not None and _devices(program) - {device}:
                program = _moved(program, device)
            return ExportedProgram(program)
    except (RuntimeError, ValueError, TypeError, AssertionError) as error:
        raise ModelLoadError(f"{file}: cannot load the exported program: {error}") from error


class ExportedProgram:
    """A graph with fully described tensors.

    Inputs are named after the arguments; those in a dict or list have composed names: `d_key`, `l_0`. Outputs are
    named by the keys of a dict, or `OUTPUT__0`, `OUTPUT__1`, … in the order of the tensors in the result.
    Raise `ValueError` for inputs and outputs that are neither tensors nor constants, and for unsupported
    datatypes.
    """

    def __init__(self, program: Any) -> None:
        nodes = {node.name: node.meta.get("val") for node in program.graph.nodes}
        self._leaves = [
            _leaf(spec.arg, nodes)
            for spec in program.graph_signature.input_specs
            if spec.kind is InputKind.USER_INPUT
        ]
        self._in_spec = program.call_spec.in_spec
        self.inputs = [ProgramTensor(leaf.name, leaf.spec(leaf.name)) for leaf in self._leaves if leaf.name]
        # They may be on several devices if the program stays where it was saved.
        self.device = next((leaf.value.device for leaf in self._leaves if leaf.name), torch.device("cpu"))
        self._results = _results(program, nodes)
        self.outputs = [tensor for tensor in self._results if tensor is not None]
        self._program = program
        self._module = program.module()
        # Guards have been made from them; nothing else needs them, and they may occupy GPU memory.
        program._example_inputs = None
        state = [*self._module.parameters(), *self._module.buffers(), *program.constants.values()]
        self._memory = {
            tensor.untyped_storage().data_ptr() for tensor in state if isinstance(tensor, torch.Tensor)
        }

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Run the graph. Raise `RefusedInputs` for shapes that it was not exported for."""
        leaves = [leaf.fill(tensors) for leaf in self._leaves]
        arguments, named = tree_unflatten(leaves, self._in_spec)
        try:
            result = self._module(*arguments, **named)
        except (AssertionError, RuntimeError) as error:
            if str(error).startswith(_GUARDS):
                raise RefusedInputs(str(error)) from None
            raise
        tensors_out = zip(self._results, tree_flatten(result)[0], strict=True)
        return {known.name: tensor for known, tensor in tensors_out if known is not None}

    def may_own(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor shares memory with a parameter, a buffer or a constant of the program."""
        return tensor.untyped_storage().data_ptr() in self._memory

    def close(self) -> None:
        """Frees the memory of the weights."""
        # Program and graph have reference cycles: their memory would stay until the next garbage collection.
        self._program.state_dict.clear()
        self._program.constants.clear()
        for module in [*self._module.modules()]:
            vars(module).clear()


@dataclass(frozen=True, slots=True)
class _Leaf:
    """A leaf of the arguments or results: a tensor's node name and value, or a constant, which has no name."""

    name: str
    value: Any

    def spec(self, name: str) -> TensorSpec:
        """Return the spec of the tensor. Raise `ValueError` for an unsupported datatype."""
        if self.value.dtype not in DATATYPE_OF:
            raise ValueError(f"'{name}' is {self.value.dtype}; {EXPECTED}")
        shape = [dim if isinstance(dim, int) else -1 for dim in self.value.shape]
        return TensorSpec(name, DATATYPE_OF[self.value.dtype], shape)

    def fill(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        """Return the tensor of its name, or the constant. Raise `RefusedInputs` for another number of dims."""
        if not self.name:
            return self.value
        tensor = tensors[self.name]
        # torch's own checks do not cover the number of dims.
        if tensor.dim() != self.value.dim():
            raise RefusedInputs(
                f"input '{self.name}': expected {self.value.dim()} dims, got shape {shape_text(tensor.shape)}"
            )
        return tensor.to(self.value.device)


def _leaf(argument: Any, nodes: Mapping[str, Any]) -> _Leaf:
    if isinstance(argument, TensorArgument):
        return _Leaf(argument.name, nodes[argument.name])
    if isinstance(argument, ConstantArgument):
        return _Leaf("", argument.value)
    raise ValueError(f"{argument.name!r} is {type(argument).__name__}; expected tensors and constants")


def _results(program: Any, nodes: Mapping[str, Any]) -> list[ProgramTensor | None]:
    """Return the tensors of a result, None for each None in it. Raise `ValueError` for anything else."""
    specs = program.graph_signature.output_specs
    leaves = [_leaf(spec.arg, nodes) for spec in specs if spec.kind is OutputKind.USER_OUTPUT]
    if others := [leaf.value for leaf in leaves if not leaf.name and leaf.value is not None]:
        raise ValueError(f"one of its results is {type(others[0]).__name__}; expected tensors")
    names = result_names(tree_unflatten(list(range(len(leaves))), program.call_spec.out_spec), len(leaves))
    return [
        ProgramTensor(name, leaf.spec(name)) if leaf.name else None
        for name, leaf in zip(names, leaves, strict=True)
    ]


def result_names(tree: Any, count: int) -> list[str]:
    """Return the names of a result's leaves; in `tree` each leaf is its own position."""
    if isinstance(tree, Mapping) and all(isinstance(position, int) for position in tree.values()):
        keys = {position: key for key, position in tree.items()}
        if all(isinstance(key, str) for key in keys.values()):
            return [keys[position] for position in range(count)]
    return [output_name(position) for position in range(count)]


def _devices(program: Any) -> set[torch.device]:
    """Return the devices of the graph's tensors."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    return {leaf.device for leaf in tree_flatten(values)[0] if isinstance(leaf, torch.Tensor)}


def _moved(program: Any, device: torch.device) -> Any:
    """Return the program on `device`. Raise `ValueError` if torch cannot move it."""
    try:
        passes = importlib.import_module("torch.export.passes")
    except ModuleNotFoundError:
        raise ValueError(
            f"torch {torch.__version__} cannot move the program to {device}; install a newer torch, or use "
            f"KIND_MODEL"
        ) from None
    return passes.move_to_device_pass(program, device)
