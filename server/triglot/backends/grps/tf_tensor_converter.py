"""The `tensorflow` converter of grps projects (grps 6.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from triglot.backends.grps.gtensors import DTYPES
from triglot.backends.grps.tensor_converter import TensorConverter
from triglot.core.tensor import Array


class TfTensorConverter(TensorConverter):
    """Converts every DataType to TensorFlow tensors; DT_STRING as UTF-8."""

    _dtypes = DTYPES
    _tensor_class = tf.Tensor

    def _to_tensor(self, array: Array) -> Any:
        """Return a tensor of the array's values."""
        return tf.constant(array)

    def _to_array(self, tensor: Any) -> Array:
        """Return the values, copied to the CPU; strings as objects (`bytes`)."""
        # The dtype is for scalars: numpy would strip trailing zero bytes.
        return np.asarray(tensor.numpy(), object if tensor.dtype == tf.string else None)
