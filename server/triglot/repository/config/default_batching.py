"""Default batching of ONNX models without a configuration, as in Triton's onnxruntime backend."""

from __future__ import annotations

from triglot.model.model import Model, signatures_of
from triglot.model.scheduling import DynamicBatching
from triglot.repository.scan.source import ModelFiles

BACKEND = "onnx"
"""The only backend whose files declare which dims are variable."""


class DefaultBatching:
    """Sets `max_batch_size`, and dynamic batching unless a scheduling is configured. An `Adapt` of the loader.

    Applies to models whose tensors are not configured and all begin with a variable dim.
    """

    def __init__(self, max_batch_size: int) -> None:
        self._max_batch_size = max_batch_size

    def __call__(self, model: Model, files: ModelFiles) -> None:
        """Completes a model before it serves."""
        config = files.config
        if not self._max_batch_size or model.max_batch_size or files.backend != BACKEND:
            return
        if config.max_batch_size or config.inputs or config.outputs:
            return
        signatures = signatures_of(model).values()
        specs = [spec for signature in signatures for spec in (*signature.inputs, *signature.outputs)]
        if any(spec.shape is None or spec.shape[:1] != (-1,) for spec in specs):
            return
        model.max_batch_size = self._max_batch_size
        if self._max_batch_size > 1 and not (config.dynamic_batching or config.sequence_batching):
            model.dynamic_batching = DynamicBatching()
