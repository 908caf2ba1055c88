"""What each of Triton's extensions of the protocol adds to the foundation's calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from triglot.protocols.rows import Method, Route

MODEL = "/v2/models/{model}"
VERSION = MODEL + "/versions/{version:[0-9]+}"
MODEL_PATHS = (MODEL, VERSION)
"""Where REST finds a model, and a version of it (spec 3.1)."""


class Extension(Protocol):
    """Calls that belong together, by gRPC and by REST."""

    names: Sequence[str]
    """What the server's metadata calls it (spec 3.2); empty: nothing there."""

    def methods(self) -> Sequence[Method]:
        """The rows of GRPCInferenceService."""
        ...

    def routes(self) -> Sequence[Route]:
        """The rows of the REST interface."""
        ...
