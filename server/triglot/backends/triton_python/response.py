"""`InferenceResponse`: what a model answers to one request, or another model has answered to its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

from triglot.backends.triton_python.errors import TritonError
from triglot.backends.triton_python.parameters import NO_PARAMETERS, as_json, checked
from triglot.backends.triton_python.tensor import Tensor, normal
from triglot.core.errors import ServingError
from triglot.core.tensor import Array
from triglot.core.types import Answer, ParameterValue
from triglot.model.reshaping import Reshaping


class InferenceResponse:
    """Output tensors, or an error; with an error the tensors do not count.

    Raises `TypeError` for what are no `Tensor`s, or is no `TritonError`.
    """

    __slots__ = ("_error", "_parameters", "_tensors")

    def __init__(
        self,
        output_tensors: Iterable[Tensor] = (),
        error: TritonError | None = None,
        parameters: Mapping[str, ParameterValue] | None = None,
    ) -> None:
        self._tensors = list(output_tensors)
        for tensor in self._tensors:
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"InferenceResponse: output_tensors: expected Tensors, got {type(tensor).__name__}"
                )
        if error is not None and not isinstance(error, TritonError):
            raise TypeError(f"InferenceResponse: error: expected a TritonError, got {type(error).__name__}")
        self._error = error
        self._parameters = checked(parameters)

    @classmethod
    def of(cls, outputs: Mapping[str, Array]) -> Self:
        """What another model has answered."""
        parameters = outputs.parameters if isinstance(outputs, Answer) else NO_PARAMETERS
        return cls([Tensor.of(name, array) for name, array in outputs.items()], None, parameters)

    @classmethod
    def failed(cls, error: ServingError) -> Self:
        """That another model has failed."""
        return cls(error=TritonError.of(error))

    def output_tensors(self) -> list[Tensor]:
        """The tensors; none where there is an error in place of them."""
        return [] if self._error is not None else self._tensors

    def has_error(self) -> bool:
        """Whether there is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """The error."""
        return self._error

    def parameters(self) -> str:
        """The parameters, as JSON."""
        return as_json(self._parameters)

    def outcome(self, reshaping: Reshaping | None = None, *, final: bool = False) -> Answer | ServingError:
        """What the server is answered."""
        if self._error is not None:
            return self._error.serving_error()
        outputs = {tensor.name(): normal(tensor.array) for tensor in self._tensors}
        if reshaping is not None:
            outputs = reshaping.made(outputs)
        return Answer(outputs, self._parameters, final=final, partial=True)
