"""Makes the inferers and converters of a grps project's models from inference.yml (grps 5.2, 6.1)."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from triglot.backends import missing_dependency
from triglot.backends.grps.converter import ConverterRegister
from triglot.backends.grps.inferer import ModelInfererRegister
from triglot.backends.grps.settings import ModelEntry
from triglot.core.errors import ModelLoadError

INFERERS = {
    "torch": "triglot.backends.grps.torch_inferer:TorchModelInferer",
    "tensorflow": "triglot.backends.grps.tf_inferer:TfModelInferer",
}
"""Class of each `inferer_type`, imported when a model uses it."""
CONVERTERS = {
    "torch": "triglot.backends.grps.torch_inferer:TorchTensorConverter",
    "tensorflow": "triglot.backends.grps.tf_inferer:TfTensorConverter",
    "tensorrt": "triglot.backends.grps.tensor_converter:TrtTensorConverter",
}
"""Class of each `converter_type`."""


def built_in(path: str) -> Any:
    """Return the class named by "module:Class"."""
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(module), name)


class Components:
    """Makes inferers and converters; customized ones come from the project's registers.

    `file` is the inference.yml, for errors.
    """

    def __init__(
        self,
        file: Path,
        models: tuple[ModelEntry, ...],
        inferers: ModelInfererRegister,
        converters: ConverterRegister,
    ) -> None:
        self._file = file
        self._models = models
        self._inferers = inferers.model_inferer_dict
        self._converters = converters.converter_dict

    def inferer(self, entry: ModelEntry) -> Any:
        """Return the model's inferer, initialised and loaded. Raise `ModelLoadError`."""
        if entry.inferer_type == "customized":
            inferer = self._registered(entry, "inferer", self._inferers)
        else:
            inferer = self._built_in(entry, f"inferer_type {entry.inferer_type}", INFERERS[entry.inferer_type])
        what = f"inferer {entry.inferer_name or entry.inferer_type}"
        self._attempt(entry, f"{what}: init()", inferer.init, entry.inferer_path, entry.device, entry.inferer_args)
        if not (loaded := self._attempt(entry, f"{what}: load()", inferer.load)):
            raise self._error(entry, f"{what}: load() returned {loaded!r}, expected True")
        return inferer

    def converter(self, entry: ModelEntry) -> Any:
        """Return the model's converter, initialised; None if it has none. Raise `ModelLoadError`."""
        if entry.converter_type == "none":
            return None
        if entry.converter_type == "customized":
            converter = self._registered(entry, "converter", self._converters)
        else:
            path = CONVERTERS[entry.converter_type]
            converter = self._built_in(entry, f"converter_type {entry.converter_type}", path)
        what = f"converter {entry.converter_name or entry.converter_type}"
        self._attempt(entry, f"{what}: init()", converter.init, entry.converter_path, entry.converter_args)
        return converter

    def _registered(self, entry: ModelEntry, kind: str, register: dict[str, Any]) -> Any:
        """Return what the project registered under the entry's name.

        The first model gets the registered object itself, any other a new instance of its class.
        """
        name = getattr(entry, f"{kind}_name")
        if name not in register:
            known = ", ".join(sorted(map(str, register))) or "none"
            raise self._error(
                entry,
                f"{kind}_name: no {kind} {name!r} is registered (registered: {known}); expected "
                f"{kind}_register.register({name!r}, ...) in src/customized_{kind}.py",
            )
        first = next(
            model
            for model in self._models
            if getattr(model, f"{kind}_type") == "customized" and getattr(model, f"{kind}_name") == name
        )
        if first is entry:
            return register[name]
        cls = type(register[name])
        return self._attempt(entry, f"{kind} {name}: {cls.__name__}()", cls)

    def _built_in(self, entry: ModelEntry, key: str, path: str) -> Any:
        try:
            cls = built_in(path)
        except ModuleNotFoundError as error:
            raise missing_dependency(self._file, f"model {entry.id}: {key}", error) from error
        return self._attempt(entry, key, cls)

    def _attempt(self, entry: ModelEntry, what: str, function: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return function(*arguments)
        except ModelLoadError as error:
            raise type(error)(f"{self._where(entry)}: {error}") from error
        except Exception as error:
            raise self._error(entry, f"{what}: {type(error).__name__}: {error}") from error

    def _error(self, entry: ModelEntry, text: str) -> ModelLoadError:
        return ModelLoadError(f"{self._where(entry)}: {text}")

    def _where(self, entry: ModelEntry) -> str:
        return f"{self._file}: model {entry.id}"
