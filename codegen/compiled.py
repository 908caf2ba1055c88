"""Compiles the modules that `tests/layers.toml` lists, from the same files, in a copy of the package.

    python3 codegen/compiled.py [--within SECONDS]    # prints the folder for PYTHONPATH, .venv/compiled/HASH
    python3 codegen/compiled.py --later               # the same, if it is there; else it is made in the background

The copy is made anew once a source, the compiler or the Python changes. With `--within`, a build that fails or
takes longer is abandoned, and not tried again. Needs a C compiler and Python's headers; the environment `compile`
of tests/requirements has mypyc.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import sysconfig
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
SERVER = ROOT / "server"
BUILDS = ROOT / ".venv" / "compiled"
REQUIREMENTS = ROOT / "tests" / "requirements" / "compile.txt"
OPTIMISATION = "2"
LATER_SECONDS = 600.0
"""How long a build in the background may take: the machine does other work, too."""
KEPT = 3
"""Builds that are kept: a server that runs imports from its own."""


def module_files() -> list[str]:
    """Return the files of the modules to compile, relative to `server/`."""
    table = tomllib.loads((ROOT / "tests" / "layers.toml").read_text())
    names = [name.replace(".", "/") for name in table["compiled"]["modules"]]
    return sorted(
        str(file.relative_to(SERVER))
        for name in names
        for file in (
            [SERVER / f"{name}.py"] if (SERVER / f"{name}.py").is_file() else (SERVER / name).glob("*.py")
        )
    )


def build(folder: Path) -> list[Path]:
    """Compile the modules inside of `folder`, which holds a copy of the package; return the libraries' paths.

    Raise `SystemExit` for what mypyc refuses, and setuptools' errors of the C compiler.
    """
    from mypyc.build import mypycify  # noqa: PLC0415 - see the heading.
    from setuptools import Distribution  # noqa: PLC0415
    from setuptools.command.build_ext import build_ext  # noqa: PLC0415

    class Parallel(build_ext):  # type: ignore[misc]  # setuptools has no types.
        """Runs the C compiler once for each core."""

        def build_extensions(self) -> None:
            compiler: Any = self.compiler
            compile_in_turn = compiler.compile

            def compile_all(sources: list[str], *arguments: Any, **options: Any) -> list[str]:
                with ThreadPoolExecutor(os.cpu_count()) as pool:
                    made = pool.map(lambda source: compile_in_turn([source], *arguments, **options), sources)
                    return [name for names in made for name in names]

            compiler.compile = compile_all
            super().build_extensions()

    before = set(folder.rglob("*.so"))
    (folder / "mypy.ini").write_text("[mypy]\nignore_missing_imports = True\n")
    os.environ["MYPYPATH"] = str(folder)
    os.chdir(folder)
    options = ["--config-file", "mypy.ini", "--cache-dir", str(ROOT / ".mypy_cache" / "compiled")]
    extensions = mypycify(
        [*options, *module_files()],
        opt_level=OPTIMISATION,
        debug_level="0",
        multi_file=True,
        group_name="triglot",
    )
    command = Parallel(Distribution({"name": "triglot", "ext_modules": extensions}))
    command.inplace = True
    command.build_temp = str(folder / "build")
    command.ensure_finalized()
    command.run()
    shutil.rmtree(folder / "build")
    (folder / "mypy.ini").unlink()
    return sorted(set(folder.rglob("*.so")) - before)


def copy_package(folder: Path) -> None:
    """Copy the package into `folder`, which is emptied."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(SERVER / "triglot", folder / "triglot", ignore=shutil.ignore_patterns("__pycache__", "*.so"))


def digest() -> str:
    """Return a digest of everything that a build depends on."""
    made = hashlib.sha256()
    for text in (sys.version, platform.machine(), REQUIREMENTS.read_text(), OPTIMISATION, *module_files()):
        made.update(text.encode() + b"\0")
    for file in sorted([*(SERVER / "triglot").rglob("*.py*"), Path(__file__)]):
        if file.suffix in {".py", ".pyi"}:
            made.update(str(file.relative_to(ROOT)).encode() + b"\0" + file.read_bytes())
    return made.hexdigest()[:16]


def kept_build(seconds: float | None, *, later: bool = False) -> Path | None:
    """Return the folder with the build of the current sources, made now, or `later`, if there is none.

    None, and the reason on standard error: there is no compiler, it is made later, or, with `seconds`, it fails or
    takes longer. Raise as `_make`.
    """
    compiler = os.environ.get("CC") or str(sysconfig.get_config_var("CC") or "cc")
    folder = BUILDS / digest()
    too_slow = folder.with_suffix(".slow")
    if shutil.which(compiler.split()[0]) is None:
        print(f"not compiled: there is no C compiler ({compiler.split()[0]})", file=sys.stderr)
    elif folder.is_dir():
        return folder
    elif (later or seconds is not None) and too_slow.exists():
        print(f"not compiled: {too_slow.read_text()}", file=sys.stderr)
    elif later:
        _start()
    else:
        return _make(folder, seconds, too_slow)
    return None


def _start() -> None:
    """Start a build that continues when this process, and what it is made for, has ended."""
    BUILDS.mkdir(parents=True, exist_ok=True)
    log = BUILDS / "log"
    command = [sys.executable, __file__, "--within", str(LATER_SECONDS)]
    if nice := shutil.which("nice"):
        command = [nice, *command]
    with log.open("wb") as output:
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True)
    where = log.relative_to(ROOT)
    print(
        f"not compiled: a compiled build is made in the background, for the next start ({where})", file=sys.stderr
    )


def _make(folder: Path, seconds: float | None, too_slow: Path) -> Path | None:
    """Build into `folder`, and return it; None, and the reason in `too_slow`, if it fails or takes more `seconds`.

    Raise `SystemExit` for a build that fails without `seconds`, and `CalledProcessError` without its environment.
    """
    environments = [sys.executable, str(ROOT / "tests" / "environments.py"), "compile"]
    environment = subprocess.run(environments, check=seconds is None, stdout=subprocess.PIPE, text=True)
    if environment.returncode:
        print("not compiled: the environment of the compiler could not be made", file=sys.stderr)
        return None
    unfinished = folder.with_suffix(f".{os.getpid()}")
    copy_package(unfinished)
    print("compiling the path of a call …", file=sys.stderr)
    log = unfinished / "log"
    with log.open("wb") as output:
        command = [environment.stdout.strip(), __file__, "--in", str(unfinished)]
        process = subprocess.Popen(command, stdout=output, stderr=output, start_new_session=True)
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            if process.poll() is None:  # It takes too long, or this process was interrupted.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status != 0:
        text = log.read_text()
        shutil.rmtree(unfinished)
        if seconds is None:
            sys.exit(f"the build failed:\n{text}")
        reason = f"it takes more than {seconds:g} s here" if status is None else "the build failed here"
        too_slow.write_text(reason)
        print(f"not compiled: {reason}; see python3 codegen/compiled.py", file=sys.stderr)
        return None
    log.unlink()
    unfinished.rename(folder)
    finished = sorted((path for path in BUILDS.iterdir() if path.is_dir() and not path.suffix), key=_age)
    for old in finished[KEPT:]:
        shutil.rmtree(old)
    return folder


def _age(folder: Path) -> float:
    return -folder.stat().st_mtime


def main() -> None:
    """Print the folder of the build; nothing if there is none."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--within", type=float, metavar="SECONDS", help="give up a build that takes longer")
    parser.add_argument("--later", action="store_true", help="make a build that is not there in the background")
    parser.add_argument("--in", dest="folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.folder is not None:
        build(arguments.folder)
    elif (folder := kept_build(arguments.within, later=arguments.later)) is not None:
        print(folder)


if __name__ == "__main__":
    main()
