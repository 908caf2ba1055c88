"""Start script of a model's process in a Python that is not the server's: makes the server's package importable.

Run by its path, and again by each process that the model's code starts with `multiprocessing`. Until then these
can import nothing of triglot.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

PACKAGES = "_TRIGLOT_PACKAGES"
"""Environment variable with the folders of packages, as JSON: those to find first, and those to find last."""


COMPILED = "__mypyc"
"""Ends the name of the library with the compiled modules of a package, which is beside its folder."""


class Folders(MetaPathFinder):
    """Import finder of packages by name. `folders`: the folder of each package."""

    def __init__(self, folders: Mapping[str, str]) -> None:
        self._folders = folders

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """See `MetaPathFinder`."""
        package = fullname.removesuffix(COMPILED)
        folder = self._folders.get(package)
        if folder is None:
            return None
        if package != fullname:
            return PathFinder.find_spec(fullname, [folder.rpartition("/")[0]])
        return importlib.util.spec_from_file_location(
            fullname, f"{folder}/__init__.py", submodule_search_locations=[folder]
        )


if __name__ in ("__main__", "__mp_main__"):
    ours, lent = json.loads(os.environ[PACKAGES])
    sys.meta_path.insert(0, Folders(ours))
    sys.meta_path.append(Folders(lent))
if __name__ == "__main__":
    from triglot.executors.process.main import main

    main()
