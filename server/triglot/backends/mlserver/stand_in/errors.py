"""MLServer's errors; those whose status is 4xx reach the client with their text."""

from __future__ import annotations

from typing import Any

from triglot.backends.mlserver.stand_in.absent import missing


class MLServerError(Exception):
    """An error with the status of its response."""

    def __init__(self, msg: str, status_code: int = 400) -> None:
        super().__init__(msg)
        self.status_code = status_code


class InferenceError(MLServerError):
    """An error of a request."""

    def __init__(self, msg: str) -> None:
        super().__init__(msg)


class InvalidModelURI(MLServerError):
    """The model's files are not where its settings say."""

    def __init__(self, name: str, model_uri: str | None = None) -> None:
        super().__init__(f"model {name}: no such file or folder: {model_uri or 'parameters.uri is not set'}", 422)


class ModelNotFound(MLServerError):
    """There is no such model."""

    def __init__(self, name: str, version: str | None = None) -> None:
        super().__init__(f"Model {name}{f' with version {version}' if version else ''} not found", 404)


class CodecNotFound(MLServerError):
    """No codec is known for a value."""


class CodecError(MLServerError):
    """A value is not what its codec encodes or decodes."""


def __getattr__(name: str) -> Any:
    missing("mlserver.errors", name)
