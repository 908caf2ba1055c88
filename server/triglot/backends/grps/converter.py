"""`Converter`: what the author of a grps project writes to turn messages into inputs, and back (grps 6.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Converter(ABC):
    """Turns messages into what the inferer takes, and what it gave into messages.

    Its code blocks, and several requests call it at the same time. It is made with no arguments; `init` is called
    once, before the first request.
    """

    def __init__(self) -> None:
        self._path: Any = None
        self._args: Any = None

    @abstractmethod
    def init(self, path: Any = None, args: Any = None) -> None:
        """Takes `converter_path` and `converter_args` of the model's entry in inference.yml."""
        self._path = path
        self._args = args

    @abstractmethod
    def preprocess(self, inp: Any, context: Any) -> Any:
        """Takes a GrpsMessage and gives any object for the inferer."""

    @abstractmethod
    def postprocess(self, inp: Any, context: Any) -> Any:
        """Takes what the inferer gave and gives a GrpsMessage."""

    def batch_preprocess(self, inps: list[Any], contexts: list[Any]) -> Any:
        """As `preprocess`, for several requests at once: one object for `batch_infer`."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_preprocess, which dynamic batching needs")

    def batch_postprocess(self, inp: Any, contexts: list[Any]) -> list[Any]:
        """As `postprocess`, for several requests at once: a GrpsMessage for each, in their order."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_postprocess, which dynamic batching needs")


class ConverterRegister:
    """A project's own converters by name."""

    def __init__(self) -> None:
        self.converter_dict: dict[str, Any] = {}

    def register(self, converter_name: str, converter_obj: Any) -> None:
        """Add one; one of the same name is replaced."""
        self.converter_dict[converter_name] = converter_obj

    def get_converter(self, converter_name: str) -> Any:
        """The converter of that name. Raises `ValueError` when there is none."""
        try:
            return self.converter_dict[converter_name]
        except KeyError:
            raise ValueError(f"no converter {converter_name!r} is registered") from None
