"""Reads class labels, the files that a configuration's `label_filename` names (spec 2.7)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from triglot.core.errors import Code, ModelLoadError
from triglot.model.config import ModelConfig

MAX_LABEL_BYTES = 16 * 1024 * 1024
"""Limit on the size of one file."""


def read_labels(config: ModelConfig) -> dict[str, Sequence[bytes]]:
    """Returns the labels of each output with a label file, one per line; blocks. Raises `ModelLoadError`."""
    return {tensor.name: _lines(tensor.label_file) for tensor in config.outputs if tensor.label_file is not None}


def _lines(file: Path) -> list[bytes]:
    try:
        with file.open("rb") as opened:
            content = opened.read(MAX_LABEL_BYTES + 1)
    except OSError as error:
        raise ModelLoadError(f"{file}: label_filename: {error.strerror}", Code.INVALID_ARGUMENT) from None
    if len(content) > MAX_LABEL_BYTES:
        text = f"{file}: label_filename: expected at most {MAX_LABEL_BYTES} bytes"
        raise ModelLoadError(text, Code.INVALID_ARGUMENT)
    # Not splitlines(): a label may contain other line separators.
    return [line.removesuffix(b"\r") for line in content.removesuffix(b"\n").split(b"\n")]
