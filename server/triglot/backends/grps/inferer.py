"""`ModelInferer`: base class of a grps project's inferers, which run models (grps 6.2)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any


class ModelInferer(ABC):
    """Runs a model. Its methods may block and are called concurrently.

    It is constructed without arguments; `init` and `load` are called once, before the first request.
    """

    def __init__(self) -> None:
        self._path: Any = None
        self._device: Any = None
        self._args: Any = None

    @abstractmethod
    def init(self, path: Any, device: Any = None, args: Any = None) -> None:
        """Receives `inferer_path`, the device's name and `inferer_args` of the model's entry in inference.yml."""
        self._path = path
        self._device = device
        self._args = args

    @abstractmethod
    def load(self) -> bool:
        """Load the model; any result but true makes the start fail."""

    @abstractmethod
    def infer(self, inp: Any, context: Any) -> Any:
        """Run the model on the result of `Converter.preprocess`; return the input of `Converter.postprocess`.

        Without a converter it receives and returns a GrpsMessage.
        """

    def batch_infer(self, inp: Any, contexts: list[Any]) -> Any:
        """As `infer`, for several requests: receives the result of `batch_preprocess`.

        Without a converter it receives a list of GrpsMessages and returns one in the same order and of the same
        length.
        """
        raise NotImplementedError(f"{type(self).__name__} has no batch_infer, which dynamic batching needs")


class ModelInfererRegister:
    """A project's customized inferers by name."""

    def __init__(self) -> None:
        self.model_inferer_dict: dict[str, Any] = {}

    def register(self, inferer_name: str, inferer_obj: Any) -> None:
        """Add an inferer; replace one of the same name."""
        self.model_inferer_dict[inferer_name] = inferer_obj

    def get_model_inferer(self, inferer_name: str) -> Any:
        """Return the inferer with that name. Raise `RuntimeError` if there is none."""
        try:
            return self.model_inferer_dict[inferer_name]
        except KeyError:
            raise RuntimeError(f"no inferer {inferer_name!r} is registered") from None
