"""The module `triton_python_backend_utils` for models to import, available while a Triton Python model is loaded.

No package of that name is installed. Each model's modules get an instance of their own, whatever that name means
globally: so the utilities know which model's code calls them, on any thread. For all other code, such as a library
that the model uses, the name is in `sys.modules` while a model is loaded, unless it already exists.
"""

from __future__ import annotations

import enum
import logging
import sys
import threading
from collections.abc import Mapping, Sequence
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any, ClassVar

from triglot.backends.model_modules import ModelModules, PlainNames
from triglot.backends.triton_python import calls, config, datatypes, errors, metrics, request, response, sender
from triglot.backends.triton_python.context import ModelContext
from triglot.backends.triton_python.tensor import Tensor
from triglot.telemetry.loggers import MODELS

UTILS = "triton_python_backend_utils"
NAMES = (UTILS, "c_python_backend_utils")
"""Names of the utility module; Triton's has a part in C with most of the names."""
_provide_lock = threading.Lock()

log = logging.getLogger(MODELS)


class LogLevel(enum.IntEnum):
    """Triton's log levels."""

    INFO = 0
    WARNING = 1
    ERROR = 2
    VERBOSE = 3


_LEVELS = (logging.INFO, logging.WARNING, logging.ERROR, logging.DEBUG)


class Logger:
    """Writes to the server's log."""

    INFO: ClassVar[LogLevel] = LogLevel.INFO
    WARNING: ClassVar[LogLevel] = LogLevel.WARNING
    ERROR: ClassVar[LogLevel] = LogLevel.ERROR
    VERBOSE: ClassVar[LogLevel] = LogLevel.VERBOSE

    @staticmethod
    def log(message: str, level: int = LogLevel.INFO) -> None:
        """Log a message with a level."""
        log.log(_LEVELS[LogLevel(level)], "%s", message, stacklevel=2)

    @staticmethod
    def log_info(message: str) -> None:
        """Log information."""
        log.info("%s", message, stacklevel=2)

    @staticmethod
    def log_warn(message: str) -> None:
        """Log a warning."""
        log.warning("%s", message, stacklevel=2)

    @staticmethod
    def log_error(message: str) -> None:
        """Log an error."""
        log.error("%s", message, stacklevel=2)

    @staticmethod
    def log_verbose(message: str) -> None:
        """Log a verbose message."""
        log.debug("%s", message, stacklevel=2)


_SHARED: Mapping[str, Any] = MappingProxyType(
    {
        member.__name__: member
        for member in (
            Tensor,
            Logger,
            LogLevel,
            response.InferenceResponse,
            sender.InferenceResponseSender,
            calls.ResponseIterator,
            errors.TritonError,
            errors.TritonErrorCode,
            errors.TritonModelException,
            request.InferenceTrace,
            request.MemoryType,
            request.PreferredMemory,
            request.get_input_tensor_by_name,
            request.get_output_tensor_by_name,
            config.ModelConfig,
            config.get_input_config_by_name,
            config.get_output_config_by_name,
            config.using_decoupled_model_transaction_policy,
            datatypes.triton_to_numpy_type,
            datatypes.numpy_to_triton_type,
            datatypes.triton_string_to_numpy,
            datatypes.serialize_byte_tensor,
            datatypes.deserialize_bytes_tensor,
        )
    }
    | {
        name: getattr(module, name)
        for module in (datatypes, request, sender)
        for name in vars(module)
        if name.startswith(("TRITONSERVER_", "TRITON_", "NUMPY_TO_"))
    }
)
"""Names that are the same for all models."""


def utilities(context: ModelContext | None) -> dict[str, Any]:
    """Return the names of the utility module for the code of one model; None: for that of the running model."""

    class InferenceRequest(request.InferenceRequest):
        """A request."""

        __slots__ = ()

    InferenceRequest.context = context
    InferenceRequest.__doc__ = request.InferenceRequest.__doc__
    InferenceRequest.__module__ = UTILS
    InferenceRequest.__qualname__ = "InferenceRequest"
    return {
        **_SHARED,
        "InferenceRequest": InferenceRequest,
        "MetricFamily": metrics.metric_family_class(context),
        **{
            function.__name__: partial(function, context)
            for function in (calls.is_model_ready, calls.load_model, calls.unload_model, calls.get_model_dir)
        },
    }


class ProvidedModule(ModuleType):
    """The utility module under one of its names; `users` is the number of loaded models."""

    def __init__(self, name: str, names: Mapping[str, Any]) -> None:
        super().__init__(name, "Provided by Triglot for Triton's Python models.")
        self.__spec__ = ModuleSpec(name, None)
        self.users = 0
        vars(self).update(names)


def provide() -> None:
    """Provide the names globally, once more per call."""
    with _provide_lock:
        for name in NAMES:
            present = sys.modules.get(name)
            if present is None and PathFinder.find_spec(name) is None:
                present = sys.modules[name] = ProvidedModule(name, utilities(None))
            if isinstance(present, ProvidedModule):
                present.users += 1


def remove() -> None:
    """Reverts one call of `provide`."""
    with _provide_lock:
        for name in NAMES:
            present = sys.modules.get(name)
            if isinstance(present, ProvidedModule):
                present.users -= 1
                if not present.users:
                    del sys.modules[name]


class TritonModules(ModelModules):
    """The modules of a Triton Python model, which can import the utility module; subfolders are packages, too.

    From creation to `close()`, all code can import `triton_python_backend_utils`, and code that the model calls
    can import the model's modules by their plain names.
    """

    kind = "triton"

    def __init__(self, folders: Sequence[Path], context: ModelContext, name: str = "") -> None:
        super().__init__(folders, name)
        self._own |= _plain_folders(folders) - self._own
        self.context = context
        context.modules = self
        self.names = utilities(context)
        for utils in NAMES:
            sys.modules[f"{self.name}.{utils}"] = ProvidedModule(utils, self.names)
        self._own |= set(NAMES)
        self._is_provided = True
        self._plain_names = PlainNames()
        provide()

    def close(self) -> None:
        """Remove the modules, and the global names after the last model."""
        super().close()
        if self._is_provided:
            self._is_provided = False
            self._plain_names.close()
            remove()


def _plain_folders(folders: Sequence[Path]) -> set[str]:
    """Return the folders with modules but no `__init__.py`, unless the name has another meaning."""
    found = {
        entry.name
        for folder in folders
        for entry in folder.iterdir()
        if entry.is_dir() and entry.name.isidentifier() and not (entry / "__init__.py").exists()
    }
    return {
        name
        for name in found - {"__pycache__"} - sys.stdlib_module_names
        if any(next((folder / name).glob("*.py"), None) for folder in folders)
        and PathFinder.find_spec(name) is None
    }
