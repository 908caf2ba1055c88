"""`ModelInferer`: what the author of a grps project writes to run a model (grps 6.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class ModelInferer(ABC):
    """Runs a model. Its code blocks, and several requests call it at the same time.

    It is made with no arguments; `init` and `load` are called once, before the first request.
    """

    def __init__(self) -> None:
        self._path: Any = None
        self._device: Any = None
        self._args: Any = None

    @abstractmethod
    def init(self, path: Any, device: Any = None, args: Any = None) -> None:
        """Takes `inferer_path`, the device's name and `inferer_args` of the model's entry in inference.yml."""
        self._path = path
        self._device = device
        self._args = args

    @abstractmethod
    def load(self) -> bool:
        """Loads the model; anything but true fails the start."""

    @abstractmethod
    def infer(self, inp: Any, context: Any) -> Any:
        """Takes what `Converter.preprocess` gave and gives what `Converter.postprocess` takes.

        Without a converter it takes a GrpsMessage and gives one.
        """

    def batch_infer(self, inp: Any, contexts: list[Any]) -> Any:
        """As `infer`, for several requests at once: takes what `batch_preprocess` gave.

        Without a converter it takes a list of GrpsMessages and gives one, of the same order and length.
        """
        raise NotImplementedError(f"{type(self).__name__} has no batch_infer, which dynamic batching needs")


class ModelInfererRegister:
    """A project's own inferers by name."""

    def __init__(self) -> None:
        self.model_inferer_dict: dict[str, Any] = {}

    def register(self, inferer_name: str, inferer_obj: Any) -> None:
        """Add one; one of the same name is replaced."""
        self.model_inferer_dict[inferer_name] = inferer_obj

    def get_model_inferer(self, inferer_name: str) -> Any:
        """The inferer of that name. Raises `RuntimeError` when there is none."""
        try:
            return self.model_inferer_dict[inferer_name]
        except KeyError:
            raise RuntimeError(f"no inferer {inferer_name!r} is registered") from None
