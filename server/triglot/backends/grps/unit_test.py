"""Runs a grps project's own tests (grps 6.1)."""

from __future__ import annotations

import unittest
from contextlib import chdir

from triglot.backends.grps.project import GrpsProject
from triglot.backends.grps.settings import ProjectSettings
from triglot.core.errors import ModelLoadError
from triglot.telemetry.monitor import Monitor

DEFAULT_TEST = "test.MyTestCase.test_infer"


def run_unittest(settings: ProjectSettings, name: str = DEFAULT_TEST) -> bool:
    """Run a project's test in its folder and print the result; return whether it ran and passed.

    `name` is a module, a class or a method, separated by dots. Raise `ModelLoadError` if the project has no such
    module, or if its other modules cannot be imported.
    """
    module = settings.folder / name.partition(".")[0]
    if not module.is_dir() and not module.with_suffix(".py").is_file():
        # Python's own test package is called `test`, too.
        raise ModelLoadError(f"{settings.folder}: {module.name}.py not found; expected the project's tests in it")
    with chdir(settings.folder), GrpsProject(settings, Monitor()).loaded():
        suite = unittest.defaultTestLoader.loadTestsFromName(name)
        result = unittest.TextTestRunner().run(suite)
        return result.testsRun > 0 and result.wasSuccessful()
