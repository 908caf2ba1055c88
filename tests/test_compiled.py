"""The rules for modules that are compiled (`layers.toml`): they keep out what mypyc compiles wrongly or slowly.

And the build: it is made once, and where it fails or takes too long, plain Python is served.
"""

from __future__ import annotations

import ast
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest

from tests.process import LISTENING, write_model
from tests.test_layers import MODULES, TABLE
from tests.waiting import wait_until
from triglot.testing.process import Lines

COMPILED = {
    module: path
    for module, path in MODULES.items()
    if any(module == name or module.startswith(f"{name}.") for name in TABLE["compiled"]["modules"])
}
ROOT = Path(__file__).resolve().parents[1]
C_KEYWORDS = {"_thread"}
"""Attributes that become a word of C: mypyc puts an underscore before each."""

EXCEPTIONS = ("Error", "Exception", "InvalidArgument")
"""How the names of exceptions end that compiled modules derive from."""
NOT_NATIVE = "mypyc_attr(native_class=False)"


def violations(tree: ast.Module) -> Iterator[str]:
    """What a compiled module may not have, with its line."""
    for node in ast.walk(tree):
        if isinstance(node, ast.AsyncFunctionDef | ast.AsyncFor | ast.AsyncWith | ast.Await):
            # Some crash once they are cancelled (mypyc 2.4.1).
            yield f"{node.lineno}: a coroutine"
        elif isinstance(node, ast.ClassDef):
            bases = [ast.unparse(base) for base in node.bases]
            decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
            if any(base.endswith(EXCEPTIONS) for base in bases) and NOT_NATIVE not in decorators:
                yield f"{node.lineno}: an exception without {NOT_NATIVE}: it has no __dict__"
            if "ABC" in bases:
                yield f"{node.lineno}: ABC: what ends a weak reference to such an object corrupts memory"
            if any(base.startswith("Protocol") for base in bases):
                yield f"{node.lineno}: a Protocol: its attributes are looked up by name"
            if any(base.startswith("Generic[") for base in bases) and any(
                "dataclass" in decorator for decorator in decorators
            ):
                yield f"{node.lineno}: a generic dataclass, which cannot be imported"
        elif isinstance(node, ast.Attribute) and node.attr in C_KEYWORDS:
            yield f"{node.lineno}: {node.attr}, which becomes a keyword of C"
    for statement in tree.body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant):
            yield f"{statement.lineno}: a constant that is not Final: a dict is asked for it"


@pytest.mark.parametrize("module", sorted(COMPILED))
def test_a_compiled_module_keeps_the_rules(module: str) -> None:
    assert list(violations(ast.parse(Path(COMPILED[module]).read_text()))) == []


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of the checkout that compiles one small module, in the environments of this one."""
    for name in ("codegen", "server/triglot"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "tests" / "requirements").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "requirements" / "compile.txt", tmp_path / "tests" / "requirements")
    (tmp_path / "tests" / "layers.toml").write_text('[compiled]\nmodules = ["triglot.version"]\n')
    environments = f"""
import subprocess, sys
if sys.argv[1] == "serve":
    print({sys.executable!r})
else:
    sys.exit(subprocess.call([sys.executable, {str(ROOT / "tests" / "environments.py")!r}, *sys.argv[1:]]))
"""
    (tmp_path / "tests" / "environments.py").write_text(environments)
    write_model(tmp_path / "models" / "m")
    return tmp_path


def compiler(folder: Path, script: str) -> dict[str, str]:
    """The variable that names a compiler, which is this shell script."""
    file = folder / "compiler"
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)
    return {"CC": str(file)}


def compiled(checkout: Path, *options: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(checkout / "codegen" / "compiled.py"), *options]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, check=False)


def served(checkout: Path, environment: Mapping[str, str]) -> str:
    """What `make serve` writes before it serves."""
    arguments = [f"PYTHON={sys.executable}", f"MODELS={checkout / 'models'}", "ARGS=--grpc-port 0 --rest-port 0"]
    command = ["make", "-C", str(checkout), "serve", *arguments]
    # Neither an outer make's options nor a build that is under test.
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "PYTHONPATH"))}
    with subprocess.Popen(
        command, env={**kept, **environment}, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stderr is not None
        lines = Lines(process.stderr)
        try:
            listening = lines.wait_for(LISTENING)
        finally:
            os.killpg(process.pid, signal.SIGTERM)
        return lines.close()[: listening.start()]


def test_failed_build_is_not_repeated_and_the_plain_one_serves(checkout: Path) -> None:
    environment = compiler(checkout, 'echo "no <Python.h>" >&2; exit 1')
    first = served(checkout, environment)
    assert "not compiled: a compiled build is made in the background, for the next start" in first
    log = checkout / ".venv" / "compiled" / "log"
    wait_until(lambda: "not compiled: the build failed here; see python3 codegen/compiled.py\n" in log.read_text())
    assert "not compiled: the build failed here\n" in served(checkout, environment)
    asked = compiled(checkout, **environment)
    assert asked.returncode == 1
    assert "the build failed:" in asked.stderr
    assert "no <Python.h>" in asked.stderr


def test_a_build_is_made_while_the_plain_one_serves(checkout: Path) -> None:
    served(checkout, {})
    folder = checkout / ".venv" / "compiled"
    wait_until(lambda: any(path.is_dir() and not path.suffix for path in folder.iterdir()))
    assert "compiled" not in served(checkout, {})


def test_slow_build_is_ended_and_not_repeated(checkout: Path) -> None:
    first = compiled(checkout, "--within", "2", **compiler(checkout, "exec sleep 600"))
    assert (first.returncode, first.stdout) == (0, "")
    assert first.stderr.endswith("not compiled: it takes more than 2 s here; see python3 codegen/compiled.py\n")
    wait_until(lambda: not [process for process in psutil.process_iter() if str(checkout) in command_of(process)])
    second = compiled(checkout, "--within", "60")
    assert (second.returncode, second.stdout) == (0, "")
    assert second.stderr == "not compiled: it takes more than 2 s here\n"


def command_of(process: psutil.Process) -> str:
    """Its command line; "" once it has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def test_without_a_compiler_nothing_is_compiled(checkout: Path) -> None:
    done = compiled(checkout, "--within", "60", CC="no-such-compiler")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "not compiled: there is no C compiler (no-such-compiler)\n"


def test_build_is_made_once(checkout: Path) -> None:
    first, second = compiled(checkout), compiled(checkout)
    assert (first.returncode, second.returncode, second.stderr) == (0, 0, "")
    folder = Path(first.stdout.strip())
    assert second.stdout == first.stdout
    assert folder.parent == checkout / ".venv" / "compiled"
    asked = "import triglot.version; print(triglot.version.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", asked],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert Path(done.stdout.strip()).suffix == ".so"


def test_the_rules_are_looked_at() -> None:
    source = """
from typing import Final, Generic, Protocol, TypeVar
T = TypeVar("T")
LIMIT = 3
FIXED: Final = 3
class Reader(Protocol): ...
@dataclass(slots=True)
class Box(Generic[T]):
    value: T
class Runner:
    async def run(self): self._thread = 1
class Wrong(ValueError): ...
class Base(ABC): ...
"""
    lines = [line.partition(":")[0] for line in violations(ast.parse(source))]
    assert lines == ["6", "8", "12", "13", "11", "11", "4"]
