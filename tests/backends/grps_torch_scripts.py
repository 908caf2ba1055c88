"""TorchScript files for tests. Importing it needs torch."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

SUM = "def forward(self, a: Tensor, b: Tensor):\n    return a + b"
IDENTITY = "def forward(self, x: Tensor):\n    return x"


def script(file: Path, source: str = IDENTITY, **buffers: Any) -> Path:
    """A module with this `forward` and these tensors, saved to the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        # A class of its own: torch keeps what was defined for a class.
        module = type("Scripted", (torch.nn.Module,), {})()
        for name, tensor in buffers.items():
            module.register_buffer(name, tensor)
        scripted = torch.jit.script(module)
        scripted.define(f"{source}\n")
        scripted.save(str(file))
    return file


def trace(file: Path, module: Any, *example: Any, frozen: bool = False) -> Path:
    """A module's trace, saved to the file."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        traced = torch.jit.trace(module.eval(), example)
        (torch.jit.freeze(traced) if frozen else traced).save(str(file))
    return file
