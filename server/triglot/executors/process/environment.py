"""A model's processes, and the Python environment that they run in: the server's, or one of the model's own."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any

from triglot.core.errors import ModelLoadError
from triglot.executors.process import first_steps, packages
from triglot.executors.remote.place import Body, Place, Program, log_descriptor
from triglot.platform.unpacked import LoadCancelled, Unpacked, source_of

log = logging.getLogger(__name__)

OLDEST_PYTHON = (3, 11)
LENT = "ml_dtypes"
"""Package that a process needs besides numpy; a Python of the server's version that lacks it uses the server's."""
_SAME_PYTHON = "import sys; sys.path[:] = {path!r}; from triglot.executors.process.main import main; main()"
_LOOK = (
    "import importlib.util, json, sys; "
    "there = [one for one in sys.argv[1:] if importlib.util.find_spec(one)]; "
    "print(json.dumps([sys.version_info[:2], there]))"
)
_ACTIVATED = 'source "$0/bin/activate"; exec "$@"'
_SECONDS = 0.1
"""Seconds between checks whether loading was cancelled while a program runs."""


class Environment(Place):
    """The Python environment of the processes of one model.

    It is a folder with a bin/python, as conda and venv make it, or an archive of one, as conda-pack makes it,
    which is unpacked first, or a list of packages, of which one is built first; without a path it is the server's
    own.

    It needs Python 3.11 or newer, numpy and, if its version is not the server's, ml_dtypes. bash sources its
    bin/activate first, if there is one.
    """

    def __init__(self, program: Program) -> None:
        self._path = program.config.environment
        self._builds = program.config.builds_environment
        self._unpacked: Unpacked | None = None
        self._folder: Path | None = None
        self._lent: dict[str, str] = {}
        self._cancelled = False

    def open(self) -> None:
        """Unpack it if needed, and check it. Blocks.

        Raise `ModelLoadError`, which names the path, for an unusable one, and when loading was cancelled.
        """
        if self._path is None:
            return
        try:
            if self._path.is_dir():
                self._folder = self._path
            elif packages.is_list(self._path):
                source = source_of(self._path)
                self._unpacked = Unpacked.made("environments", source, self._build, lambda: self._cancelled)
                self._folder = self._unpacked.folder
            else:
                self._unpacked = Unpacked.of(self._path, self._mend, lambda: self._cancelled)
                self._folder = self._unpacked.folder
            self._look(self._folder)
        except BaseException as error:
            self.close()
            if isinstance(error, LoadCancelled):
                raise ModelLoadError(f"{self._path}: loading was cancelled") from None
            if isinstance(error, Exception) and not isinstance(error, ModelLoadError):
                raise ModelLoadError(f"{self._path}: not a usable Python environment: {error}") from error
            raise

    def cancel_load(self) -> None:
        """Cancel `open`. On any thread."""
        self._cancelled = True

    def _build(self, folder: Path) -> None:
        """Build the environment of the list of packages. Raise `ModelLoadError` where that is not allowed."""
        assert self._path is not None, "it is open"
        if not self._builds:
            raise ModelLoadError(
                f"{self._path}: the model's Python environment is not built yet; --build-environments start "
                "builds it when the server starts, --build-environments always now"
            )
        began = time.monotonic()
        log.info("%s: building a Python environment with pip, in %s", self._path, folder)
        packages.build(self._path, folder, partial(self._run, folder))
        log.info("%s: its Python environment was built in %.1f s", self._path, time.monotonic() - began)

    def _mend(self, folder: Path) -> None:
        """Correct the paths in conda's files, which contain the folder that they were packed in."""
        mender = folder / "bin" / "conda-unpack"
        if mender.exists():
            self._run(folder, folder, [str(folder / "bin" / "python"), str(mender)])

    def _look(self, folder: Path) -> None:
        """Raise `ModelLoadError` for a Python that cannot run the server's part of the process."""
        python = str(folder / "bin" / "python")
        printed = self._run(folder, folder, _activated(folder, [python, "-c", _LOOK, "numpy", LENT]))
        # The activation script may print, too: only the last line counts.
        version, modules = json.loads(printed.rpartition("\n")[2])
        if tuple(version) < OLDEST_PYTHON:
            oldest = ".".join(map(str, OLDEST_PYTHON))
            raise ModelLoadError(
                f"{self._path}: its Python is {version[0]}.{version[1]}, expected {oldest} or newer"
            )
        if LENT not in modules and tuple(version) == sys.version_info[:2]:
            self._lent = {LENT: _folder_of(LENT)}  # A compiled package, which fits only the same Python version.
            modules.append(LENT)
        if missing := [module for module in ("numpy", LENT) if module not in modules]:
            raise ModelLoadError(
                f"{self._path}: its Python has no {' and no '.join(missing)}; install it there: "
                f"pip install {' '.join(missing)}"
            )

    def _run(self, folder: Path, place: Path, command: Sequence[str]) -> str:
        """Return the output of a program of the environment in `folder`, run in `place`.

        Raise `LoadCancelled`, or `ValueError` if it fails.
        """
        with TemporaryFile() as out, TemporaryFile() as err:
            program = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                # No pipes: processes that it has started may keep them open.
                stdout=out,
                stderr=err,
                # Not the server's working directory, whose modules this Python could import.
                cwd=place,
                env=self.variables(),
                start_new_session=True,
            )
            try:
                while program.poll() is None:
                    if self._cancelled:
                        raise LoadCancelled
                    with suppress(subprocess.TimeoutExpired):
                        program.wait(_SECONDS)
            except BaseException:
                with suppress(ProcessLookupError):
                    os.killpg(program.pid, signal.SIGKILL)
                program.wait()
                raise
            printed, errors = (_text(file) for file in (out, err))
        if program.returncode:
            error_text = f": {errors.rpartition(chr(10))[2][:500]}" if errors else ""
            raise ValueError(f"{folder / 'bin' / 'python'} exited with status {program.returncode}{error_text}")
        return printed

    def start(self, program: Program, number: int) -> LocalBody:
        """See `Place`."""
        return LocalBody(
            lambda connection: self._command(str(connection), str(os.getpid()), program.name), self.variables()
        )

    def _command(self, *arguments: str) -> list[str]:
        """Return the command that runs the process's `main` with these arguments."""
        if self._path is None:
            path = [str(path) for path in sys.path]
            return [sys.executable, "-c", _SAME_PYTHON.format(path=path), *arguments]
        assert self._folder is not None, "it is open"
        # -P: the modules beside first_steps.py must not be importable by their bare names.
        python = [str(self._folder / "bin" / "python"), "-P", first_steps.__file__, *arguments]
        return _activated(self._folder, python)

    def variables(self) -> Mapping[str, str]:
        """Return the process's environment variables."""
        if self._path is None:
            return os.environ
        # The two that are dropped are for the server's Python.
        kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "PYTHONPATH")}
        if self._folder is not None:
            kept[first_steps.PACKAGES] = json.dumps([{"triglot": _folder_of("triglot")}, self._lent])
            kept["PATH"] = os.pathsep.join([str(self._folder / "bin"), kept.get("PATH", os.defpath)])
        return kept

    def close(self) -> None:
        """Release the unpacked folder; no process may be running in it."""
        unpacked, self._unpacked, self._folder = self._unpacked, None, None
        if unpacked is not None:
            unpacked.close()


def _activated(folder: Path, command: list[str]) -> list[str]:
    bash = shutil.which("bash")
    if bash is None or not (folder / "bin" / "activate").exists():
        return command
    return [bash, "-c", _ACTIVATED, str(folder), *command]


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace").strip()


def _folder_of(package: str) -> str:
    spec: Any = importlib.util.find_spec(package)
    return str(next(iter(spec.submodule_search_locations)))


_STATUS_SECONDS = 5.0
"""How long to wait for the exit status of a process that has closed its connection."""


class LocalBody(Body):
    """See `Body`. `command` returns the command to run, given the file descriptor of the process's connection.

    Raise `OSError`.
    """

    def __init__(self, command: Callable[[int], Sequence[str]], variables: Mapping[str, str]) -> None:
        self._connection, theirs = socket.socketpair()
        self.begun = time.monotonic()
        with theirs:
            try:
                self._popen = _spawned(command(theirs.fileno()), variables, theirs.fileno())
            except BaseException:
                self._connection.close()
                raise
        self.pid = self._popen.pid
        self.where = f"pid {self.pid}"

    def connect(self) -> socket.socket:
        """See `Body`."""
        return self._connection

    def exit_reason(self) -> str:
        """See `Body`."""
        status = self._popen.poll()
        return "" if status is None else _exit_text(status)

    def why_closed(self) -> str:
        """See `Body`."""
        return self.exit_reason() if self.wait(_STATUS_SECONDS) else "closed its connection"

    def wait(self, timeout: float | None) -> bool:
        """See `Body`."""
        try:
            self._popen.wait(timeout)
        except subprocess.TimeoutExpired:
            return False
        return True

    def terminate(self) -> None:
        """See `Body`: SIGTERM."""
        self._popen.terminate()

    def kill(self) -> None:
        """See `Body`: SIGKILL."""
        self._popen.kill()


def _spawned(command: Sequence[str], variables: Mapping[str, str], passed: int) -> subprocess.Popen[bytes]:
    log = log_descriptor()
    return subprocess.Popen(
        command,
        env=variables,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        pass_fds=(passed,),
        # Signals of the terminal are for the server, which ends the process.
        start_new_session=True,
    )


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"exited with status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"was terminated by {name}{' (out of memory?)' if name == 'SIGKILL' else ''}"
