"""The parts of the server, by kind and name: import strings, each imported when a configuration asks for it.

A part is a folder or a file that can be taken out. It imports the core and no other part, and the core imports no
part. What asks for a part that is not there gets a `MissingPart`, which names it.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Final

PARTS: Final[Mapping[str, Mapping[str, str]]] = {
    "protocol": {
        "kserve": "triglot.protocols.kserve.protocol:kserve",
        "tfserving": "triglot.protocols.tfserving.protocol:tfserving",
        "grps": "triglot.protocols.grps.protocol:grps",
        "monitor": "triglot.protocols.monitor.protocol:monitor",
        "openapi": "triglot.protocols.openapi.protocol:openapi",
    },
    "observer": {
        "request records": "triglot.protocols.tfserving.records:encode_record",
        "warm-up records": "triglot.protocols.tfserving.warmup:run_warm_up_file",
    },
}
"""Kind → name → "module:attribute"."""
PAGES: Final = ("monitor", "openapi")
"""Protocols that are served beside those that a configuration names."""
PROTOCOLS: Final = tuple(name for name in PARTS["protocol"] if name not in PAGES)
"""Protocols that a configuration names; the default order."""


class MissingPart(ImportError):
    """A part, or a library that it needs, is not there; the text says which, and what to do."""


def load(kind: str, name: str) -> Any:
    """Return what stands for a part, imported. Raises `MissingPart`."""
    return load_string(PARTS[kind][name], f"the {kind} {name}")


def load_string(target: str, what: str) -> Any:
    """Return the attribute at "module:attribute", imported. Raises `MissingPart`.

    `what` names it in errors. Only strings of the operator come here, never those of clients.
    """
    module, _, attribute = target.partition(":")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ModuleNotFoundError as error:
        raise MissingPart(missing_text(what, error)) from error
    except AttributeError:
        raise MissingPart(f"{what}: {module} has no attribute {attribute!r}") from None


def missing_text(what: str, error: ModuleNotFoundError) -> str:
    """Return the error's text for `what` needs a module that is not there: a part of this package, or another."""
    name = error.name or str(error)
    if name.partition(".")[0] == "triglot":
        return f"{what} is not in this build of Triglot, which has no {name}"
    return f"{what} needs the module {name}, which is not installed or not on PYTHONPATH"
