"""A PyTorch program of any kind as a `Model`: names of its tensors, instances, and execution."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch

from triglot.backends.placement import Placement
from triglot.backends.torch.names import ProgramTensor, assign, missing, output_name, positional
from triglot.backends.torch.tensors import EXPECTED, KNOWN, array_of, tensor_of
from triglot.core.errors import Code, Internal, InvalidArgument, ModelLoadError, ServingError, cuda_loss
from triglot.core.tensor import Array
from triglot.core.types import TensorSpec
from triglot.model.config import ModelConfig, TensorConfig
from triglot.model.model import Model

log = logging.getLogger(__name__)

_NO_CUDA = (
    "no CUDA call works in this process until it restarts; with the model's parameter execution: process, "
    "only an instance's own process is lost, and restarts by itself"
)
_cuda_lost = threading.Event()
"""Shared by all models, as a lost CUDA context affects the whole process."""
_SCRIPT_ERROR = re.compile(r"^[\w.]+: (.*)", re.MULTILINE)


class RefusedInputs(Exception):
    """Raised when a program's own check of its inputs fails; the text says which."""


class Program(Protocol):
    """A program on one device.

    `inputs` are None if it accepts any names. `outputs` are None if only each result determines them: by its own
    names, or as `OUTPUT__0`, `OUTPUT__1` and so on.
    """

    @property
    def inputs(self) -> Sequence[ProgramTensor] | None:
        """Its input tensors."""

    @property
    def outputs(self) -> Sequence[ProgramTensor] | None:
        """Its output tensors."""

    @property
    def device(self) -> torch.device:
        """Its device; if it uses several, the first one."""

    def __call__(self, tensors: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Return the outputs for tensors on the CPU. Raise `RefusedInputs`, and the program's exceptions."""

    def may_own(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor's memory may be the program's own, which the next call may change."""

    def close(self) -> None:
        """See `Model`."""


class TorchModel(Model):
    """A program with one instance per item of `programs`.

    It declares the tensors as the program describes them, or else as configured; without either it accepts any.
    """

    platform = "pytorch_libtorch"
    any_output_shapes = True
    inputs_in_place = True  # Each call copies the inputs.

    def __init__(self, file: Path, config: ModelConfig, programs: Sequence[Program]) -> None:
        self._file = file
        self.instances = len(programs)
        self.places_instances = bool(config.instance_groups)
        self._programs = programs
        self._placement = Placement(programs)
        if any(program.device.type == "cuda" for program in programs):
            self.check_ready = _cuda_works
        program = programs[0]
        self._inputs = program.inputs
        try:
            added = _sequence_tensors(config)
            self._input_names = _input_names(config.inputs, added.inputs, program.inputs)
            self._output_names = _OutputNames(config.outputs, added.outputs, program.outputs)
            self._declare(config, added, program)
        except ValueError as error:
            raise ModelLoadError(f"{config.source or file}: {error}", Code.INVALID_ARGUMENT) from None

    def _declare(self, config: ModelConfig, added: _SequenceTensors, program: Program) -> None:
        inputs, outputs = _specs(program.inputs), _specs(program.outputs)
        if outputs:
            self.inputs = _renamed(self._input_names, inputs)
            self.outputs = _renamed(self._output_names.of(list(outputs)), outputs)
        elif config.inputs and config.outputs:
            self.inputs = [_spec("input", tensor, config) for tensor in (*config.inputs, *added.inputs)]
            self.outputs = [_spec("output", tensor, config) for tensor in (*config.outputs, *added.outputs)]
        else:
            self.any_tensors = True

    def infer(self, inputs: Mapping[str, Array]) -> dict[str, Any]:
        """Run the program of the calling thread's instance.

        Raise `InvalidArgument` for inputs that it does not accept, and `Internal` with torch's own reason for a
        failure.
        """
        program = self._placement.current()
        names = self._program_names(inputs)
        gpu = program.device.index if program.device.type == "cuda" else -1
        # Tensors are made inside: the program could not change others in place.
        with torch.inference_mode(), torch.cuda.device(gpu):
            tensors = {names[name]: tensor_of(name, array) for name, array in inputs.items()}
            try:
                # Errors of a GPU may only show when its outputs are copied.
                return self._arrays(program, program(tensors))
            except RefusedInputs as error:
                raise InvalidArgument(str(error)) from None
            except ServingError:
                raise
            except Exception as error:  # Programs may raise any type.
                reason = _reason(error)
                if cuda_loss(error):
                    _cuda_lost.set()
                    reason += f"; {_NO_CUDA}"
                log.warning("%s: PyTorch execute failure: %s", self._file, reason)
                log.debug("%s: full PyTorch error: %s", self._file, error)
                raise Internal(f"PyTorch execute failure: {reason}") from None

    def _arrays(self, program: Program, outputs: Mapping[str, torch.Tensor]) -> dict[str, Array]:
        try:
            renames = self._output_names.of(list(outputs))
        except ValueError as error:
            raise Internal(f"the program's outputs do not match the configuration: {error}") from None
        arrays = {name: array_of(name, outputs[own]) for name, own in renames.items() if own in outputs}
        return {
            name: array.copy() if program.may_own(outputs[renames[name]]) else array
            for name, array in arrays.items()
        }

    def _program_names(self, inputs: Mapping[str, Array]) -> Mapping[str, str]:
        """Return the program's own names of a call's inputs."""
        given = list(inputs)
        if self._input_names:
            if inputs.keys() == self._input_names.keys():
                return self._input_names
        elif self._inputs is None:
            return {name: name for name in given}
        else:
            try:
                own = assign(positional(given), [tensor.name for tensor in self._inputs]).values()
                if not missing(self._inputs, own):
                    return dict(zip(given, own, strict=True))
            except ValueError:
                pass  # Unknown names.
        wanted = self._input_names or map(str, self._inputs or ())
        raise InvalidArgument(f"expected the inputs {', '.join(wanted)}; got {', '.join(given) or 'none'}")

    def close(self) -> None:
        """Frees the programs' memory."""
        for program in set(self._programs):
            program.close()
        if torch.cuda.is_initialized() and _cuda_works():
            # Frees only cached memory, none that other models use.
            torch.cuda.empty_cache()


class _OutputNames:
    """Maps configured names of outputs to the program's own."""

    def __init__(
        self,
        configured: Sequence[TensorConfig],
        added: Sequence[TensorConfig],
        known: Sequence[ProgramTensor] | None,
    ) -> None:
        self._configured = [tensor.name for tensor in configured]
        self._sequence_tensors = [tensor.name for tensor in added]
        self._known = None if known is None else self._make([tensor.name for tensor in known])

    def of(self, own: Sequence[str]) -> Mapping[str, str]:
        """Return the program's own name by configured name. Raise `ValueError` if they do not match."""
        return self._make(own) if self._known is None else self._known

    def _make(self, own: Sequence[str]) -> Mapping[str, str]:
        if not self._configured:
            return {name: name for name in own}
        numbered = list(own) == [output_name(position) for position in range(len(own))]
        in_order = numbered or len(own) == len(self._configured) == 1
        try:
            return assign(self._configured, own, in_order=in_order, added=self._sequence_tensors)
        except ValueError as error:
            got = ", ".join((*self._configured, *self._sequence_tensors))
            raise ValueError(f"output: expected the program's {', '.join(own)}; got {got}: {error}") from None


class _SequenceTensors(NamedTuple):
    """Sequence controls and states: the server adds them, and clients neither send nor receive them."""

    inputs: Sequence[TensorConfig]
    outputs: Sequence[TensorConfig]


def _sequence_tensors(config: ModelConfig) -> _SequenceTensors:
    batching = config.sequence_batching
    if batching is None:
        return _SequenceTensors((), ())
    controls = [TensorConfig(control.name, control.datatype, (1,)) for control in batching.controls]
    states = [TensorConfig(state.input_name, state.datatype, state.dims) for state in batching.states]
    outputs = [
        TensorConfig(state.output_name, state.datatype, state.dims)
        for state in batching.states
        if not state.returned
    ]
    return _SequenceTensors([*controls, *states], outputs)


def _input_names(
    configured: Sequence[TensorConfig], added: Sequence[TensorConfig], inputs: Sequence[ProgramTensor] | None
) -> Mapping[str, str]:
    """Return the program's own name by a call's name; empty if any names are accepted.

    Raise `ValueError`.
    """
    names, more = [tensor.name for tensor in configured], [tensor.name for tensor in added]
    if not configured:
        return {name: name for name in _specs(inputs)}
    if inputs is None:
        return {name: name for name in (*names, *more)}
    try:
        assigned = assign(names, [tensor.name for tensor in inputs], in_order=True, added=more)
        if left := missing(inputs, assigned.values()):
            raise ValueError(f"missing {', '.join(left)}")
    except ValueError as error:
        wanted = ", ".join(map(str, inputs))
        got = ", ".join((*names, *more))
        raise ValueError(f"input: expected the program's {wanted}; got {got}: {error}") from None
    return assigned


def _specs(tensors: Sequence[ProgramTensor] | None) -> dict[str, TensorSpec]:
    return {tensor.name: tensor.spec for tensor in tensors or () if tensor.spec}


def _renamed(names: Mapping[str, str], specs: Mapping[str, TensorSpec]) -> list[TensorSpec]:
    return [TensorSpec(name, specs[own].datatype, specs[own].shape) for name, own in names.items()]


def _spec(kind: str, tensor: TensorConfig, config: ModelConfig) -> TensorSpec:
    if not tensor.datatype or tensor.dims is None:
        raise ValueError(
            f"{kind} '{tensor.name}': expected data_type and dims, which the program does not declare"
        )
    if tensor.datatype not in KNOWN:
        raise ValueError(f"{kind} '{tensor.name}': torch does not support {tensor.datatype}; {EXPECTED}")
    batch = (-1,) if config.max_batch_size > 0 else ()
    return TensorSpec(tensor.name, tensor.datatype, (*batch, *tensor.dims))


def _cuda_works() -> bool:
    return not _cuda_lost.is_set()


def _reason(error: Exception) -> str:
    """Return the first line of torch's reason, without TorchScript's trace of the program that precedes it."""
    text = str(error)
    trace, here, rest = text.rpartition("<--- HERE")
    match = _SCRIPT_ERROR.search(rest) if here and "Traceback of TorchScript" in trace else None
    lines = (match[1] if match else text).strip().splitlines()
    return lines[0] if lines else type(error).__name__
