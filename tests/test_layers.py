"""Imports point down: `layers.toml` against every import, type-only and late ones included."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterable, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from triglot.parts import PARTS

PACKAGE = Path(__file__).resolve().parents[1] / "server" / "triglot"

TABLE = tomllib.loads(Path(__file__).with_name("layers.toml").read_text())


LAYER = {package: number for number, packages in enumerate(TABLE["layers"]) for package in packages}
"""Each package's layer, counted from the top."""
LIBRARIES: dict[str, list[str]] = TABLE["libraries"]
NEVER: dict[str, list[str]] = TABLE["never"]
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


def below(name: str, packages: Iterable[str]) -> bool:
    """Whether it is one of these, or in one; "name." stands for what is in it."""
    return any(name == package or name.startswith(package.rstrip(".") + ".") for package in packages)


def package_of(module: str) -> str | None:
    """The package of the table that it belongs to; None for a module of no layer."""
    if module == "triglot":
        return module
    return max(
        (package for package in LAYER if package != "triglot" and below(module, {package})), key=len, default=None
    )


def allowed(module: str, name: str) -> bool:
    if below(module, CODECS) and below(name, NOT_OF_CODECS):
        return False
    if any(below(name, packages) for package, packages in NEVER.items() if below(module, {package})):
        return False
    if below(name, {"triglot"}):
        package, imported = package_of(module), package_of(name)
        if package is None or imported is None:
            return False
        return package == imported or LAYER[package] < LAYER[imported]
    if name.split(".", maxsplit=1)[0] in sys.stdlib_module_names | {"numpy"}:
        return True
    return any(below(name, libraries) for package, libraries in LIBRARIES.items() if below(module, {package}))


def test_every_row_is_of_a_module() -> None:
    rows = [*LAYER, *LIBRARIES, *NEVER, *CODECS]
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
        ("triglot.demo.iris.model", "triglot.core.types"),
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
    "triglot.cli.traffic": "triglot.protocols.traffic",
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
