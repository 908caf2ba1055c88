"""`Extension`, the interface of Triton's extensions of the protocol, and the REST paths of models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from triglot.protocols.rows import Method, Route

MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version}"
MODEL_PATHS = (MODEL, VERSION)
"""REST paths of a model and of a version (spec 3.1)."""


class Extension(Protocol):
    """The calls of one extension, by gRPC and by REST."""

    names: Sequence[str]
    """The extension's names in the server's metadata (spec 3.2); empty if it has none there."""

    def methods(self) -> Sequence[Method]:
        """Return the rows of GRPCInferenceService."""
        ...

    def routes(self) -> Sequence[Route]:
        """Return the rows of the REST interface."""
        ...
