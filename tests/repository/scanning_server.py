"""A server that looks: what it wants after each look, and what it loads for that."""

from __future__ import annotations

from collections.abc import Callable, Collection
from pathlib import Path

from triglot.repository.scan.scanner import OnceLogger, Scan, Scanner
from triglot.repository.scan.source import ModelFiles, Root


def put(file: Path, text: str = "") -> Path:
    """A file, written in place."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def replace(file: Path, text: str) -> None:
    """A file, replaced in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    (part := file.with_name(f".{file.name}.part")).write_text(text)
    part.rename(file)


def a_repository(folder: Path) -> Path:
    """With one model, which serves versions 1 and 2."""
    for version in ("1", "2"):
        put(folder / "m" / version / "model.py", "model")
    return folder


class ScanningServer:
    """A watch of some roots, by a server that serves what it wants at once.

    `on_load` is what models do while they load. `loads` are the versions that were loaded, "m/1", in their order.
    """

    def __init__(
        self, *roots: Root, settle_seconds: float = 0.0, on_load: Callable[[ModelFiles], object] = lambda _: None
    ) -> None:
        self.watch = Scanner(settle_seconds)
        self.roots = roots
        self.on_load = on_load
        self.loads: list[str] = []
        self.broken: set[str] = set()
        """Those that cannot be loaded."""
        self._tried: set[ModelFiles] = set()
        self.problem_log = OnceLogger()
        self.last = self.watch.scan(roots, {}, [], lambda _: True)
        self.problem_log.log(self.last, lambda _: True)
        self._load()

    def look(self, loaded: Collection[ModelFiles] | None = None, *, busy: Collection[str] = ()) -> Scan:
        """One look; `loaded` are those that serve, all by default. The models that are `busy` load to its end."""
        held = [files for versions in self.last.wanted.values() for files in versions.values()]
        serving = [files for files in held if str(files) not in self.broken]
        self.last = self.watch.scan(self.roots, self.last.wanted, serving if loaded is None else loaded, busy=busy)
        self.problem_log.log(self.last, lambda _: False)
        self._load()
        return self.last

    def _load(self) -> None:
        wanted = {files for versions in self.last.wanted.values() for files in versions.values()}
        for files in sorted(wanted - self._tried, key=str):
            self.loads.append(f"{files.name}/{files.version}")
            self.on_load(files)
        self._tried = wanted

    def versions(self) -> dict[str, list[int]]:
        """What is wanted now."""
        return {name: list(versions) for name, versions in self.last.wanted.items()}
