"""Files of a model that a client has sent with its request to load it (spec 3.9)."""

from __future__ import annotations

import re
import shutil
import tempfile
import weakref
from collections.abc import Mapping
from pathlib import Path

from triglot.core.errors import InvalidArgument

_PATH = re.compile(r"([A-Za-z0-9_-][A-Za-z0-9._-]*/)+[A-Za-z0-9_-][A-Za-z0-9._-]*")


class Upload:
    """A model's folder of such files, by their paths in it; it goes with the last one that has this.

    Blocks while it writes. Raises `InvalidArgument` for a path that cannot be, and `OSError`.
    """

    def __init__(self, name: str, files: Mapping[str, bytes]) -> None:
        for path in files:
            if not _PATH.fullmatch(path):
                raise InvalidArgument(
                    f"parameter 'file:{path}': expected file:VERSION/FILE, of letters, digits and ._- only"
                )
        folder = Path(tempfile.mkdtemp(prefix="triglot-upload-")).resolve()
        weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        self.folder = folder / name
        for path, content in files.items():
            file = self.folder / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(content)
