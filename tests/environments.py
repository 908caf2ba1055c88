"""Virtual environments, made once and kept until their requirements change.

    python3 tests/environments.py dev        # prints the environment's python

An environment is a file in tests/requirements/. Its folder, .venv/NAME, carries the hash of everything it was
made from; another hash means that it is made anew. Only the standard library is used: this runs first.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

OLDEST_PYTHON = (3, 11, 4)
ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tests" / "requirements"


def _fingerprint(requirements: Path) -> str:
    parts = [requirements.read_bytes(), sys.version.encode(), str(ROOT).encode()]
    if b"--editable" in parts[0]:
        parts.append((ROOT / "pyproject.toml").read_bytes())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def _make(folder: Path, requirements: Path) -> None:
    print(f"making {folder.relative_to(ROOT)} from {requirements.relative_to(ROOT)}  (once) …", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--quiet", "--disable-pip-version-check"]
    subprocess.run([*pip, "install", "--requirement", str(requirements)], check=True, cwd=ROOT, stdout=sys.stderr)


def python(name: str) -> Path:
    """The python of environment `name`, which is made first when it is missing or out of date.

    The environment that this runs in stays as it is.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    folder = ROOT / ".venv" / name
    if folder == Path(sys.prefix):
        return Path(sys.executable)  # Nobody saws off the branch that he sits on.
    folder.parent.mkdir(exist_ok=True)
    stamp = folder / "requirements.sha256"
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        fingerprint = _fingerprint(requirements)
        if not stamp.exists() or stamp.read_text() != fingerprint:
            _make(folder, requirements)
            stamp.write_text(fingerprint)
    return folder / "bin" / "python"


if __name__ == "__main__":
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed, this is {sys.version.split()[0]}"
        )
    try:
        print(os.fspath(python(sys.argv[1])))
    except subprocess.CalledProcessError as error:
        sys.exit(f"the environment could not be made: {' '.join(error.cmd)} ended with status {error.returncode}")
    except KeyboardInterrupt:
        sys.exit(130)
