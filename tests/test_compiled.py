"""The rules for modules that are compiled (`layers.toml`): they keep out what mypyc compiles wrongly or slowly."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from test_layers import MODULES, TABLE

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


def test_without_a_compiler_nothing_is_compiled() -> None:
    command = [sys.executable, str(ROOT / "codegen" / "compiled.py"), "--within", "60"]
    environment = os.environ | {"CC": "no-such-compiler"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "not compiled: there is no C compiler (no-such-compiler)\n"


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
