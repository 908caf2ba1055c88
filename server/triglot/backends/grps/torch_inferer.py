"""The inferer `torch` of grps projects: TorchScript files (grps 6.6)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from triglot.backends.grps.tensor_inferer import ORIGINAL, TensorInferer, device_name
from triglot.backends.grps.torch_tensor_converter import TorchTensorConverter
from triglot.core.errors import ModelLoadError


class TorchModelInferer(TensorInferer):
    """Runs a TorchScript model; inputs are moved to its device.

    `device` is a place, or `original_<place>`: the model stays on the devices that it was saved on, and its inputs
    go to that place.
    """

    _converter = TorchTensorConverter()
    _inp_device = "cpu"

    def _place_on(self, device: str) -> None:
        """Takes the device's name. Raises `ModelLoadError` for one that there is not."""
        kept, _, inputs = device.partition("_")
        if kept != ORIGINAL:
            self._device = self._inp_device = device_name(device, "cuda")
            return
        self._device = ORIGINAL
        try:
            self._inp_device = device_name(inputs, "cuda")
        except ModelLoadError:
            raise ModelLoadError(
                f"inp_device: device {ORIGINAL} needs cpu, cuda, gpu, cuda:N or gpu:N, got {inputs!r}"
            ) from None

    def _load_operations(self, file: Path) -> None:
        """Adds the operations of a shared library to torch's."""
        torch.ops.load_library(str(file))

    def _loaded_model(self) -> Any:
        """The TorchScript module in evaluation mode."""
        with warnings.catch_warnings():
            # "torch.jit is deprecated": it is what these projects are made of.
            warnings.simplefilter("ignore", DeprecationWarning)
            model = torch.jit.load(str(self._path), None if self._device == ORIGINAL else self._device)
        return model.eval()

    def _call_model(self, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Calls the module, without gradients."""
        # Not `inference_mode`: a project may change what it gets in place, which that forbids.
        with torch.no_grad():
            return self._model(
                *map(self._placed, arguments), **{name: self._placed(value) for name, value in named.items()}
            )

    def _placed(self, value: Any) -> Any:
        return value.to(self._inp_device) if isinstance(value, torch.Tensor) else value
