"""Imports point down: `layers.toml` against every import, type-only and late ones included."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from triglot.parts import PARTS

PACKAGE = Path(__file__).resolve().parents[1] / "server" / "triglot"

TABLE = tomllib.loads(Path(__file__).with_name("layers.toml").read_text())


def names(row: list[str]) -> set[str]:
    """A row with its groups spelled out."""
    groups = (names(TABLE["groups"][name[1:]]) for name in row if name.startswith("@"))
    return {name for name in row if not name.startswith("@")}.union(*groups)


MAY_IMPORT = {module: names(row) for module, row in TABLE["may_import"].items()}
NEVER = {module: names(row) for module, row in TABLE["never"].items()}
CODECS, NOT_OF_CODECS = set(TABLE["codecs"]["modules"]), set(TABLE["codecs"]["may_not_import"])


def module_name(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


def imports_of(path: Path) -> Iterator[str]:
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


@pytest.fixture(scope="module")
def imports() -> dict[str, set[str]]:
    """By module, every module that it imports."""
    return {module: set(imports_of(path)) for module, path in MODULES.items()}


def below(name: str, packages: set[str]) -> bool:
    """Whether it is one of these, or in one; "name." stands for what is in it."""
    return any(name == package or name.startswith(package.rstrip(".") + ".") for package in packages)


def allowed(module: str, name: str) -> bool:
    row = max((row for row in MAY_IMPORT if below(module, {row})), key=len)
    if below(module, CODECS) and below(name, NOT_OF_CODECS):
        return False
    if any(below(name, packages) for package, packages in NEVER.items() if below(module, {package})):
        return False
    if name.split(".", maxsplit=1)[0] in sys.stdlib_module_names:
        return True
    if row == "triglot":  # The package itself; a module that no row knows needs one.
        return module == row and below(name, MAY_IMPORT[row])
    return below(name, MAY_IMPORT[row] | {row})


def test_every_row_is_of_a_module() -> None:
    rows = [*MAY_IMPORT, *NEVER, *CODECS]
    assert [row for row in rows if not any(below(module, {row}) for module in MODULES)] == []


def test_imports_point_down(imports: dict[str, set[str]]) -> None:
    found = [(module, name) for module, names in imports.items() for name in sorted(names)]
    assert len(found) > len(MODULES)
    assert [f"{module} imports {name}" for module, name in found if not allowed(module, name)] == []


def test_no_circular_imports(imports: dict[str, set[str]]) -> None:
    """Not even of imports that only types need."""
    used = {module: (names & MODULES.keys()) - {module} for module, names in imports.items()}
    TopologicalSorter(used).prepare()


def test_a_circle_is_found() -> None:
    with pytest.raises(CycleError):
        TopologicalSorter({"a": {"b"}, "b": {"c"}, "c": {"a"}}).prepare()


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("triglot.core.tensor", "triglot.pb"),
        ("triglot.core.tensor", "orjson"),
        ("triglot.scheduling.servable", "triglot.repository.manager.registry"),
        ("triglot.protocols.kserve.codec", "asyncio"),
        ("triglot.protocols.kserve.codec", "triglot.dataplane.dataplane"),
        ("triglot.transports.rest.calls", "triglot.protocols.kserve.rest"),
        ("triglot.transports.rest.calls", "triglot.transports.http1.server"),
        ("triglot.transports.rest.server", "grpc"),
        ("triglot.repository.scan.source", "triglot.pb"),
        ("triglot.repository.config.settings", "triglot.backends"),
        ("triglot.backends.python", "grpc"),
        ("triglot.demo.half_plus_two.model", "triglot.core.types"),
        ("triglot.somewhere_new", "triglot.core"),
    ],
)
def test_the_table_refuses(module: str, name: str) -> None:
    assert not allowed(module, name)


# --- parts ---

CORE_PARTS = {"triglot.protocols.kserve"}
"""In the table of parts, too: KServe V2 is what the core serves."""
COMMANDS = {
    "triglot.cli.replay": "triglot.protocols.tfserving",
    "triglot.cli.tfserving": "triglot.protocols.tfserving",
    "triglot.cli.token": "triglot.access",
}
"""Commands of one part."""
FOLDERS_OF_PARTS = ("triglot.protocols", "triglot.backends", "triglot.executors")
FOLDER_PARTS = ("triglot.access", "triglot.telemetry.spans", "triglot.workers")


def folder_of(target: str) -> str:
    """The folder, or the file, that a part is."""
    module = target.partition(":")[0]
    package = module.rpartition(".")[0]
    in_folder = package.rpartition(".")[0] in FOLDERS_OF_PARTS or package in FOLDER_PARTS
    return package if in_folder else module


def test_a_part_imports_the_core_and_no_other_part(imports: dict[str, set[str]]) -> None:
    """And the core imports no part, but for the commands of one."""
    parts = {folder_of(target) for targets in PARTS.values() for target in targets.values()} - CORE_PARTS
    assert {part for part in parts if part not in MODULES} == set()
    wrong = [
        f"{module} imports {name}"
        for module, found in imports.items()
        for name in found
        for part in parts
        if below(name, {part}) and not below(module, {part}) and COMMANDS.get(module) != part
    ]
    assert sorted(wrong) == []
