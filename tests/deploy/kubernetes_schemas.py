"""What Kubernetes says of an object, in each of its releases that are in use."""

from __future__ import annotations

from typing import Any

import pytest

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="the deploy environment has it")

RELEASES = tuple(f"1.{minor}" for minor in range(31, 38))


def check(document: dict[str, Any]) -> None:
    """Raise `kubernetes_validate.ValidationError` where a release does not take it, unknown fields included."""
    for release in RELEASES:
        # It takes the last one that it has in place of one that it lacks.
        assert kubernetes_validate.validate(document, release, strict=True) == release
