"""Virtual environments for the tests, created once and kept until their requirements change.

    python3 tests/environments.py dev        # prints the path of the environment's python

Each file in tests/requirements/ defines an environment; each folder, with a package-lock.json, one of Node's. Its
folder, .venv/NAME, records everything it was made from. If lines were only added to the file, these are installed
into the existing environment, so that processes that use it are not disturbed; after any other change it is made
anew. Programs that tests compile are kept in the same way. Uses only the standard library, because it runs before
anything is installed.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

OLDEST_PYTHON = (3, 11, 2)
ROOT = Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tests" / "requirements"
LINE = 79
"""Columns of a terminal's line that shows pip's progress."""


def made_of(requirements: Path) -> dict[str, Any]:
    """Return everything that an environment depends on, except for the names of its folder and its file."""
    lines = [line.strip() for line in requirements.read_text().splitlines()]
    lines = sorted(line for line in lines if line and not line.startswith("#"))
    made_of: dict[str, Any] = {"python": sys.version, "root": str(ROOT), "requirements": lines}
    editable = [line for line in lines if line.startswith("--editable")]
    if editable:
        made_of["project"] = _project(editable[0])
    return made_of


def _project(editable: str) -> dict[str, Any]:
    """Return the part of pyproject.toml that an installation depends on: no tools' settings, no other extras."""
    import tomllib  # noqa: PLC0415 - a Python that is too old lacks it, and must reach the error message below.

    text = tomllib.loads((ROOT / "pyproject.toml").read_text())
    project, extras = text["project"], _extras(editable)
    optional = project["optional-dependencies"]
    project["optional-dependencies"] = {extra: optional[extra] for extra in extras}
    return _installed({"project": project, "hatch": text["tool"]["hatch"]})


def _installed(text: dict[str, Any]) -> dict[str, Any]:
    """Return of the tables in `text` what an editable installation depends on: not what a wheel omits."""
    packages = text["hatch"]["build"]["targets"]["wheel"]["packages"]
    return {"project": text["project"], "version": text["hatch"]["version"], "packages": packages}


def _extras(editable: str) -> list[str]:
    """Return the extras in a requirement like `--editable .[onnx,torch]`."""
    named = editable.partition("[")[2].partition("]")[0]
    return [extra.strip() for extra in named.split(",") if extra.strip()]


def _read(stamp: Path) -> dict[str, Any] | None:
    """Return what the environment was made from; None if there is none."""
    if not stamp.exists():
        return None
    before: dict[str, Any] = json.loads(stamp.read_text())
    if "hatch" in before.get("project", {}):  # Recorded in full, as it was once.
        before["project"] = _installed(before["project"])
    return before


def has_grown(before: dict[str, Any], after: dict[str, Any]) -> bool:
    """Return whether lines were added to the requirements and nothing else changed."""
    kept = set(before["requirements"]) <= set(after["requirements"])
    return kept and {**before, "requirements": []} == {**after, "requirements": []}


def _make(folder: Path, requirements: Path) -> None:
    print(f"making {folder.relative_to(ROOT)} from {requirements.relative_to(ROOT)}  (once) …", file=sys.stderr)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)


def _install(folder: Path, requirements: Path) -> None:
    pip = [str(folder / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
    # Most modules are never imported, and need no compilation.
    install = [*pip, "install", "--no-compile", "--progress-bar=off", "--requirement", str(requirements)]
    shows = sys.stderr.isatty()
    with subprocess.Popen(install, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if shows:  # Each in place of the one before it.
                print(f"\r\033[K{line.strip()[:LINE]}", end="", file=sys.stderr, flush=True)
        if shows:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, install)


def python(name: str) -> Path:
    """Return the path of the python of environment `name`; creates or updates the environment first if necessary.

    The environment that this process runs in is never changed.
    """
    requirements = REQUIREMENTS / f"{name}.txt"
    folder = ROOT / ".venv" / name
    if folder == Path(sys.prefix):
        return Path(sys.executable)  # Changing it would break this process.
    folder.parent.mkdir(exist_ok=True)
    stamp = folder / "made_of.json"
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        before, after = _read(stamp), made_of(requirements)
        if before != after:
            if before is None or not has_grown(before, after):
                _make(folder, requirements)
            _install(folder, requirements)
            stamp.write_text(json.dumps(after))
    return folder / "bin" / "python"


def node_modules(name: str) -> Path:
    """Return the folder with the `node_modules` of Node's environment `name`; installs them first if necessary.

    `npm ci` installs exactly what the environment's package-lock.json lists.
    """
    requirements = REQUIREMENTS / name

    def install(folder: Path) -> None:
        shutil.copytree(requirements, folder, dirs_exist_ok=True)
        subprocess.run(["npm", "ci", "--no-audit", "--no-fund"], check=True, cwd=folder, stdout=sys.stderr)

    return _kept(name, requirements, (requirements / "package-lock.json").read_text(), install) / "node_modules"


def compiled(source: Path, command: list[str], **variables: str) -> Path:
    """Return the folder that `command` compiled `source` in; runs it there first if they are not as they were."""

    def compile_source(folder: Path) -> None:
        subprocess.run(command, check=True, cwd=folder, stdout=sys.stderr, env={**os.environ, **variables})

    return _kept(source.stem, source, json.dumps([source.read_text(), command, variables]), compile_source)


def _kept(name: str, source: Path, wanted: str, make: Callable[[Path], None]) -> Path:
    """Return the folder .venv/NAME; `make` fills it if it was not made from what is wanted."""
    folder = ROOT / ".venv" / name
    folder.parent.mkdir(exist_ok=True)
    stamp = folder / "made_of.json"
    with (folder.parent / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not stamp.exists() or json.loads(stamp.read_text()) != wanted:
            print(f"making .venv/{name} from {source.relative_to(ROOT)}  (once) …", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir()
            make(folder)
            stamp.write_text(json.dumps(wanted))
    return folder


if __name__ == "__main__":
    if sys.version_info < OLDEST_PYTHON:
        sys.exit(
            f"Python {'.'.join(map(str, OLDEST_PYTHON))} or newer is needed, this is {sys.version.split()[0]}"
        )
    try:
        import ensurepip  # noqa: F401 - on Debian, a separate package has it.
    except ImportError:
        sys.exit(f"{sys.executable} has no venv; on Debian and Ubuntu: apt install python3-venv")
    try:
        print(os.fspath(python(sys.argv[1])))
    except subprocess.CalledProcessError as error:
        sys.exit(f"the environment could not be made: {' '.join(error.cmd)} ended with status {error.returncode}")
    except KeyboardInterrupt:
        sys.exit(130)
