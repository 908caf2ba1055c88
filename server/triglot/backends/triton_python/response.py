"""`InferenceResponse`: a model's response to a request, or another model's to its own request."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Self

from triglot.backends.triton_python.errors import TritonError, TritonModelException
from triglot.backends.triton_python.tensor import Tensor, with_bytes
from triglot.core.errors import ServingError
from triglot.core.tensor import Array
from triglot.core.types import Answer, ParameterValue
from triglot.model.reshaping import Reshaping
from triglot.model.validation import repeated_output

NO_PARAMETERS: Mapping[str, ParameterValue] = MappingProxyType({})


def checked(parameters: object) -> Mapping[str, ParameterValue]:
    """Return a model's parameters. Raise `TritonModelException` for types that Triton rejects, as floats."""
    if parameters is None:
        return NO_PARAMETERS
    if not isinstance(parameters, Mapping):
        raise TritonModelException(f"Expect parameters to be a dict, got {type(parameters)}")
    for key, value in parameters.items():
        if not isinstance(key, str):
            raise TritonModelException(f"Expect parameters keys to have type str, found type {type(key)}")
        if not isinstance(value, bool | int | str):
            raise TritonModelException(
                f"Expect parameters values to have type bool/int/str, found type {type(value)}"
            )
    return dict(parameters)


def as_json(parameters: Mapping[str, ParameterValue]) -> str:
    """Return the parameters as `parameters()` does."""
    return json.dumps(dict(parameters))


class InferenceResponse:
    """Output tensors, or an error, in which case the tensors are ignored.

    Raise `TypeError` for tensors that are not `Tensor`s, or an error that is not a `TritonError`.
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
