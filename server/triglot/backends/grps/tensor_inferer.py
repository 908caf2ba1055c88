"""Base of the built-in inferers (grps 5.2, 6.6): devices, custom operations, no-converter mode."""

from __future__ import annotations

import re
from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from triglot.backends.grps.inferer import ModelInferer
from triglot.backends.grps.messages import is_message
from triglot.backends.grps.tensor_converter import TensorConverter
from triglot.core.errors import ModelLoadError
from triglot.core.types import TensorSpec

Declared = tuple[Sequence[TensorSpec], Sequence[TensorSpec]]
"""Specs of inputs and outputs."""
ORIGINAL = "original"
CUDA = re.compile(r"(?:cuda|gpu)(?::(\d+))?")


class TensorInferer(ModelInferer):
    """Runs a model of one library on tensors.

    If the project has no converter, GrpsMessages are converted with the library's own one. A subclass need not
    call this `__init__`: everything a request needs is set by `init` and `load`.
    """

    _converter: ClassVar[TensorConverter]
    _model: Any = None

    def init(self, path: Any, device: Any = None, args: Any = None) -> None:
        """Receives the model's file or folder, its device, and `customized_op_paths` in `args`, which it loads.

        Raise `ModelLoadError`.
        """
        super().init(path, device, args)
        self._place_on(str(device or "").lower())
        for file in self._operation_files():
            try:
                self._load_operations(file)
            except Exception as error:
                raise ModelLoadError(f"{file}: the operations cannot be loaded: {error}") from error

    def load(self) -> bool:
        """Load the model. Raise `ModelLoadError`."""
        try:
            self._model = self._loaded_model()
        except Exception as error:
            raise ModelLoadError(f"{self._path}: the model cannot be loaded: {error}") from error
        return True

    def infer(self, inp: Any, context: Any) -> Any:
        """Call the model: with a list or tuple as arguments, a dict as keyword arguments, or one other argument.

        A GrpsMessage is converted to tensors first, and the output to a GrpsMessage.
        """
        if is_message(inp):
            answer = self.infer(self._converter.preprocess(inp, context), context)
            return self._converter.postprocess(answer, context)
        if isinstance(inp, dict):
            return self._call_model([], inp)
        return self._call_model(list(inp) if isinstance(inp, list | tuple) else [inp], {})

    def batch_infer(self, inp: Any, contexts: list[Any]) -> Any:
        """As `infer`, for tensors that are already concatenated or for a list of GrpsMessages."""
        if isinstance(inp, list) and inp and is_message(inp[0]):
            answer = self.batch_infer(self._converter.batch_preprocess(inp, contexts), contexts)
            return self._converter.batch_postprocess(answer, contexts)
        # One call for the whole batch: it does not matter which context it gets.
        return self.infer(inp, contexts[0])

    def declared(self) -> Declared | None:
        """Return the inputs and outputs that the model declares; None if it declares none."""
        return None

    @abstractmethod
    def _place_on(self, device: str) -> None:
        """Set the device. Raise `ModelLoadError` for an unknown one."""

    @abstractmethod
    def _load_operations(self, file: Path) -> None:
        """Load the operations of a shared library into the process."""

    @abstractmethod
    def _loaded_model(self) -> Any:
        """Return the model of `_path` on its device."""

    @abstractmethod
    def _call_model(self, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Call the model."""

    def _operation_files(self) -> list[Path]:
        paths = (self._args or {}).get("customized_op_paths")
        if paths is None:
            return []
        if not isinstance(paths, list):
            raise ModelLoadError(f"customized_op_paths: expected a list of files, got {paths!r}")
        files = [Path(path) for path in paths]
        for file in files:
            if not file.is_file():
                raise ModelLoadError(f"customized_op_paths: no such file: {file}")
        return files


def device_name(device: str, cuda: str) -> str:
    """Return `cpu`, or `cuda` (the library's own name) with the number of a GPU, 0 by default.

    Raise `ModelLoadError` for any other device.
    """
    if device == "cpu":
        return device
    if (match := CUDA.fullmatch(device)) is None:
        raise ModelLoadError(f"device: expected cpu, cuda, gpu, cuda:N, gpu:N or {ORIGINAL}, got {device!r}")
    return f"{cuda}:{match[1] or 0}"
