"""The version, written once; the first heading of CHANGELOG.md is the same. Also says which build runs."""

from importlib.util import find_spec

__version__ = "0.1.0"


def build() -> str:
    """Return "compiled" if the modules on the path of a call were, else "pure Python"."""
    spec = find_spec("triglot.protocols.wire")
    pure = spec is None or spec.origin is None or spec.origin.endswith(".py")
    return "pure Python" if pure else "compiled"
