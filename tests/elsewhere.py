"""Files of tests that run in another environment, which has their libraries."""

from __future__ import annotations

import subprocess
from pathlib import Path

import environments
from process import clean_environment

RUN_SECONDS = 300


def check_tests(environment: str, *files: Path, seconds: float = RUN_SECONDS) -> None:
    """Run files of tests there, in one go: the libraries take seconds to import. They may take so many `seconds`.

    Raises `AssertionError` unless all of them hold, and none is skipped.
    """
    done = subprocess.run(
        [str(environments.python(environment)), "-m", "pytest", "-q", "-p", "no:cacheprovider", *map(str, files)],
        capture_output=True,
        text=True,
        timeout=seconds,
        env=clean_environment(),
        cwd=environments.ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "skipped" not in done.stdout
