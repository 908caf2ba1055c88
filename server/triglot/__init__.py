"""One inference server for KServe V2, TensorFlow Serving and grps clients."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from triglot.core.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ServingError,
    Unavailable,
    Unimplemented,
)
from triglot.core.model import Model
from triglot.core.types import Call, TensorSpec
from triglot.version import __version__

if TYPE_CHECKING:
    from triglot.app import Server
    from triglot.config import Config

__all__ = [
    "Call",
    "Cancelled",
    "Config",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "Model",
    "NotFound",
    "Server",
    "ServingError",
    "TensorSpec",
    "Unavailable",
    "Unimplemented",
    "__version__",
]

_LAZY = {"Config": "triglot.config", "Server": "triglot.app"}


def __getattr__(name: str) -> Any:
    # A model file imports this package too: it must not pay for the transports.
    if name not in _LAZY:
        raise AttributeError(f"module 'triglot' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)
