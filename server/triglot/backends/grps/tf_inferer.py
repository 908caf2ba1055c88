"""The inferer `tensorflow` of grps projects: SavedModels (grps 6.6)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import tensorflow as tf
from tensorflow.python.saved_model.loader_impl import parse_saved_model

from triglot.backends.grps.tensor_inferer import ORIGINAL, TensorInferer, device_name
from triglot.backends.grps.tf_tensor_converter import TfTensorConverter
from triglot.core.errors import InvalidArgument
from triglot.model.signature import DEFAULT_SIGNATURE

TAGS = ["serve"]


class TfModelInferer(TensorInferer):
    """Runs a SavedModel, on a device or, with `original`, where TensorFlow puts it.

    A model that can be called is called (Keras models, a `tf.Module` with `__call__`), and answers with what its
    function returns. Any other, and one whose function does not have the names of the inputs, runs the signature
    `serving_default`, and answers with a dict; unnamed inputs are the signature's in alphabetical order.
    """

    _converter = TfTensorConverter()

    def _place_on(self, device: str) -> None:
        """Takes the device's name. Raises `ModelLoadError` for one that there is not."""
        self._device = device if device == ORIGINAL else device_name(device, "gpu")

    def _load_operations(self, file: Path) -> None:
        """Adds the operations of a shared library to TensorFlow's."""
        tf.load_op_library(str(file))

    def _loaded_model(self) -> Any:
        """The SavedModel's object."""
        folder = str(self._path)
        # Tags are needed only to choose, and a model may have been saved with none.
        tags = TAGS if len(parse_saved_model(folder).meta_graphs) > 1 else None
        with self._on_device():
            model = tf.saved_model.load(folder, tags)
        if not callable(model) and DEFAULT_SIGNATURE not in model.signatures:
            raise ValueError(f"it can neither be called nor has it a signature {DEFAULT_SIGNATURE!r}")
        return model

    def _call_model(self, arguments: list[Any], named: dict[str, Any]) -> Any:
        """Calls the model or its signature. Raises `InvalidArgument` for other inputs than the signature's."""
        with self._on_device():
            if self._takes(named):
                return self._model(*arguments, **named)
            signature = self._model.signatures[DEFAULT_SIGNATURE]
            names = sorted(signature.structured_input_signature[1])
            if arguments and len(arguments) == len(names):
                named = dict(zip(names, arguments, strict=True))
            if sorted(named) != names:
                got = f"{len(arguments)} without names" if arguments else ", ".join(named)
                raise InvalidArgument(
                    f"expected the inputs {', '.join(names)} of the signature {DEFAULT_SIGNATURE!r}, got {got}"
                )
            return signature(**{name: tf.convert_to_tensor(value) for name, value in named.items()})

    def _takes(self, named: dict[str, Any]) -> bool:
        """Whether to call the model itself with these names."""
        if not callable(self._model):
            return False
        # Only a restored function tells its parameters.
        function_type = getattr(self._model.__call__, "function_type", None)
        if function_type is None or DEFAULT_SIGNATURE not in self._model.signatures:
            return True
        return bool(named.keys() <= function_type.parameters.keys())

    def _on_device(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._device == ORIGINAL else tf.device(self._device)
