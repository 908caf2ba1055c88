"""Installs Triglot into a new virtual environment, without a compiler, and makes calls to a server of it.

    PYTHON tests/clean_install.py REQUIREMENT [OPTION ...]

REQUIREMENT (a wheel, for example) and the options are pip's. Uses only the standard library, so that any Python
runs it. Prints the row of the table in docs/compatibility.md; the exit status is not 0 if a step fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

SMOKE = Path(__file__).with_name("smoke.py")


def main(arguments: list[str]) -> int:
    """Install, then run tests/smoke.py; returns the exit status of the step that failed, or 0."""
    with tempfile.TemporaryDirectory(prefix="clean-install-") as folder:
        venv.create(folder, with_pip=True)
        python = str(Path(folder, "bin", "python"))
        kept = {name: value for name, value in os.environ.items() if not name.startswith("TRIGLOT_")}
        # No other program can be found: neither a compiler nor the checkout's.
        environment = {**kept, "PATH": str(Path(folder, "bin"))}
        pip = ["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-compile", *arguments]
        for step in (pip, [str(SMOKE)]):
            # -I: neither variables nor the working directory add modules.
            status = subprocess.run([python, "-I", *step], env=environment, check=False).returncode
            if status:
                return status
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
