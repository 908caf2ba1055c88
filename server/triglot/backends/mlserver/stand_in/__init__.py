"""What classes written for MLServer import, where its package is not installed: enough to run them, and no server.

The names, their meanings and the forms of what is encoded are MLServer 1.7's. `provide` makes this package
importable as `mlserver`. A name that is not here is an error that says what to install.
"""

from __future__ import annotations

import importlib
import sys
from importlib.util import find_spec
from typing import Any, Final

from triglot.backends.mlserver.stand_in.absent import missing
from triglot.backends.mlserver.stand_in.metrics import log, register
from triglot.backends.mlserver.stand_in.model import MLModel
from triglot.backends.mlserver.stand_in.settings import ModelSettings

__all__ = ["MLModel", "ModelSettings", "log", "register"]

MODULES: Final = ("codecs", "errors", "handlers", "logging", "metrics", "model", "settings", "types", "utils")
CODECS: Final = ("base", "base64", "datetime", "decorator", "numpy", "pandas", "string", "utils")
"""MLServer's modules of codecs, which are one here."""


def provide() -> Any:
    """Return the package `mlserver`, or this one in its place, importable by that name, with our metrics."""
    if "mlserver" not in sys.modules and find_spec("mlserver") is None:
        sys.modules["mlserver"] = sys.modules[__name__]
        for name in MODULES:
            sys.modules[f"mlserver.{name}"] = importlib.import_module(f"{__name__}.{name}")
        for name in CODECS:
            sys.modules[f"mlserver.codecs.{name}"] = sys.modules["mlserver.codecs"]
    package: Any = importlib.import_module("mlserver")
    # The package would count what models log where no page shows it.
    package.log, package.register = log, register
    return package


def __getattr__(name: str) -> Any:
    if name in MODULES:
        raise AttributeError(name)  # It is imported next.
    missing("mlserver", name)
