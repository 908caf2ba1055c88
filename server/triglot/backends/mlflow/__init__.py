"""Models in MLflow's format: folders with an `MLmodel` file, of any flavor, saved by MLflow 2 or 3.

Flavors that our own backends read with the same result need no MLflow. It loads everything else itself, as a
python_function.
"""

from __future__ import annotations

import logging
import platform
from pathlib import Path

from triglot.backends import warn_of_unknown
from triglot.backends.mlflow.description import PYTHON_FUNCTION, Description, read
from triglot.backends.mlflow.native import native_model
from triglot.backends.mlflow.pyfunc import python_function
from triglot.core.errors import ModelLoadError
from triglot.model.config import ModelConfig
from triglot.model.model import Model

log = logging.getLogger(__name__)

FLAVOR = "flavor"
PARAMETERS = (FLAVOR,)
"""Parameter of a configuration: the flavor to load, one of those in the file."""


def load(file: Path, config: ModelConfig) -> Model:
    """Return the model of an `MLmodel` file. Raise `ModelLoadError`, and `MissingDependency` without MLflow."""
    warn_of_unknown(file, config, "mlflow", PARAMETERS)
    description = read(file)
    flavor = config.parameters.get(FLAVOR, "")
    if flavor and flavor not in description.flavors:
        raise ModelLoadError(
            f"{config.source}: parameters: {FLAVOR}: expected one of {', '.join(description.flavors)}, "
            f"got {flavor!r}"
        )
    _log_environment(description)
    if flavor != PYTHON_FUNCTION:
        model = native_model(description, flavor)
        if model is not None:
            return model
        if flavor:
            raise ModelLoadError(
                f"{file}: flavor {flavor!r} cannot be served by a backend of its own; without the parameter "
                f"{FLAVOR}, MLflow loads the model"
            )
    return python_function(description)


def _log_environment(description: Description) -> None:
    """Log what the model was saved with: nothing is installed."""
    found = [name for name in ("python_env.yaml", "conda.yaml") if (description.folder / name).is_file()]
    log.info(
        "%s: saved by MLflow %s with Python %s, this is Python %s; its environment is described in %s",
        description.file,
        description.mlflow_version or "(unknown)",
        description.python_function.get("python_version", "(unknown)"),
        platform.python_version(),
        " and ".join(found) or "no file",
    )
