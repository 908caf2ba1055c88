"""The `torch` converter of grps projects (grps 6.6)."""

from __future__ import annotations

from typing import Any

import torch

from triglot.backends.grps.tensor_converter import TensorConverter
from triglot.core.tensor import Array
from triglot.pb.grps import grps_pb2 as pb


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
