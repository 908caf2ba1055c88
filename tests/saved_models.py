"""SavedModels for tests, written by TensorFlow in its own environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import environments

SCRIPT = Path(__file__).parent / "e2e" / "clients" / "tf_models.py"


def write(folder: Path, *names: str) -> Path:
    """FOLDER/NAME/VERSION/… for each of these models, or for all that the script has. Returns `folder`."""
    python = environments.python("tensorflow")
    done = subprocess.run([str(python), str(SCRIPT), str(folder), *names], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return folder
