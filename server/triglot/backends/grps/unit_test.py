"""A grps project's own tests: what they derive from, and how they are run (grps 6.1)."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from contextlib import chdir
from typing import Any

from triglot.backends.grps.project import GrpsProject
from triglot.backends.grps.settings import ProjectSettings
from triglot.core.errors import ModelLoadError
from triglot.core.monitor import Monitor

DEFAULT_TEST = "test.MyTestCase.test_infer"


class GrpsTest(unittest.TestCase):
    """The base of a project's test class; after `test_init`, `self.executor` runs its models."""

    executor: Any = None
    make_executor: Callable[[], Any]

    def test_init(self) -> None:
        """Loads all models. The configuration was checked when it was read."""
        self.executor = self.make_executor()


def run_unittest(settings: ProjectSettings, name: str = DEFAULT_TEST) -> bool:
    """Run a project's test in its folder and print the result; whether it ran and passed.

    `name` is a module, a class or a method, with dots between. Raises `ModelLoadError` when there is no such
    module in the project, or its other modules cannot be imported.
    """
    module = settings.folder / name.partition(".")[0]
    if not module.is_dir() and not module.with_suffix(".py").is_file():
        # Python's own package of tests is called `test`, too.
        raise ModelLoadError(
            f"{settings.folder}: there is no {module.name}.py; expected the project's tests in it"
        )
    with chdir(settings.folder), GrpsProject(settings, Monitor()).loaded():
        suite = unittest.defaultTestLoader.loadTestsFromName(name)
        result = unittest.TextTestRunner().run(suite)
        return result.testsRun > 0 and result.wasSuccessful()
