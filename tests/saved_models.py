"""SavedModels for tests, written by TensorFlow in its own environment."""

from __future__ import annotations

import os
import shutil
import subprocess
from functools import partial
from pathlib import Path

from tests import environments
from tests.kept_files import kept_files

SCRIPTS = Path(__file__).parent / "e2e" / "clients"


def write(folder: Path, *names: str, script: str = "tf_models.py", packages: Path | None = None) -> Path:
    """Write FOLDER/NAME/VERSION/… for each of these models, or for all of the script; returns `folder`.

    `packages`: a folder with further packages for the script.
    """
    # One script imports the other, so the files depend on all of them.
    scripts = [file.read_text() for file in sorted(SCRIPTS.glob("tf*_models.py"))]
    prefix = environments.python("tensorflow").parents[1]
    kept = kept_files(prefix, script, "\0".join([*scripts, *names]), partial(_write, script, names, packages))
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    return folder


def _write(script: str, names: tuple[str, ...], packages: Path | None, folder: Path) -> None:
    command = [environments.python("tensorflow"), SCRIPTS / script, folder, *names]
    variables = os.environ if packages is None else {**os.environ, "PYTHONPATH": str(packages)}
    done = subprocess.run(list(map(str, command)), capture_output=True, check=False, env=variables)
    assert done.returncode == 0, done.stderr.decode(errors="replace")
