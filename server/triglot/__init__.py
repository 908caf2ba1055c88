"""An inference server for KServe V2, TensorFlow Serving and grps clients."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from triglot.core.errors import (
    Cancelled,
    Code,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    ModelLoadError,
    NotFound,
    QueueFull,
    ServingError,
    Unavailable,
    Unimplemented,
)
from triglot.core.types import Answer, TensorSpec
from triglot.version import __version__

if TYPE_CHECKING:
    from triglot.config.options import Config, ConfigError
    from triglot.core.call import Call
    from triglot.inline import running, serve
    from triglot.model.ensemble import Ensemble
    from triglot.model.model import Model
    from triglot.model.ray_options import RayOptions
    from triglot.model.scheduling import (
        ControlInput,
        DirectStrategy,
        DynamicBatching,
        InitialState,
        OldestStrategy,
        QueuePolicy,
        SequenceBatching,
        SequenceState,
        Step,
    )
    from triglot.model.signature import Signature
    from triglot.model.tensor_types import (
        BFloat16,
        Bool,
        Bytes,
        Float16,
        Float32,
        Float64,
        Int8,
        Int16,
        Int32,
        Int64,
        UInt8,
        UInt16,
        UInt32,
        UInt64,
    )
    from triglot.model.tf_example import parse_examples
    from triglot.server import Server

__all__ = [
    "Answer",
    "BFloat16",
    "Bool",
    "Bytes",
    "Call",
    "Cancelled",
    "Code",
    "Config",
    "ConfigError",
    "ControlInput",
    "DeadlineExceeded",
    "DirectStrategy",
    "DynamicBatching",
    "Ensemble",
    "FailedPrecondition",
    "Float16",
    "Float32",
    "Float64",
    "InitialState",
    "Int8",
    "Int16",
    "Int32",
    "Int64",
    "Internal",
    "InvalidArgument",
    "Model",
    "ModelLoadError",
    "NotFound",
    "OldestStrategy",
    "QueueFull",
    "QueuePolicy",
    "RayOptions",
    "SequenceBatching",
    "SequenceState",
    "Server",
    "ServingError",
    "Signature",
    "Step",
    "TensorSpec",
    "UInt8",
    "UInt16",
    "UInt32",
    "UInt64",
    "Unavailable",
    "Unimplemented",
    "__version__",
    "parse_examples",
    "running",
    "serve",
]

_MODULES = {
    "triglot.config.options": "Config ConfigError",
    "triglot.core.call": "Call",
    "triglot.inline": "running serve",
    "triglot.model.ensemble": "Ensemble",
    "triglot.model.model": "Model",
    "triglot.model.ray_options": "RayOptions",
    "triglot.model.scheduling": "ControlInput DirectStrategy DynamicBatching InitialState OldestStrategy "
    "QueuePolicy SequenceBatching SequenceState Step",
    "triglot.model.signature": "Signature",
    "triglot.model.tensor_types": "BFloat16 Bool Bytes Float16 Float32 Float64 Int8 Int16 Int32 Int64 "
    "UInt8 UInt16 UInt32 UInt64",
    "triglot.model.tf_example": "parse_examples",
    "triglot.server": "Server",
}
_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}


def __getattr__(name: str) -> Any:
    # Clients and model files import this package, too, and should load no more than they use.
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'triglot' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_MODULE_OF[name]), name)
    return value
