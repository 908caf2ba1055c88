"""AOTInductor packages: programs that were compiled for one kind of device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten, treespec_loads

from triglot.backends.torch.exported import result_names
from triglot.backends.torch.model import Program, RefusedInputs, TorchModel
from triglot.backends.torch.names import ProgramTensor, input_name
from triglot.core.errors import Code, ModelLoadError
from triglot.model.config import ModelConfig

_REFUSALS = ("input_handles[", "expected size ")
"""Prefixes of the errors of its own input checks, which are enabled by AOTI_RUNTIME_CHECK_INPUTS=1; a batch of 1
may fail them although it works."""


class CompiledModel(TorchModel):
    """A compiled program.

    Its code does not check its inputs, so the configuration has to declare them, and requests are checked against
    that. Raise `ModelLoadError` without such a configuration.
    """

    platform = "torch_aoti"

    def __init__(self, file: Path, config: ModelConfig, programs: Sequence[Program]) -> None:
        if not config.inputs or not config.outputs:
            raise ModelLoadError(
                f"{config.source or file}: expected inputs and outputs in a config.pbtxt: an AOTInductor "
                "package does not describe its inputs, and does not check them",
                Code.INVALID_ARGUMENT,
            )
        super().__init__(file, config, programs)


def read_compiled(file: Path, device: torch.device | None) -> CompiledProgram:
    """Return the program of `file` on `device`; None is the kind of device that it was compiled for.

    Raise `ModelLoadError` if torch cannot load it, and for a device of another kind.
    """
    if not hasattr(torch._inductor, "aoti_load_package"):
        raise ModelLoadError(
            f"{file}: torch {torch.__version__} cannot load AOTInductor packages; expected torch 2.6 or newer"
        )
    try:
        index = -1 if device is None or device.index is None else device.index
        model = torch._inductor.aoti_load_package(str(file), device_index=index)
        kind = model.get_metadata()["AOTI_DEVICE_KEY"]
        if device is not None and device.type != kind:
            raise ValueError(f"it was compiled for {kind}, and cannot run on {device.type}")
        return CompiledProgram(model, torch.device(kind) if device is None else device)
    except (RuntimeError, ValueError, KeyError) as error:
        raise ModelLoadError(f"{file}: cannot load the AOTInductor package: {error}") from error


class CompiledProgram:
    """Machine code, with a known number of input and output tensors.

    Inputs are named `INPUT__0`, `INPUT__1` and so on; outputs by the keys of a dict, or `OUTPUT__0`, `OUTPUT__1`
    and so on in the order of the tensors in the result.
    """

    def __init__(self, model: Any, device: torch.device) -> None:
        self.device = device
        self._model = model
        self._in_spec, out_spec = map(treespec_loads, model.loader.get_call_spec())
        self.inputs = [ProgramTensor(input_name(position)) for position in range(self._in_spec.num_leaves)]
        count = out_spec.num_leaves
        names = result_names(tree_unflatten(list(range(count)), out_spec), count)
        self.outputs = [ProgramTensor(name) for name in names]

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Run the program. Raise `RefusedInputs` for tensors that fail its checks, if these are enabled."""
        leaves = [tensors[tensor.name].to(self.device) for tensor in self.inputs]
        arguments, named = tree_unflatten(leaves, self._in_spec)
        try:
            result = self._model(*arguments, **named)
        except RuntimeError as error:
            if (text := str(error)).startswith(_REFUSALS):
                raise RefusedInputs(text.splitlines()[0]) from None
            raise
        return {output.name: tensor for output, tensor in zip(self.outputs, tree_flatten(result)[0], strict=True)}

    def may_own(self, _: torch.Tensor) -> bool:
        """Return True, as nothing shows whether the tensor is one of its constants."""
        return True

    def close(self) -> None:
        """Releases the program."""
        self._model = None
