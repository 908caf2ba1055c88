"""The `tensorflow` inferer and converter of grps projects: SavedModels (grps 6.6)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.saved_model.loader_impl import parse_saved_model

from triglot.backends.grps.gtensors import DTYPES
from triglot.backends.grps.tensor_converter import TensorConverter, named_parts
from triglot.backends.grps.tensor_inferer import ORIGINAL, Declared, TensorInferer, device_name
from triglot.core.errors import Internal, InvalidArgument
from triglot.core.tensor import Array, datatype_of
from triglot.core.types import TensorSpec
from triglot.model.grps_types import LISTS
from triglot.model.signature import DEFAULT_SIGNATURE

TAGS = ["serve"]
_DATATYPES = frozenset(row.datatype for row in LISTS.values())


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


class TfModelInferer(TensorInferer):
    """Runs a SavedModel on a device or, with `original`, where TensorFlow places it.

    A callable model (Keras models, a `tf.Module` with `__call__`) is called and returns what its function returns.
    A model that is not callable, or whose function lacks the names of the inputs, runs the signature
    `serving_default` and returns a dict; unnamed inputs are assigned to the signature's in alphabetical order.
    """

    _converter = TfTensorConverter()

    def _place_on(self, device: str) -> None:
        """Set the device. Raise `ModelLoadError` for an unknown one."""
        self._device = device if device == ORIGINAL else device_name(device, "gpu")

    def _load_operations(self, file: Path) -> None:
        """Load the operations of a shared library into TensorFlow."""
        tf.load_op_library(str(file))

    def _loaded_model(self) -> Any:
        """Return the SavedModel's object."""
        folder = str(self._path)
        # Tags only select among several graphs, and a model may have been saved without any.
        tags = TAGS if len(parse_saved_model(folder).meta_graphs) > 1 else None
        with self._on_device():
            model = tf.saved_model.load(folder, tags)
        if not callable(model) and DEFAULT_SIGNATURE not in model.signatures:
            raise ValueError(f"it is not callable and has no signature {DEFAULT_SIGNATURE!r}")
        return model

    def declared(self) -> Declared | None:
        """Return the inputs of `serving_default`, and the outputs of the function that these inputs call."""
        signature = self._model.signatures.get(DEFAULT_SIGNATURE)
        if signature is None:
            return None
        inputs = signature.structured_input_signature[1]
        outputs = signature.structured_outputs
        if self._takes(inputs):
            functions: Sequence[Any] = getattr(self._model.__call__, "concrete_functions", ())
            if len(functions) != 1:
                return None
            outputs = functions[0].structured_outputs
        try:
            return _specs(inputs), _specs(named_parts(outputs, tf.TensorSpec))
        except (Internal, TypeError, ValueError):
            return None

    def _call_model(self, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Call the model or its signature. Raise `InvalidArgument` for inputs that the signature lacks."""
        with self._on_device():
            if self._takes(named):
                return self._model(*arguments, **named)
            signature = self._model.signatures[DEFAULT_SIGNATURE]
            names = sorted(signature.structured_input_signature[1])
            if arguments and len(arguments) == len(names):
                named = dict(zip(names, arguments, strict=True))
            if sorted(named) != names:
                got = f"{len(arguments)} unnamed" if arguments else ", ".join(named)
                raise InvalidArgument(
                    f"expected the inputs {', '.join(names)} of the signature {DEFAULT_SIGNATURE!r}, got {got}"
                )
            return signature(**{name: tf.convert_to_tensor(value) for name, value in named.items()})

    def _takes(self, named: dict[str, Any]) -> bool:
        """Whether to call the model itself with these keyword arguments."""
        if not callable(self._model):
            return False
        # Only a restored function has known parameters.
        function_type = getattr(self._model.__call__, "function_type", None)
        if function_type is None or DEFAULT_SIGNATURE not in self._model.signatures:
            return True
        return bool(named.keys() <= function_type.parameters.keys())

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._device == ORIGINAL else tf.device(self._device)


def _specs(tensors: Mapping[str, Any]) -> list[TensorSpec]:
    """Return the specs. Raise `TypeError` or `ValueError` for datatypes that grps lacks."""
    specs = []
    for name, tensor in tensors.items():
        datatype = datatype_of(np.empty(0, tensor.dtype.as_numpy_dtype))
        if datatype not in _DATATYPES:
            raise ValueError(f"{name}: grps does not support tensors of {datatype}")
        shape = tensor.shape.as_list() if tensor.shape.rank is not None else None
        specs.append(TensorSpec(name, datatype, shape and [-1 if dim is None else dim for dim in shape]))
    return specs
