"""The `torch` inferer and converter of grps projects: TorchScript files (grps 6.6)."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from triglot.backends.grps.tensor_converter import TensorConverter
from triglot.backends.grps.tensor_inferer import ORIGINAL, TensorInferer, device_name
from triglot.core.errors import ModelLoadError
from triglot.core.tensor import Array
from triglot.pb.grps import grps_pb2 as pb
from triglot.platform.cpus import thread_limit

if limit := thread_limit():
    torch.set_num_threads(min(limit, torch.get_num_threads()))


class TorchTensorConverter(TensorConverter):
    """Converts every DataType but DT_STRING to torch tensors on the CPU; the inferer moves them to its device."""

    _dtypes = frozenset(
        {
            pb.DT_UINT8,
            pb.DT_INT8,
            pb.DT_INT16,
            pb.DT_INT32,
            pb.DT_INT64,
            pb.DT_FLOAT16,
            pb.DT_FLOAT32,
            pb.DT_FLOAT64,
        }
    )
    _tensor_class = torch.Tensor

    def _to_tensor(self, array: Array) -> Any:
        """Return a tensor that shares the array's memory."""
        return torch.from_numpy(array)

    def _to_array(self, tensor: Any) -> Array:
        """Return the values, copied to the CPU. bfloat16 is widened, as numpy lacks it."""
        array: Array = (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy(force=True)
        return array


class TorchModelInferer(TensorInferer):
    """Runs a TorchScript model; inputs are moved to its device.

    `device` is a device, or `original_<device>`: the model then stays on the devices that it was saved on, and its
    inputs are moved to that device.
    """

    _converter = TorchTensorConverter()
    _inp_device = "cpu"

    def _place_on(self, device: str) -> None:
        """Set the device. Raise `ModelLoadError` for an unknown one."""
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
        """Load the operations of a shared library into torch."""
        torch.ops.load_library(str(file))

    def _loaded_model(self) -> Any:
        """Return the TorchScript module in evaluation mode."""
        with warnings.catch_warnings():
            # "torch.jit is deprecated", but grps projects use it.
            warnings.simplefilter("ignore", DeprecationWarning)
            model = torch.jit.load(str(self._path), None if self._device == ORIGINAL else self._device)
        return model.eval()

    def _call_model(self, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Call the module, without gradients."""
        # Not `inference_mode`, which forbids in-place changes of the outputs, as projects may make.
        with torch.no_grad():
            return self._model(
                *map(self._placed, arguments), **{name: self._placed(value) for name, value in named.items()}
            )

    def _placed(self, value: Any) -> Any:
        return value.to(self._inp_device) if isinstance(value, torch.Tensor) else value
