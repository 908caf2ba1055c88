"""What the environments need, and what is said where it is not there."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import environments

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


BEFORE = {"python": "3.11", "root": "/a", "requirements": ["x==1", "y==2"], "project": {"name": "triglot"}}


@pytest.mark.parametrize(
    ("change", "grown"),
    [
        ({"requirements": ["w==1", "x==1", "y==2"]}, True),
        ({"requirements": ["x==1"]}, False),
        ({"requirements": ["x==1", "y==3"]}, False),
        ({"requirements": ["w==1", "x==1", "y==2"], "python": "3.12"}, False),
        ({"requirements": ["w==1", "x==1", "y==2"], "project": {}}, False),
    ],
)
def test_added_lines_are_installed_with_the_others(change: dict[str, object], grown: bool) -> None:
    assert environments.has_grown(BEFORE, BEFORE | change) is grown


def test_settings_of_tools_make_no_environment_anew() -> None:
    made_of = environments.made_of(environments.REQUIREMENTS / "dev.txt")
    assert set(made_of["project"]) == {"packages", "project", "version"}
