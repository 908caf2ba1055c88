"""Hatchling's hook: a wheel has the compiled modules, for this Python, with `TRIGLOT_COMPILE=1`; else none."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

sys.path.insert(0, str(Path(__file__).parent))

import compiled


class CompiledModules(BuildHookInterface):  # type: ignore[misc]  # hatchling has no types here.
    """Adds the libraries that `codegen/compiled.py` makes beside the sources, which stay."""

    PLUGIN_NAME = "custom"

    def dependencies(self) -> list[str]:
        """Return what a compiled build needs besides hatchling."""
        lines = compiled.REQUIREMENTS.read_text().splitlines() if _wanted() else []
        return [line for line in lines if line and not line.startswith("#")]

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the modules, unless this is an editable installation."""
        if not _wanted() or version == "editable":
            return
        folder = Path(self.directory).absolute() / "compiled"
        compiled.copy_package(folder)
        subprocess.run([sys.executable, compiled.__file__, "--in", str(folder)], check=True, stdout=sys.stderr)
        for library in folder.rglob("*.so"):
            build_data["force_include"][str(library)] = str(library.relative_to(folder))
        build_data["pure_python"] = False
        build_data["infer_tag"] = True


def _wanted() -> bool:
    return os.environ.get("TRIGLOT_COMPILE") == "1"
