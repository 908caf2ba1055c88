"""Imports point down: `layers.toml` against every import, type-only and late ones included."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[1] / "server" / "triglot"

TABLE = tomllib.loads(Path(__file__).with_name("layers.toml").read_text())
ASYNC = {"asyncio", "grpc", "aiohttp", "threading", "socket", "selectors"}


def names(row: list[str]) -> set[str]:
    """A row with its groups spelled out."""
    groups = (names(TABLE["groups"][name[1:]]) for name in row if name.startswith("@"))
    return {name for name in row if not name.startswith("@")}.union(*groups)


MAY_IMPORT = {module: names(row) for module, row in TABLE["may_import"].items()}
ITSELF_ONLY = {module: set(row) for module, row in TABLE["itself_only"].items()}
# Codecs are functions of bytes: they neither wait nor talk.
NO_IO = "triglot.protocols"
MAY_WAIT = {
    "triglot.protocols.kserve.service",
    "triglot.protocols.kserve.routes",
    "triglot.protocols.kserve.stream",
    "triglot.protocols.kserve.stream_requests",
    "triglot.protocols.grpc",
}


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports; `from a import b` is a.b when that is a module, a otherwise."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                place = PACKAGE.parent / name.replace(".", "/")
                yield name if place.is_dir() or place.with_suffix(".py").is_file() else str(node.module)


def below(name: str, packages: set[str]) -> bool:
    return any(name == package or name.startswith(package + ".") for package in packages)


def allowed(module: str, name: str) -> bool:
    row = max((row for row in MAY_IMPORT if below(module, {row})), key=len)
    if name.split(".", maxsplit=1)[0] in sys.stdlib_module_names:
        waits = below(module, {NO_IO}) and not below(module, MAY_WAIT)
        return not (waits and below(name, ASYNC))
    if row == "triglot" and module != "triglot":
        return False  # A module that no row knows: give it one.
    itself = ITSELF_ONLY.get(row, set())
    return below(name, MAY_IMPORT[row] - itself) or name in itself


def test_every_row_is_of_a_module() -> None:
    assert [row for row in MAY_IMPORT if not any(below(module, {row}) for module in MODULES)] == []
    assert ITSELF_ONLY.keys() <= MAY_IMPORT.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    assert [name for name in imports(MODULES[module]) if not allowed(module, name)] == []


def test_there_are_no_circles() -> None:
    """Not even of imports that only types need."""
    used = {
        name: {one for one in imports(path) if one in MODULES and one != name} for name, path in MODULES.items()
    }
    TopologicalSorter(used).prepare()


def test_a_circle_is_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


def test_only_transports_know_a_network_library() -> None:
    known = {(module, name.split(".")[0]) for module, path in MODULES.items() for name in imports(path)}
    assert {pair for pair in known if pair[1] in ("grpc", "aiohttp", "httptools")} == {
        ("triglot.transports.grpc_server", "grpc"),
        ("triglot.transports.aiohttp_ahead", "aiohttp"),
        ("triglot.transports.aiohttp_connections", "aiohttp"),
        ("triglot.transports.aiohttp_exchange", "aiohttp"),
        ("triglot.transports.aiohttp_log", "aiohttp"),
        ("triglot.transports.aiohttp_server", "aiohttp"),
        ("triglot.transports.http1.requests", "httptools"),
    }


# HTTP itself is a function of bytes, too.
@pytest.mark.parametrize("name", ["heads", "requests"])
def test_the_core_of_http1_does_no_io(name: str) -> None:
    assert ASYNC.isdisjoint(imports(MODULES[f"triglot.transports.http1.{name}"]))


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("triglot.core.tensor", "triglot.pb"),
        ("triglot.core.tensor", "orjson"),
        ("triglot.engine.queue", "numpy"),
        ("triglot.protocols.kserve.codec", "asyncio"),
        ("triglot.protocols.kserve.codec", "triglot.dataplane"),
        ("triglot.transports.http_calls", "triglot.protocols.kserve.rest"),
        ("triglot.transports.http_calls", "triglot.transports.http1.server"),
        ("triglot.transports.http_server", "grpc"),
        ("triglot.repository.source", "triglot.pb"),
        ("triglot.repository.settings", "google.protobuf"),
        ("triglot.backends.python", "onnxruntime"),
        ("triglot.demo.half_plus_two.model", "triglot.core.types"),
        ("triglot.somewhere_new", "triglot.core"),
    ],
)
def test_the_table_refuses(module: str, name: str) -> None:
    assert not allowed(module, name)
