"""The error of what only MLServer's package has."""

from __future__ import annotations

from typing import NoReturn


def missing(module: str, name: str) -> NoReturn:
    """Raise the error of a name that is not here; of a name that Python asks for itself, `AttributeError`."""
    if name.startswith("__"):
        raise AttributeError(name)
    # With the package installed, the name is there.
    raise ModuleNotFoundError(f"{module} has no {name} unless mlserver is installed", name="mlserver")
