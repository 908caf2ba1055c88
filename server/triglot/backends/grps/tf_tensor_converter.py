"""The converter `tensorflow` of grps projects (grps 6.6)."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from triglot.backends.grps.gtensors import DTYPES
from triglot.backends.grps.tensor_converter import TensorConverter
from triglot.core.tensor import Array


class TfTensorConverter(TensorConverter):
    """Every DataType as TensorFlow tensors; DT_STRING as UTF-8."""

    _dtypes = DTYPES
    _tensor_class = tf.Tensor

    def _to_tensor(self, array: Array) -> Any:
        """A tensor of the array's values."""
        return tf.constant(array)

    def _to_array(self, tensor: Any) -> Array:
        """The values, brought to the CPU; strings as objects (`bytes`)."""
        # A scalar; numpy would cut the zeros at the end of bytes.
        return np.asarray(tensor.numpy(), object if tensor.dtype == tf.string else None)
