"""MLServer's models: its own runtimes, which need no package of its, and classes that users write for it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triglot.backends.mlserver import stand_in, stock
from triglot.backends.mlserver.settings import SETTINGS, batching_of, settings_of, values_of, warn_of_ignored
from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.model import Model, is_decoupled


def load(file: Path, config: ModelConfig) -> Model:
    """Return the model of a `model-settings.json`, or of the defaults in the configuration.

    Raise `ModelLoadError`, and `MissingDependency` for a library that is not installed.
    """
    values = _values(file, config)
    try:
        implementation = values.get("implementation")
        if not implementation or not isinstance(implementation, str):
            raise ValueError(f"implementation: expected the path of a class, got {implementation!r:.60}")
    except ValueError as error:
        raise ModelLoadError(f"{file}: {error}") from error
    if (runtime := stock.runtime_of(implementation)) is not None:
        warn_of_ignored(file, values)
        return _batched(stock.load(runtime, settings_of(file, values), config), file, values)
    from triglot.backends.mlserver import classes  # noqa: PLC0415 - few models need it.

    return _batched(classes.load(file, config), file, values)


def provide() -> None:
    """Make `mlserver` importable: the package, or what stands in for it."""
    stand_in.provide()


def model_of(model_class: type[Any], file: Path, config: ModelConfig) -> Model:
    """See `classes.model_of`."""
    from triglot.backends.mlserver import classes  # noqa: PLC0415 - few models need it.

    model = classes.model_of(model_class, file, config)
    settings = file.with_name(SETTINGS)
    return _batched(model, settings, _values(settings, config))


def _values(file: Path, config: ModelConfig) -> dict[str, Any]:
    """Return the settings. Raise `ModelLoadError`."""
    try:
        return values_of(file, config)
    except (TypeError, ValueError) as error:
        raise ModelLoadError(f"{file}: {error}") from error


def _batched(model: Model, file: Path, values: Mapping[str, Any]) -> Model:
    """Set the batching of the settings, if any; streams are not batched. Raise `ModelLoadError`."""
    try:
        if not is_decoupled(model.infer):
            model.dynamic_batching = batching_of(values)
    except (TypeError, ValueError) as error:
        model.close()
        raise ModelLoadError(f"{file}: {error}") from error
    return model
