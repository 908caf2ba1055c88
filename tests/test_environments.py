"""What the environments need, and what is said where it is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).parent / "environments.py"


NO_VENV = f"{sys.executable} has no venv; on Debian and Ubuntu: apt install python3-venv\n"


@pytest.mark.parametrize(
    ("lacks", "problem"),
    [
        ("sys.modules['ensurepip'] = None", NO_VENV),
        ("sys.version_info = (3, 11, 1)", "Python 3.11.2 or newer is needed, this is "),
    ],
)
def test_missing_program_is_one_line(lacks: str, problem: str) -> None:
    run = f"runpy.run_path({str(FILE)!r}, run_name='__main__')"
    code = f"import runpy, sys\n{lacks}\nsys.argv[1:] = ['dev']\n{run}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith(problem)
    assert len(done.stderr.splitlines()) == 1
