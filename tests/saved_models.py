"""SavedModels for tests, written by TensorFlow in its own environment."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
from pathlib import Path

import environments

SCRIPTS = Path(__file__).parent / "e2e" / "clients"


def write(folder: Path, *names: str, script: str = "tf_models.py") -> Path:
    """FOLDER/NAME/VERSION/… for each of these models, or for all that the script has. Returns `folder`.

    TensorFlow takes seconds to write them: they are kept in its environment, and copied.
    """
    python = environments.python("tensorflow")
    kept = python.parents[1] / "saved_models" / f"{script}-{_digest(*names)}"
    kept.parent.mkdir(exist_ok=True)
    with kept.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            written = kept.with_suffix(".new")
            shutil.rmtree(written, ignore_errors=True)
            command = [python, SCRIPTS / script, written, *names]
            done = subprocess.run(list(map(str, command)), capture_output=True, check=False)
            assert done.returncode == 0, done.stderr.decode(errors="replace")
            written.rename(kept)
    shutil.copytree(kept, folder, dirs_exist_ok=True)
    return folder


def _digest(*names: str) -> str:
    # One script imports the other.
    scripts = [file.read_text() for file in sorted(SCRIPTS.glob("tf*_models.py"))]
    return hashlib.sha256("\0".join([*scripts, *names]).encode()).hexdigest()[:16]
