"""MLServer's settings of a model."""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Self

from triglot.backends.mlserver.stand_in.types import MetadataTensor, Record, a, an_object, anything, each, text


class ModelParameters(Record):
    """Settings of one version; others than these are kept, too."""

    fields = {
        "uri": text,
        "version": text,
        "environment_path": text,
        "environment_tarball": text,
        "format": text,
        "content_type": text,
        "extra": an_object,
    }
    keeps_others = True

    def __init__(self, **values: Any) -> None:
        super().__init__(**{"extra": {}, **values})


class ModelSettings(Record):
    """Settings of a model. `implementation` is the class, or its path."""

    fields = {
        "name": text,
        "platform": text,
        "versions": each(text),
        "inputs": each(a(MetadataTensor)),
        "outputs": each(a(MetadataTensor)),
        "max_batch_size": anything,
        "max_batch_time": anything,
        "parameters": a(ModelParameters),
        "cache_enabled": anything,
    }

    def __init__(self, **values: Any) -> None:
        self._source: str | None = values.pop("_source", None)
        """The file that they are from."""
        self._implementation: Any = values.pop("implementation", "")
        defaults: dict[str, Any] = {"name": "", "platform": "", "versions": [], "inputs": [], "outputs": []}
        super().__init__(
            **{**defaults, "max_batch_size": 0, "max_batch_time": 0.0, "cache_enabled": False, **values}
        )

    @property
    def implementation(self) -> Any:
        """The class, imported from the folder of the settings' file, too. Raise as an import does."""
        if not isinstance(self._implementation, str):
            return self._implementation
        module, _, name = self._implementation.rpartition(".")
        folder = [] if self._source is None else [str(Path(self._source).parent)]
        before, sys.path[:] = list(sys.path), [*folder, *sys.path]
        try:
            if not module:
                raise ModuleNotFoundError(f"expected MODULE.CLASS, got {self._implementation!r}", name=name)
            return getattr(importlib.import_module(module), name)
        finally:
            sys.path[:] = before

    @property
    def version(self) -> str | None:
        """The version of the parameters."""
        return None if self.parameters is None else self.parameters.version

    @classmethod
    def parse_file(cls, path: str) -> Self:
        """Return the settings in a file."""
        return cls(**json.loads(Path(path).read_bytes()), _source=path)
