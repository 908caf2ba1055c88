"""The Python that the processes of a model run in: the server's, or one that the model brings along."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from triglot.core.errors import ModelLoadError

OLDEST_PYTHON = (3, 11)
LENT = "ml_dtypes"
"""What a process needs besides numpy, and gets from the server's Python where its own has none."""
_SAME_PYTHON = "import sys; sys.path[:] = {path!r}; from triglot.engine.processes.child import main; main()"
_FIRST_STEPS = Path(__file__).with_name("first_steps.py")
_LOOK = (
    "import importlib.util, json, sys; "
    "there = [one for one in sys.argv[1:] if importlib.util.find_spec(one)]; "
    "print(json.dumps([sys.version_info[:2], there]))"
)
_ACTIVATED = 'source "$0/bin/activate" && exec "$@"'
_LOOK_SECONDS = 60.0
_UNPACKED_SECONDS = 600.0


class Environment:
    """`path` is a folder with a bin/python, as conda and venv make it, or an archive of one, as conda-pack makes
    it, which is unpacked for as long as the model lives; None: the server's own Python.

    It needs Python 3.11 and numpy. Its bin/activate, where there is one, is read by bash first.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._unpacked: tempfile.TemporaryDirectory[str] | None = None
        self._folder: Path | None = None
        self._lent: dict[str, str] = {}

    def open(self) -> None:
        """Have it ready. Blocks. Raises `ModelLoadError`, which names the path, for what is none."""
        if self._path is None:
            return
        try:
            self._folder = self._path if self._path.is_dir() else self._unpack(self._path)
            self._look(self._folder / "bin" / "python")
        except BaseException as error:
            self.close()
            if isinstance(error, OSError | tarfile.TarError | subprocess.SubprocessError | EOFError | ValueError):
                raise ModelLoadError(f"{self._path}: not an environment of Python's: {error}") from error
            raise

    def _unpack(self, archive: Path) -> Path:
        self._unpacked = tempfile.TemporaryDirectory(prefix="triglot-environment-", ignore_cleanup_errors=True)
        folder = Path(self._unpacked.name)
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="tar")
        # conda's files know where they are; this tells them anew.
        mender = folder / "bin" / "conda-unpack"
        if mender.exists():
            self._run(_UNPACKED_SECONDS, str(folder / "bin" / "python"), str(mender))
        return folder

    def _look(self, python: Path) -> None:
        """Raises `ModelLoadError` for a Python that cannot run our part of the process."""
        version, there = json.loads(self._run(_LOOK_SECONDS, str(python), "-c", _LOOK, "numpy", LENT))
        if tuple(version) < OLDEST_PYTHON:
            oldest = ".".join(map(str, OLDEST_PYTHON))
            raise ModelLoadError(
                f"{self._path}: its Python is {version[0]}.{version[1]}, expected {oldest} or newer"
            )
        if LENT not in there and tuple(version) == sys.version_info[:2]:
            self._lent = {LENT: _folder_of(LENT)}  # Compiled, so for the same Python only.
            there.append(LENT)
        if missing := [one for one in ("numpy", LENT) if one not in there]:
            raise ModelLoadError(
                f"{self._path}: its Python has no {' and no '.join(missing)}; install it there: "
                f"pip install {' '.join(missing)}"
            )

    def _run(self, seconds: float, *command: str) -> str:
        ran = subprocess.run(
            command,
            check=False,
            timeout=seconds,
            text=True,
            errors="replace",
            stdin=subprocess.DEVNULL,
            capture_output=True,
            env=self.variables(),
        )
        if ran.returncode:
            lines = ran.stderr.strip().splitlines()
            said = f": {lines[-1][:500]}" if lines else ""
            raise ValueError(f"{command[0]} ended with status {ran.returncode}{said}")
        return ran.stdout

    def command(self, *arguments: str) -> list[str]:
        """What runs the process's `main` with these arguments."""
        if self._folder is None:
            path = [str(path) for path in sys.path]
            return [sys.executable, "-c", _SAME_PYTHON.format(path=path), *arguments]
        packages = json.dumps([{"triglot": _folder_of("triglot")}, self._lent])
        # -P: what lies beside the file is none of the model's.
        python = [str(self._folder / "bin" / "python"), "-P", str(_FIRST_STEPS), packages, *arguments]
        bash = shutil.which("bash")
        if bash is None or not (self._folder / "bin" / "activate").exists():
            return python
        return [bash, "-c", _ACTIVATED, str(self._folder), *python]

    def variables(self) -> Mapping[str, str]:
        """The process's environment variables."""
        if self._path is None:
            return os.environ
        # They say where the server's Python finds its modules.
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
        if self._folder is not None:
            kept["PATH"] = os.pathsep.join([str(self._folder / "bin"), kept.get("PATH", os.defpath)])
        return kept

    def close(self) -> None:
        """No process runs in it any more."""
        unpacked, self._unpacked, self._folder = self._unpacked, None, None
        if unpacked is not None:
            unpacked.cleanup()


def _folder_of(package: str) -> str:
    spec: Any = importlib.util.find_spec(package)
    return str(next(iter(spec.submodule_search_locations)))
