"""SavedModels for tests, written by TensorFlow in its own environment."""

from __future__ import annotations

import subprocess
from pathlib import Path

import environments

SCRIPTS = Path(__file__).parent / "e2e" / "clients"


def write(folder: Path, *names: str, script: str = "tf_models.py") -> Path:
    """FOLDER/NAME/VERSION/… for each of these models, or for all that the script has. Returns `folder`."""
    command = [environments.python("tensorflow"), SCRIPTS / script, folder, *names]
    done = subprocess.run(list(map(str, command)), capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    return folder
