"""The `tensorrt` converter of grps projects (grps 6.6): its tensors are numpy arrays."""

from __future__ import annotations

import numpy as np

from triglot.backends.grps.tensor_converter import TensorConverter
from triglot.core.tensor import Array
from triglot.pb.grps import grps_pb2 as pb


class TrtTensorConverter(TensorConverter):
    """Converts DT_UINT8, DT_INT8, DT_INT32 and DT_FLOAT32 to numpy arrays; results may have any dtype of grps."""

    _dtypes = frozenset({pb.DT_UINT8, pb.DT_INT8, pb.DT_INT32, pb.DT_FLOAT32})
    _tensor_class = np.ndarray

    def _to_tensor(self, array: Array) -> Array:
        """Return the array itself."""
        return array

    def _to_array(self, tensor: Array) -> Array:
        """Return the array itself."""
        return tensor
