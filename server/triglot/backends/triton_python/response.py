"""`InferenceResponse`: a model's response to a request, or another model's to its own request."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Self

from triglot.backends.triton_python.errors import TritonError
from triglot.backends.triton_python.parameters import NO_PARAMETERS, as_json, checked
from triglot.backends.triton_python.tensor import Tensor, with_bytes
from triglot.core.errors import ServingError
from triglot.core.tensor import Array
from triglot.core.types import Answer, ParameterValue
from triglot.model.reshaping import Reshaping
from triglot.model.validation import repeated_output


class InferenceResponse:
    """Output tensors, or an error, in which case the tensors are ignored.

    Raises `TypeError` for tensors that are not `Tensor`s, or an error that is not a `TritonError`.
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
        """Return the response of another model."""
        parameters = outputs.parameters if isinstance(outputs, Answer) else NO_PARAMETERS
        return cls([Tensor.of(name, array) for name, array in outputs.items()], None, parameters)

    @classmethod
    def failed(cls, error: ServingError) -> Self:
        """Return the response for the failure of another model."""
        return cls(error=TritonError.of(error))

    def output_tensors(self) -> list[Tensor]:
        """Return the tensors; empty if there is an error."""
        return [] if self._error is not None else self._tensors

    def has_error(self) -> bool:
        """Whether there is an error."""
        return self._error is not None

    def error(self) -> TritonError | None:
        """Return the error, or None."""
        return self._error

    def parameters(self) -> str:
        """Return the parameters as JSON."""
        return as_json(self._parameters)

    def outcome(self, reshaping: Reshaping | None = None, *, final: bool = False) -> Answer | ServingError:
        """Convert the response for the server; two tensors of one name are an error."""
        if self._error is not None:
            return self._error.serving_error()
        outputs = {tensor.name(): with_bytes(tensor.array) for tensor in self._tensors}
        if len(outputs) < len(self._tensors):
            return repeated_output([tensor.name() for tensor in self._tensors])
        if reshaping is not None:
            outputs = reshaping.made(outputs)
        return Answer(outputs, self._parameters, final=final, partial=True)
