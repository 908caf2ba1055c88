"""Base class of a grps project's own tests (grps 6.1)."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any


class GrpsTest(unittest.TestCase):
    """Base of a project's test class; after `test_init`, `self.executor` runs its models."""

    executor: Any = None
    make_executor: Callable[[], Any]

    def test_init(self) -> None:
        """Loads all models. The configuration has been validated when it was read."""
        self.executor = self.make_executor()
