"""MLServer's models: its own runtimes, which need no package of its, and classes that users write for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from triglot.backends.mlserver import stand_in, stock
from triglot.backends.mlserver.settings import settings_of, values_of, warn_of_ignored
from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.model import Model


def load(file: Path, config: ModelConfig) -> Model:
    """Return the model of a `model-settings.json`, or of the defaults in the configuration.

    Raise `ModelLoadError`, and `MissingDependency` for a library that is not installed.
    """
    try:
        values = values_of(file, config)
        implementation = values.get("implementation")
        if not implementation or not isinstance(implementation, str):
            raise ValueError(f"implementation: expected the path of a class, got {implementation!r:.60}")
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error
    if (runtime := stock.runtime_of(implementation)) is not None:
        warn_of_ignored(file, values)
        return stock.load(runtime, settings_of(file, values), config)
    from triglot.backends.mlserver import classes  # noqa: PLC0415 - few models need it.

    return classes.load(file, config)


def provide() -> None:
    """Make `mlserver` importable: the package, or what stands in for it."""
    stand_in.provide()


def model_of(model_class: type[Any], file: Path, config: ModelConfig) -> Model:
    """See `classes.model_of`."""
    from triglot.backends.mlserver import classes  # noqa: PLC0415 - few models need it.

    return classes.model_of(model_class, file, config)
