"""The `tensorrt` inferer of grps projects (grps 6.6), which raises errors that say what is missing."""

from __future__ import annotations

from typing import Any

from triglot.backends.grps.inferer import ModelInferer
from triglot.core.errors import ModelLoadError, Unimplemented

MISSING = (
    "inferer_type tensorrt: TensorRT engines are not supported. "
    "Run the engine in a customized inferer (it needs a GPU, and: pip install tensorrt), or export the model "
    "as TorchScript or SavedModel (inferer_type torch or tensorflow)"
)


class TrtModelInferer(ModelInferer):
    """The class that projects import. A subclass that overrides all methods can run an engine."""

    def init(self, path: Any, device: Any = None, args: Any = None) -> None:
        """Raises `ModelLoadError`."""
        raise ModelLoadError(f"{path}: {MISSING}")

    def load(self) -> bool:
        """Raises `ModelLoadError`."""
        raise ModelLoadError(MISSING)

    def infer(self, inp: Any, context: Any) -> Any:
        """Raises `Unimplemented`."""
        raise Unimplemented(MISSING)
