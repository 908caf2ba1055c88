"""`Converter`: base class of a grps project's converters between messages and model inputs (grps 6.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class Converter(ABC):
    """Converts messages to the inferer's input, and its output to messages.

    Its methods may block and are called concurrently. It is constructed without arguments; `init` is called once,
    before the first request.
    """

    def __init__(self) -> None:
        self._path: Any = None
        self._args: Any = None

    @abstractmethod
    def init(self, path: Any = None, args: Any = None) -> None:
        """Receives `converter_path` and `converter_args` of the model's entry in inference.yml."""
        self._path = path
        self._args = args

    @abstractmethod
    def preprocess(self, inp: Any, context: Any) -> Any:
        """Convert a GrpsMessage to any input for the inferer."""

    @abstractmethod
    def postprocess(self, inp: Any, context: Any) -> Any:
        """Convert the inferer's output to a GrpsMessage."""

    def batch_preprocess(self, inps: list[Any], contexts: list[Any]) -> Any:
        """As `preprocess`, for several requests: returns one object for `batch_infer`."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_preprocess, which dynamic batching needs")

    def batch_postprocess(self, inp: Any, contexts: list[Any]) -> list[Any]:
        """As `postprocess`, for several requests: returns a GrpsMessage for each, in their order."""
        raise NotImplementedError(f"{type(self).__name__} has no batch_postprocess, which dynamic batching needs")


class ConverterRegister:
    """A project's customized converters by name."""

    def __init__(self) -> None:
        self.converter_dict: dict[str, Any] = {}

    def register(self, converter_name: str, converter_obj: Any) -> None:
        """Add a converter; replace one of the same name."""
        self.converter_dict[converter_name] = converter_obj

    def get_converter(self, converter_name: str) -> Any:
        """Return the converter with that name. Raise `ValueError` if there is none."""
        try:
            return self.converter_dict[converter_name]
        except KeyError:
            raise ValueError(f"no converter {converter_name!r} is registered") from None
